"""What this host can run, what is missing, and how much disk and memory the plan needs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from pipeline import host, jsonio, plan
from pipeline.formats import WEIGHT_BITS
from pipeline.params import load_params
from pipeline.runstage import disk_free_bytes, environments
from pipeline.specs import Params

# Measured on this project's default environments: torch and its CUDA libraries once, shared by uv's cache.
SHARED_ENV_BYTES = 6_500_000_000
SMALL_ENV_BYTES = {"client": 1_000_000_000}
UNKNOWN_MODEL_BYTES = 300_000_000


def disk_needed_bytes(params: Params, made: dict[str, Any], root: Path = Path(".")) -> tuple[int, list[str]]:
    """Return the bytes that the plan's artifacts and DVC's copies of them need, and models of unknown size."""
    total, unknown = 0, []
    for model in made["fetch"]:
        facts = root / plan.facts_path(model)
        size = jsonio.read_json(facts)["weight_bytes"] if facts.exists() else None
        if size is None:
            unknown.append(model)
            size = UNKNOWN_MODEL_BYTES
        recipes = [item["recipe"] for item in made["quantize"].values() if item["model"] == model]
        checkpoints = size + sum(size * WEIGHT_BITS[params.recipes[r].format] / 16 for r in recipes)
        total += int(2 * checkpoints)
    return total, unknown


def memory_needed_bytes(made: dict[str, Any], root: Path = Path(".")) -> int:
    """Return a rough peak: a bf16 model twice in fp32 while it is quantized, plus two servers for a benchmark."""
    sizes = [UNKNOWN_MODEL_BYTES]
    for model in made["fetch"]:
        facts = root / plan.facts_path(model)
        if facts.exists():
            sizes.append(jsonio.read_json(facts)["weight_bytes"])
    return int(4 * max(sizes) + 2 * (2_500_000_000 + max(sizes)))


def doctor(params_path: Path) -> int:
    """Print the findings; return 0 when the default run can start here, else 3."""
    params = load_params(params_path)
    made = plan.make_plan(params, plan.known_configs(Path("."), params))
    facts = host.fingerprint()
    bad = []
    print(f"host      {facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB, {facts['os']}")
    print(f"          {' '.join(facts['cpu_features']) or 'no low-precision CPU features seen'}")
    print(f"gpus      {', '.join(g['name'] for g in facts['gpus']) or 'none'}")
    for tool, advice in (("uv", "pip install uv"), ("git", "your package manager")):
        found = shutil.which(tool)
        print(f"{tool:9} {found or 'MISSING: ' + advice}")
        if not found:
            bad.append(f"{tool} is missing ({advice})")
    for env in environments():
        state = "installed" if Path(f"stages/{env}/.venv").is_dir() else "not installed yet (its first stage does)"
        print(f"env       {env}: {state}")
    missing = {i["env"] for i in (*made["quantize"].values(), *made["measure"].values())} - set(environments())
    bad += [f"the plan needs the environment {env}, which has no lock in stages/" for env in sorted(missing)]
    need, unknown = disk_needed_bytes(params, made)
    if any(not Path(f"stages/{env}/.venv").is_dir() for env in environments()):
        need += SHARED_ENV_BYTES + sum(SMALL_ENV_BYTES.values())
    free = disk_free_bytes()
    note = f" ({', '.join(unknown)} not fetched: size guessed)" if unknown else ""
    print(f"disk      {need / 1e9:.1f} GB needed at most, {free / 1e9:.1f} GB free{note}")
    if free < need:
        bad.append(f"{(need - free) / 1e9:.1f} GB of disk are missing")
    memory = memory_needed_bytes(made)
    print(f"memory    {memory / 2**30:.1f} GiB needed at most, {facts['memory_gib']} GiB here")
    if memory > facts["memory_gib"] * 2**30:
        bad.append("memory is short")
    targets = {cell["target"]: params.targets[cell["target"]] for cell in made["cells"]}
    for name, target in targets.items():
        here = host.is_here(target)
        print(f"target    {name}: {'this host can measure it' if here else f'needs {target.gpu}, not here'}")
    for line in bad:
        print(f"problem   {line}")
    print(
        "The default `uv run dvc repro` can run here." if not bad else "Mend the problems above, then run this again."
    )
    return 3 if bad else 0

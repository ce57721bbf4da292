"""Make one quantized checkpoint around a backend's `quantize(source, out, recipe, calib_ids, seed)`.

Everything that is the same for every backend: checks before the work, a scratch folder that becomes the artifact by one
rename, non-weight files byte-equal to the source, and the record of how it was made.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline import host, jsonio
from pipeline.checkpoint import Checkpoint, linear_layers
from pipeline.errors import InputError, WorkError, unknown
from pipeline.params import load_params
from pipeline.plan import why_not_made
from pipeline.producers import for_backend, makes, needs_calibration, producers_of, successor
from pipeline.program import lock_sha256, versions
from pipeline.runstage import installation, need_disk
from pipeline.specs import Params, Recipe

Backend = Callable[[Path, Path, dict[str, Any], list[list[int]], int], None]
WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json")


def arguments(*names: str, optional: tuple[str, ...] = ()) -> argparse.Namespace:
    """Parse the options `--name value` of a stage program; unknown ones end with argparse's message."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    for name in (*names, *optional):
        parser.add_argument(f"--{name}", required=name in names)
    return parser.parse_args()


def make(env: str, backend: Callable[[], Backend], packages: tuple[str, ...]) -> None:
    """Run the quantize stage of environment `env`; `backend` imports its library only after the cheap checks.

    Raises:
        InputError: unknown ids, missing source or calibration set, a group size that does not divide.
        WorkError: not enough disk, or nothing was quantized.
    """
    args = arguments("model", "recipe", optional=("target",))
    params = load_params()
    recipe, source = check(params, args.model, args.recipe)
    name = artifact_id(env, args.model, args.recipe, recipe)
    if args.target:
        need_target(params, args.target)
        name += f".{args.target}"
    calib_ids, calib = load_calibration(recipe, args.model)
    out = Path("artifacts/checkpoints") / name
    scratch = Path(".quantpress/scratch") / name
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    before = Checkpoint.open(source)
    need_disk(2 * before.weight_bytes, f"Quantizing {name}")
    asked = for_backend(recipe, env)
    print(f"quantize {name}: {env} {asked['algorithm']} to {recipe.format}", flush=True)
    start = time.monotonic()
    allowed = {"trust_remote_code": params.models[args.model].trust_remote_code}
    backend()(source, scratch, asked | allowed, calib_ids, 0)
    wall_s = time.monotonic() - start
    copy_side_files(source, scratch)
    record = {
        "schema": "quantpress.quantize/1",
        "model": args.model,
        "recipe": args.recipe,
        "spec": {key: value for key, value in asked.items() if value is not None},
        "backend": recipe.backend if env == successor(recipe) else env,
        "made_by": env,
        "made_on": args.target,
        "wall_s": round(wall_s, 1),
        "peak_memory_gib": round(peak_memory_gib(), 2),
        **what_changed(before, Checkpoint.open(scratch)),
        "calib": calib,
        "seed": 0,
        "versions": versions(*packages, "torch", "transformers", "compressed-tensors"),
        "env_lock_sha256": lock_sha256(env),
        "installation": installation(env),
        "git_commit": host.git_commit(),
        "host": host.fingerprint(),
    }
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(scratch, out)
    jsonio.write_json(Path("artifacts/results") / name / "quantize.json", record)
    print(
        json.dumps({k: record[k] for k in ("wall_s", "weight_bytes", "effective_bits_per_weight")}),
        flush=True,
    )


def need_target(params: Params, target: str) -> None:
    """Refuse to make on another kind of machine what is to be made on `target`.

    Raises:
        InputError: no such target (nearest name given).
        HostError: this host is not that target.
    """
    if target not in params.targets:
        raise unknown("target", target, params.targets, "params.yaml")
    host.need_target(params.targets[target], target)


def check(params: Params, model: str, recipe_id: str) -> tuple[Recipe, Path]:
    """Check what can be checked before a library is imported; return the recipe and the source folder."""
    if model not in params.models:
        raise unknown("model", model, params.models, "params.yaml")
    if recipe_id not in params.recipes:
        raise unknown("recipe", recipe_id, params.recipes, "params.yaml")
    recipe = params.recipes[recipe_id]
    source = Path("artifacts/models") / model
    if not (source / "config.json").is_file():
        raise InputError(f"{source} holds no checkpoint. Run `uv run dvc repro fetch@{model}`.")
    reason = why_not_made(model, recipe, jsonio.read_json(source / "config.json"))
    if reason:
        raise InputError(f"recipes.{recipe_id}: {reason}.")
    return recipe, source


def artifact_id(env: str, model: str, recipe_id: str, recipe: Recipe) -> str:
    """Return the id of what environment `env` makes of a recipe: one artifact for each producer.

    Raises:
        InputError: `env` does not make the recipe's scheme.
    """
    if not makes(env, recipe):
        raise InputError(f"{env} does not make {recipe.format} by {recipe.algorithm} (recipes.{recipe_id}).")
    first = next(producer for producer in producers_of(recipe) if producer.backend == env)
    return first.id(model, recipe_id, recipe)


def load_calibration(recipe: Recipe, model: str) -> tuple[list[list[int]], dict[str, Any] | None]:
    """Return the frozen token ids `[samples][tokens]` that the recipe uses and what the record says of them."""
    if recipe.calib_set is None or not needs_calibration(recipe):
        return [], None
    folder = Path("calib_data") / f"{recipe.calib_set}.{model}"
    card = jsonio.read_json(folder / "card.json")
    ids = jsonio.read_json(folder / "tokens.json")["input_ids"]
    if not ids:
        raise InputError(f"{folder} is empty. Run `uv run dvc repro -f calibrate@{folder.name}`.")
    used = ids[: recipe.calib_samples] if recipe.calib_samples else ids
    warnings = list(card["warnings"])
    if len(used) < len(ids):
        warnings.append(f"the recipe uses the first {len(used)} of {len(ids)} samples")
    return used, {
        "set": recipe.calib_set,
        "samples": len(used),
        "tokens": sum(map(len, used)),
        "digest": card["digest"],
        "warnings": warnings,
    }


def copy_side_files(source: Path, out: Path) -> None:
    """Copy every file of the source that is neither weights nor config.json, byte for byte.

    Backends write their own tokenizer files, generation config and chat template, or none; what is served must be the
    source's.
    """
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != "config.json" and not path.name.endswith(WEIGHT_SUFFIXES):
            shutil.copyfile(path, out / path.name)


def what_changed(before: Checkpoint, after: Checkpoint) -> dict[str, Any]:
    """Return sizes, effective bits per weight, and which linear layers were left alone.

    Effective bits count everything stored (scales, zero points, what stays in bf16) over the source's parameters.

    Raises:
        WorkError: no linear layer was quantized.
    """
    layers = [layer for layer in linear_layers(before.config, before.tensors) if f"{layer}.weight" in before.tensors]
    same = [x for x in layers if f"{x}.weight" in after.tensors and _plain(after.tensors[f"{x}.weight"].dtype)]
    if len(same) == len(layers):
        raise WorkError("No linear layer was quantized: the backend left all of them alone. Check the recipe's format.")
    return {
        "weight_bytes": after.weight_bytes,
        "source_weight_bytes": before.weight_bytes,
        "effective_bits_per_weight": round(8 * after.weight_bytes / before.parameters, 3),
        "quantized_layers": len(layers) - len(same),
        "left_alone": [
            *same,
            *([] if "lm_head.weight" in before.tensors else ["lm_head (tied to embed_tokens)"]),
        ],
    }


def _plain(dtype: str) -> bool:
    return dtype in ("BF16", "F16", "F32")


def peak_memory_gib() -> float:
    """Return the peak resident memory of this process in GiB (ru_maxrss is kilobytes on Linux, bytes on macOS)."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30

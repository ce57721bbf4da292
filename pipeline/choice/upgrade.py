"""An engine's upgrade judged like a new precision: the same cell at the old revision is the baseline, item by item."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from pipeline import fidelity, jsonio
from pipeline.choice.candidates import QUALITY_KINDS
from pipeline.choice.revisions import RESULTS, Revision
from pipeline.errors import InputError
from pipeline.evidence.checks import Docs, checks, judge
from pipeline.evidence.policy import PATH, load_policy
from pipeline.evidence.verdicts import FAIL, INCONCLUSIVE, PASS
from pipeline.fidelity import Logprobs
from pipeline.paired import compare_items
from pipeline.params import load_params
from pipeline.report.sources import Doc, read_doc


def judge_upgrade(root: Path, cell: str, old: Revision, new: Revision) -> dict[str, Any]:
    """Judge a cell at `new` against itself at `old` by policy.yaml: lint, canary, tasks, fidelity.

    Speed is not judged here: the two were not timed in one run. The gate judges it against the new baseline.

    Returns:
        verdict, reasons, checks; INCONCLUSIVE where the old answers are not in the DVC cache.
    """
    model, recipe = cell.split(".")[:2]
    now = new.read(f"{RESULTS}/{cell}/eval.json") or {}
    with tempfile.TemporaryDirectory(prefix="quantpress.") as scratch:
        folders = [reference(root, cell, rev, Path(scratch) / str(i)) for i, rev in enumerate((old, new))]
        for rev, folder in zip((old, new), folders, strict=True):
            if folder is None:
                reason = (
                    f"the answers of {cell} at {rev} (artifacts/raw/{cell}/eval) are not in the DVC cache, so nothing "
                    f"can be paired; `uv run dvc pull` on a host that has a remote, or evaluate at that revision"
                )
                return {"verdict": INCONCLUSIVE, "reasons": [reason], "checks": {}}
        try:
            paired = pair(Path(str(folders[0])), Path(str(folders[1])), (now.get("fidelity") or {}).get("top_k") or 20)
        except ValueError as error:
            return {"verdict": INCONCLUSIVE, "reasons": [f"the two are not paired: {error}"], "checks": {}}
    params = load_params(root / "params.yaml")
    policy = load_policy(root / PATH, params, [cell])
    path = f"{cell} at {new} against {old}"
    bench = Doc(path, None, "an upgrade's speed is judged by the gate, against the new baseline")
    docs = Docs(
        evaluation=Doc(path, {"canary": now.get("canary") or {}, "server": now.get("server") or {}} | paired),
        bench=bench,
        quantize=read_doc(root, f"{RESULTS}/{model}.{recipe}/quantize.json", None),
        lint=read_doc(root, f"{RESULTS}/{model}.{recipe}/lint.json", None),
        model=read_doc(root, f"{RESULTS}/{model}/model.json", None),
    )
    found = {n: c for n, c in judge(checks(docs, policy), policy).items() if c["kind"] in QUALITY_KINDS}
    failed = [n for n, c in found.items() if c["verdict"] == FAIL and c["tier"] != "advisory"]
    open_ = [n for n, c in found.items() if c["verdict"] not in (PASS, FAIL) and c["tier"] == "critical"]
    verdict = FAIL if failed else INCONCLUSIVE if open_ else PASS
    return {"verdict": verdict, "reasons": [_words(n, c) for n, c in found.items()], "checks": found}


def _words(name: str, check: dict[str, Any]) -> str:
    if "damage" not in check:
        return f"{name}: {check['verdict']} ({check['reason']})"
    unit = check["damage_unit"]
    return (
        f"{name}: {check['verdict']}, damage {check['damage']:.3g} {unit}, at most {check['damage_bound']:.3g}, "
        f"margin {check['margin']:.3g}"
    )


def pair(old: Path, new: Path, top_k: int) -> dict[str, Any]:
    """Return tasks and fidelity of one reference folder against another, as eval.json holds them.

    Raises:
        ValueError: other items or another text.
    """
    tasks = {}
    for path in sorted(new.glob("scores.*.json")):
        if (old / path.name).is_file():
            scores = [jsonio.read_json(folder / path.name) for folder in (old, new)]
            tasks[path.name.split(".")[1]] = compare_items(scores[0], scores[1])
    found: dict[str, Any] = {"tasks": tasks, "fidelity": {}}
    stored = [folder / "logprobs.npz" for folder in (old, new)]
    if all(path.is_file() for path in stored):
        one, two = (_logprobs(path) for path in stored)
        found["fidelity"] = fidelity.summarize(one, two, top_k)
    return found


def _logprobs(path: Path) -> Logprobs:
    with np.load(path, allow_pickle=False) as stored:
        return Logprobs(**{name: stored[name] for name in Logprobs._fields})


def reference(root: Path, cell: str, revision: Revision, out: Path) -> Path | None:
    """Return a folder with a cell's answers at a revision: scores and distributions; None where they cannot be had.

    Raises:
        InputError: DVC is not installed.
    """
    raw = f"artifacts/raw/{cell}/eval"
    if revision.commit is None:
        folder = root / raw / "reference"
        return folder if folder.is_dir() else None
    command = [sys.executable, "-m", "dvc", "get", ".", raw, "--rev", revision.commit, "-o", str(out), "--quiet"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=600)
    except OSError as error:
        raise InputError(f"DVC cannot be started: {error}.") from None
    if done.returncode != 0 or not (out / "reference").is_dir():
        shutil.rmtree(out, ignore_errors=True)
        return None
    return out / "reference"

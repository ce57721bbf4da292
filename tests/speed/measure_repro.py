"""How fast is the default run? `uv run python -m tests.speed.measure_repro [--folder F]`; prints one JSON document.

Measured in a clean copy of the working tree: the whole cold run with the time of each stage, a second run with nothing
changed against DVC's own floor (a pipeline of one stage, and `dvc status` of this one), and which stages a new recipe
or a bumped lock reruns (dry). `--finished F` leaves the cold run out and takes the clone F, where it has ended.
A benchmark, not a test: these times depend on the machine, and the load average stands beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pipeline import host
from tests.conftest import Workspace, _copy


def timed(workspace: Workspace, *command: str) -> tuple[float, str]:
    """Run `python -m ...` in the workspace; return seconds and standard output."""
    start = time.monotonic()
    done = workspace.run(*command, timeout_s=7200)
    return round(time.monotonic() - start, 1), done.stdout


def would_run(workspace: Workspace) -> list[str]:
    """Return the stages that `dvc repro --dry` would run, without the always-changed probe."""
    _, out = timed(workspace, "dvc", "repro", "--dry")
    stages = [line.split("'")[1] for line in out.splitlines() if line.startswith("Running stage")]
    return [stage for stage in stages if stage not in ("check", "probe")]


def changed(workspace: Workspace) -> list[str]:
    """Return the stages of the default run that are new or whose inputs changed: a dry run stops at a new output."""
    _, out = timed(workspace, "dvc", "status", "--json")
    stages = json.loads(out[out.index("{") :])
    return [stage for stage in stages if stage not in ("check", "probe") and ":" not in stage]


def floor_s() -> float:
    """Return the seconds of a `dvc repro` of one unchanged stage in an empty repository."""
    folder = Path(tempfile.mkdtemp())
    dvc = [sys.executable, "-m", "dvc"]
    try:
        (folder / "dvc.yaml").write_text("stages: {a: {cmd: echo a > a, outs: [a]}}\n", encoding="utf-8")
        for command in (["git", "init", "-q"], [*dvc, "init", "-q"], [*dvc, "repro", "-q"]):
            subprocess.run(command, cwd=folder, check=True, capture_output=True)
        start = time.monotonic()
        subprocess.run([*dvc, "repro", "-q"], cwd=folder, check=True, capture_output=True)
        return round(time.monotonic() - start, 1)
    finally:
        shutil.rmtree(folder)


def add_recipe(params: dict[str, Any]) -> None:
    """Add a recipe `int4-g32` everywhere that `int4` stands."""
    params["recipes"]["int4-g32"] = params["recipes"]["int4"] | {"group_size": 32}
    for row in params["matrix"]:
        row["recipes"].append("int4-g32")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the copy is made (default: a temporary folder)")
    parser.add_argument("--finished", type=Path, help="a clone whose run has ended: measure only what comes after it")
    args = parser.parse_args()
    folder = args.finished or args.folder or Path(tempfile.mkdtemp(prefix="quantpress-speed-"))
    folder.mkdir(parents=True, exist_ok=True)
    workspace = Workspace(folder) if args.finished else _copy(folder)
    result: dict[str, Any] = {"host": host.fingerprint(), "load_average_before": host.load_average()}
    if not args.finished:
        result["cold_run_s"], _ = timed(workspace, "dvc", "repro")
    lines = (folder / ".quantpress/times.jsonl").read_text(encoding="utf-8").splitlines()
    result["stages_s"] = {entry["stage"]: entry["wall_s"] for entry in map(json.loads, lines)}
    result["unchanged_run_s"], out = timed(workspace, "dvc", "repro")
    result["unchanged_run_ran"] = [x for x in out.splitlines() if x.startswith("Running stage")]
    result["dvc_floor_s"] = floor_s()
    # DVC's own work over these files, without a command of ours: it parses params.yaml once per stage.
    result["dvc_status_s"], _ = timed(workspace, "dvc", "status", "-q")
    lock = folder / "stages/gptqmodel/uv.lock"
    text = lock.read_text(encoding="utf-8")
    lock.write_text(text + "# bumped\n", encoding="utf-8")
    result["bumped_gptqmodel_lock_reruns"] = would_run(workspace)
    lock.write_text(text, encoding="utf-8")
    workspace.edit(add_recipe)
    result["new_recipe_runs"] = changed(workspace)
    result["load_average_after"] = [round(x, 2) for x in os.getloadavg()]
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

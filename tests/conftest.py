"""A workspace: a copy of the working tree without results, where stages run as a user would run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
LEFT_OUT = ("artifacts/", "calib_data/", "dvc.lock")
Run = Callable[..., subprocess.CompletedProcess[str]]


class Workspace:
    """A clean copy of the project; `run` calls the project's own Python in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(self, *command: str, check: bool = True, timeout_s: float = 1500) -> subprocess.CompletedProcess[str]:
        """Run `python -m ...` in the workspace; on failure show what it printed."""
        env = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=self.path,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and done.returncode != 0:
            pytest.fail(
                f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            )
        return done

    def edit(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Change params.yaml and write the plan anew."""
        path = self.path / "params.yaml"
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        change(raw)
        path.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
        self.run("pipeline", "plan")


def _copy(path: Path) -> Workspace:
    names = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in names:
        # The plan depends on the committed facts of fetched models, as it does in a clean clone.
        kept = not name.startswith(LEFT_OUT) or Path(name).match("artifacts/results/*/model.json")
        if kept and (ROOT / name).is_file():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, path / name)
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@example.org", "commit", "-qm", "t"],
    ):
        subprocess.run(["git", *command], cwd=path, check=True)
    return Workspace(path)


@pytest.fixture(scope="session")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """One workspace for the session: environments install once, the default model is fetched once."""
    return _copy(tmp_path_factory.mktemp("workspace"))


@pytest.fixture(scope="session")
def fetched(workspace: Workspace) -> Path:
    """The default model, fetched by its own stage."""
    workspace.run("dvc", "repro", "fetch@smollm2-135m", "calibrate@docs.smollm2-135m")
    return workspace.path / "artifacts/models/smollm2-135m"

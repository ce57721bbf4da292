"""A real wheelhouse: one small environment from the package index, packed, cut, installed where nothing is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.stages
ROOT = Path(__file__).parents[2]
PROJECT = """\
[project]
name = "tiny"
version = "0"
requires-python = ">=3.11,<3.14"
dependencies = ["iniconfig==2.1.0", "packaging==26.2"]
[tool.uv]
package = false
[tool.quantpress]
leave-out = {packaging = "to see it left out"}
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one environment `tiny`, and its wheelhouse in parts of 1000 bytes."""
    root = tmp_path_factory.mktemp("repository")
    (root / "stages/tiny").mkdir(parents=True)
    (root / "stages/tiny/pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (root / "params.yaml").touch()
    (root / "uv.lock").write_text("package = []\n", encoding="utf-8")
    subprocess.run(["uv", "lock", "--quiet", "--project", root / "stages/tiny"], check=True)
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "wheelhouse", "tiny", "--split", "1K", "--python", python, "--out", "house"],
        cwd=root, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "1 wheels" in done.stdout and "left out: packaging" in done.stdout
    return root


def _install(root: Path) -> subprocess.CompletedProcess[str]:
    # No network: an index that cannot be reached, for both installers.
    env = os.environ | {
        "PYTHON": sys.executable,
        "UV_INDEX_URL": "http://127.0.0.1:9",
        "PIP_INDEX_URL": "http://127.0.0.1:9",
    }
    return subprocess.run(["sh", "house/install.sh"], cwd=root, env=env, capture_output=True, text=True, check=False)


def test_it_installs_without_a_network_and_the_pipeline_takes_it(packed: Path) -> None:
    assert len(list((packed / "house").glob("wheelhouse.tar.*"))) > 5
    done = _install(packed)
    assert done.returncode == 0, done.stderr
    code = (
        "from pipeline.runstage import env_python, installation; print(env_python('tiny')); print(installation('tiny'))"
    )
    asked = subprocess.run(
        [sys.executable, "-c", code], cwd=packed, capture_output=True, text=True, check=True,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},  # without uv on PATH: an installation would end in an error
    )  # fmt: skip
    python, note = asked.stdout.splitlines()
    assert "to see it left out" in note
    found = subprocess.run(
        [python, "-c", "import iniconfig; print(iniconfig.__file__)"], capture_output=True, text=True
    )
    assert "stages/tiny/.venv" in found.stdout
    assert subprocess.run([python, "-c", "import packaging"], capture_output=True).returncode == 1


def test_a_flipped_byte_of_one_part_is_refused(packed: Path) -> None:
    part = packed / "house/wheelhouse.tar.003"
    whole = part.read_bytes()
    part.write_bytes(whole[:10] + bytes([whole[10] ^ 1]) + whole[11:])
    try:
        done = _install(packed)
    finally:
        part.write_bytes(whole)
    assert done.returncode == 1
    assert "other bytes than SHA256SUMS says" in done.stderr
    assert "wheelhouse.tar.003" in done.stdout + done.stderr

"""The command line: exit codes, one sentence on failure, and what doctor tells."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import doctor, host

ROOT = Path(__file__).parents[2]


def _run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env_path = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [sys.executable, "-m", "pipeline", *arguments], cwd=cwd, env=env_path, capture_output=True, text=True
    )


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (["plan", "--check"], 0, "plan.yaml is fresh"),
    (["check"], 0, "agree"),
    (["verify", "no/such/package"], 2, "has no manifest.json"),
    (["lint", "x", "--model", "smollm2-135m", "--recipe", "int5"], 2, "no recipe 'int5'"),
    (["lint", "x", "--model", "smol", "--recipe", "int4"], 2, "no model 'smol'"),
    (["package", "--model", "smollm2-135m", "--recipe", "int4", "--runtime", "vlm", "--target", "cpu"], 2,
     "Did you mean 'vllm'"),
    (["run", "cliemt", "evaluate"], 2, "Did you mean 'client'"),
    (["run", "client", "evaluat"], 2, "Did you mean 'evaluate'"),
    (["nonsense"], 2, "invalid choice"),
])  # fmt: skip
def test_commands_end_with_their_code_and_one_sentence(arguments: list[str], code: int, message: str) -> None:
    done = _run(*arguments)
    said = done.stdout + done.stderr
    assert done.returncode == code, said
    assert message in said
    assert "Traceback" not in said


def test_outside_the_repository_it_says_where_to_run(tmp_path: Path) -> None:
    done = _run("plan", cwd=tmp_path)
    assert done.returncode == 2
    assert "run from the root of the repository" in done.stderr


def test_a_recipe_that_cannot_be_made_is_an_error_of_check(tmp_path: Path) -> None:
    for name in ("pipeline", "stages"):
        (tmp_path / name).mkdir()
    (tmp_path / "artifacts/results/smollm2-135m").mkdir(parents=True)
    (tmp_path / "artifacts/results/smollm2-135m/model.json").write_text(
        '{"config": {"hidden_size": 576, "intermediate_size": 1536}, "weight_bytes": 1}'
    )
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    wrong = text.replace("backend: llmcompressor, group_size: 64}", "backend: llmcompressor, group_size: 128}")
    assert wrong != text
    (tmp_path / "params.yaml").write_text(wrong, encoding="utf-8")
    assert _run("plan", cwd=tmp_path).returncode == 0
    done = _run("check", cwd=tmp_path)
    assert done.returncode == 2
    assert "group_size 128 does not divide hidden_size 576 of smollm2-135m; group_size 64 divides" in done.stderr


def test_doctor_names_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(host, "gpus", list)
    assert doctor.doctor(Path("params.yaml")) in (0, 3)
    said = capsys.readouterr().out
    for piece in ("cores", "env       vllm_cpu", "GB needed", "target    h200: needs NVIDIA H200, not here"):
        assert piece in said
    monkeypatch.setattr(doctor, "disk_free_bytes", lambda: 10**6)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert doctor.doctor(Path("params.yaml")) == 3
    said = capsys.readouterr().out
    assert "problem   uv is missing (pip install uv)" in said
    assert "GB of disk are missing" in said

"""Results of a lent host come home whole, and two hosts do not lose each other's stages."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.errors import InputError
from pipeline.on_target_files import bring_home, keep

LOCK = Path("stages/vllm_cuda/dvc.lock")


def stage(digest: str) -> dict[str, Any]:
    return {"cmd": "make it", "outs": [{"path": "out", "hash": "md5", "md5": digest * 32}]}


def host(root: Path, target: str, digest: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host of `target` that began with this lock and measured one cell; return its results.tar.gz."""
    root.mkdir(parents=True)
    monkeypatch.chdir(root)
    result = Path(f"artifacts/results/m.fp8.vllm.{target}/bench.json")
    result.parent.mkdir(parents=True)
    result.write_text(digest, "utf-8")
    LOCK.parent.mkdir(parents=True)
    own = {f"kind@{target}": stage(digest), f"benchmark@m.fp8.vllm.{target}": stage(digest), "fetch@m": stage(digest)}
    write({"benchmark@m.fp8.vllm.h200": stage("0"), "benchmark@m.fp8.vllm.b200": stage("0")} | own)
    keep(root / "home", target)
    return root / "home/results.tar.gz"


def write(stages: dict[str, Any]) -> None:
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    LOCK.write_text(yaml.safe_dump({"schema": "2.0", "stages": stages}), "utf-8")


def test_two_hosts_keep_each_others_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = host(tmp_path / "a", "h200", "a", monkeypatch)
    second = host(tmp_path / "b", "b200", "b", monkeypatch)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    write({"benchmark@m.fp8.vllm.h200": stage("0"), "benchmark@m.fp8.vllm.b200": stage("0"), "lint@x.l40s": stage("c")})
    assert bring_home(first) == ["artifacts/results/m.fp8.vllm.h200/bench.json", LOCK.as_posix()]
    bring_home(second)
    found = yaml.safe_load(LOCK.read_text("utf-8"))["stages"]
    digests = {name: entry["outs"][0]["md5"][0] for name, entry in found.items()}
    assert digests == {
        "benchmark@m.fp8.vllm.h200": "a", "benchmark@m.fp8.vllm.b200": "b", "lint@x.l40s": "c",
        "kind@h200": "a", "kind@b200": "b", "fetch@m": "b",
    }  # fmt: skip
    assert Path("artifacts/results/m.fp8.vllm.b200/bench.json").read_text("utf-8") == "b"
    assert bring_home(second) == []


def test_the_lock_is_as_dvc_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This repository's own lock, brought home to itself, does not change by a byte."""
    own = (Path(__file__).parents[2] / LOCK).read_bytes()
    from pipeline.on_target_files import merged_lock

    here = tmp_path / "dvc.lock"
    here.write_bytes(own)
    assert merged_lock(here, own, {"h200"}) == own


@pytest.mark.parametrize(
    "name", ["../outside", "/tmp/outside", "params.yaml", "artifacts/results/../../x", "pipeline/x"]
)
def test_nothing_is_written_where_no_result_belongs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with tarfile.open("results.tar.gz", "w:gz") as tar:
        for path in ("artifacts/results/a.h200/bench.json", name):
            member = tarfile.TarInfo(path)
            member.size = 2
            tar.addfile(member, io.BytesIO(b"{}"))
    with pytest.raises(InputError, match="which is no result of a target; nothing was unpacked"):
        bring_home(Path("results.tar.gz"))
    assert not Path("artifacts").exists()


def test_a_copy_that_was_cut_off_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = host(tmp_path / "a", "h200", "a", monkeypatch).read_bytes()
    monkeypatch.chdir(tmp_path)
    Path("cut.tar.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="no whole archive of results"):
        bring_home(Path("cut.tar.gz"))
    with pytest.raises(InputError, match="There is no file nothing.tar.gz"):
        bring_home(Path("nothing.tar.gz"))

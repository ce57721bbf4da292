"""Manifests: every change of a package or its checkpoint is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import jsonio, manifest
from pipeline.errors import InputError, WorkError


@pytest.fixture
def package(tmp_path: Path) -> Path:
    checkpoint = tmp_path / "artifacts/checkpoints/m.r"
    checkpoint.mkdir(parents=True)
    (checkpoint / "model.safetensors").write_bytes(bytes(range(256)) * 8)
    (checkpoint / "config.json").write_text("{}", encoding="utf-8")
    deploy = tmp_path / "artifacts/packages/m.r.vllm.cpu/deploy"
    jsonio.write_text(deploy / "serve.yaml", "seed: 0\n")
    described = manifest.describe(checkpoint)
    record = {
        "checkpoint": {"path": "artifacts/checkpoints/m.r", "files": described},
        "files": manifest.describe(deploy),
    }
    jsonio.write_json(deploy / "manifest.json", record)
    return deploy


def test_a_whole_package_verifies_from_its_folder_or_its_parent(package: Path, tmp_path: Path) -> None:
    assert manifest.verify(package, tmp_path)["checkpoint"]["path"] == "artifacts/checkpoints/m.r"
    manifest.verify(package.parent, tmp_path)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


FAULTS = {
    "one bit flipped": (lambda c, d: _flip(c / "model.safetensors"), "model.safetensors has other bytes"),
    "truncated": (
        lambda c, d: (c / "model.safetensors").write_bytes(b"x"),
        "has 1 bytes, the manifest says 2048",
    ),
    "missing": (lambda c, d: (c / "config.json").unlink(), "config.json is missing"),
    "extra": (
        lambda c, d: (c / "pytorch_model.bin").write_bytes(b"x"),
        "pytorch_model.bin is not in the manifest",
    ),
    "edited options": (lambda c, d: (d / "serve.yaml").write_text("seed: 1\n"), "serve.yaml has other bytes"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_named(name: str, package: Path, tmp_path: Path) -> None:
    plant, message = FAULTS[name]
    plant(tmp_path / "artifacts/checkpoints/m.r", package)
    with pytest.raises(WorkError) as caught:
        manifest.verify(package, tmp_path)
    assert message in str(caught.value)


def test_a_package_whose_making_was_cut_off_is_no_package(package: Path, tmp_path: Path) -> None:
    (package / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"no manifest\.json.*cut off"):
        manifest.verify(package, tmp_path)


@pytest.mark.parametrize("content", [{}, [], {"files": {}}, {"files": {"a": 1}, "checkpoint": {}}])
def test_a_file_that_is_no_manifest_is_refused(content: object, package: Path) -> None:
    jsonio.write_json(package / "manifest.json", content)
    with pytest.raises(InputError, match="is no package manifest"):
        manifest.verify(package)


def test_a_copied_tree_verifies_from_its_own_path(package: Path, tmp_path: Path) -> None:
    assert manifest.verify(package)["checkpoint"]["path"] == "artifacts/checkpoints/m.r"


def test_a_missing_checkpoint_is_named(package: Path, tmp_path: Path) -> None:
    (tmp_path / "artifacts/checkpoints/m.r").rename(tmp_path / "elsewhere")
    with pytest.raises(WorkError, match="checkpoint .* is missing"):
        manifest.verify(package, tmp_path)


def test_json_is_whole_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    jsonio.write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        jsonio.write_json(path, {"x": float("nan")})
    assert jsonio.read_json(path) == {"x": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    path.write_text('{"x": 1', encoding="utf-8")
    with pytest.raises(InputError, match=r"a\.json is not valid JSON"):
        jsonio.read_json(path)

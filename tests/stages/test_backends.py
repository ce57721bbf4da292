"""Every backend on a small real model (the first two layers of the default one): quantize, lint, faults."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
import yaml

from pipeline.checkpoint import Checkpoint

pytestmark = pytest.mark.stages
LAYERS = 2
RECIPES = ["fp8", "fp8-dynamic", "int8", "int4", "gptq", "awq", "awq-legacy"]


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    """Write raw tensors (dtype, shape, bytes), so that a bf16 file needs no torch."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


def cut(source: Path, out: Path, layers: int = LAYERS) -> None:
    """Write the first `layers` blocks of a checkpoint as a checkpoint."""
    out.mkdir(parents=True)
    whole = Checkpoint.open(source)
    kept = {}
    for name, info in whole.tensors.items():
        parts = name.split(".")
        if parts[1] != "layers" or int(parts[2]) < layers:
            kept[name] = (info.dtype, info.shape, whole.raw(name).tobytes())
    write_safetensors(out / "model.safetensors", kept)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, out / path.name)
    (out / "config.json").write_text(json.dumps(whole.config | {"num_hidden_layers": layers}), encoding="utf-8")


@pytest.fixture(scope="session")
def small(workspace, fetched) -> str:  # type: ignore[no-untyped-def]
    """A model `small` in the workspace's params, fetched from a local folder."""
    cut(fetched, workspace.path / "small-source")
    row = {"models": ["small"], "recipes": ["bf16", *RECIPES, "gptq-two"],
           "runtimes": ["vllm"], "targets": ["cpu"], "measure": True}  # fmt: skip
    workspace.edit(lambda p: (
        p["recipes"].update({"gptq-two": p["recipes"]["gptq"] | {"producers": {"vllm": "llmcompressor"}}}),
        p["models"].update(small={"source": "dir:small-source", "instruct": False, "license": "Apache-2.0"}),
        p["matrix"].append(row),
    ))  # fmt: skip
    workspace.run("dvc", "repro", "calibrate@docs.small")
    return "small"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_is_made_whole_and_recorded(recipe: str, small: str, workspace) -> None:  # type: ignore[no-untyped-def]
    workspace.run("dvc", "repro", f"lint@{small}.{recipe}")
    results = workspace.path / f"artifacts/results/{small}.{recipe}"
    lint = json.loads((results / "lint.json").read_text())
    made = json.loads((results / "quantize.json").read_text())
    assert lint["passed"]
    assert lint["layers"] == {"quantized": 7 * LAYERS, "ignored": 1}
    assert lint["weight_bytes"] == pytest.approx(lint["predicted_weight_bytes"], rel=0.02)
    assert made["quantized_layers"] == 7 * LAYERS
    assert made["weight_bytes"] < made["source_weight_bytes"]
    assert made["wall_s"] > 0
    assert made["peak_memory_gib"] > 0
    assert made["versions"]["torch"].startswith("2.6.0" if recipe == "awq-legacy" else "2.13.0")
    if recipe in ("fp8", "int8", "gptq", "awq", "awq-legacy"):
        assert made["calib"]["tokens"] == made["calib"]["samples"] * 64


def test_a_second_producer_makes_an_artifact_of_its_own(small: str, workspace) -> None:  # type: ignore[no-untyped-def]
    """The recipe names gptqmodel, and for vllm llm-compressor: another id, another folder, another record."""
    key = f"{small}.gptq-two.compressed-tensors"
    workspace.run("dvc", "repro", f"lint@{key}")
    made = json.loads((workspace.path / f"artifacts/results/{key}/quantize.json").read_text())
    assert (made["backend"], made["made_by"], made["recipe"]) == ("llmcompressor", "llmcompressor", "gptq-two")
    config = json.loads((workspace.path / f"artifacts/checkpoints/{key}/config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert json.loads((workspace.path / f"artifacts/results/{key}/lint.json").read_text())["passed"]
    plan = yaml.safe_load((workspace.path / "pipeline/plan.yaml").read_text())
    package = plan["package"][f"{small}.gptq-two.vllm.cpu"]
    assert package["checkpoint"] == f"artifacts/checkpoints/{key}"


def test_an_environment_that_does_not_make_the_recipe_says_so(small: str, workspace) -> None:  # type: ignore[no-untyped-def]
    done = workspace.run(
        "pipeline", "run", "gptqmodel", "quantize", "--model", small, "--recipe", "awq", check=False
    )  # fmt: skip
    assert done.returncode == 2
    assert "gptqmodel does not make int4-w4a16 by awq" in done.stderr


def test_the_same_recipe_twice_gives_the_same_bytes(small: str, workspace) -> None:  # type: ignore[no-untyped-def]
    folder = workspace.path / f"artifacts/checkpoints/{small}.gptq"
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    workspace.run("dvc", "repro", "-f", "-s", f"quantize@{small}.gptq")
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_group_size_that_does_not_divide_stops_before_the_library(small: str, workspace) -> None:  # type: ignore[no-untyped-def]
    path = workspace.path / "params.yaml"
    text = path.read_text()
    raw = yaml.safe_load(text)
    raw["recipes"]["int4"]["group_size"] = 128
    path.write_text(yaml.safe_dump(raw))
    try:
        done = workspace.run(
            "pipeline", "run", "llmcompressor", "quantize", "--model", small, "--recipe", "int4", check=False
        )
    finally:
        path.write_text(text)
    assert done.returncode == 2
    assert "group_size 128 does not divide hidden_size 576" in done.stderr
    assert "group_size 64 divides" in done.stderr


def _nan(folder: Path) -> None:
    whole = Checkpoint.open(folder)
    kept = {n: (t.dtype, t.shape, whole.raw(n).tobytes()) for n, t in whole.tensors.items()}
    name = "model.layers.0.mlp.up_proj.weight"
    dtype, shape, data = kept[name]
    kept[name] = (dtype, shape, b"\xc0\x7f" + data[2:])
    (folder / "model.safetensors").unlink()
    write_safetensors(folder / "model.safetensors", kept)


def _pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 100)


def _flip_header(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(20)
        file.write(b"\xff")


def _architecture(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalML"]}
    (folder / "config.json").write_text(json.dumps(config))


FAULTS = {
    "missing weights": (lambda f: (f / "model.safetensors").unlink(), 2, "safetensors"),
    "truncated weights": (_truncate, 2, "model.safetensors"),
    "a flipped byte in the header": (_flip_header, 2, "model.safetensors"),
    "pickles only": (_pickle_only, 2, "safetensors"),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), 2, "tokenizer.json"),
    "an architecture that nothing serves": (_architecture, 2, "LlamaForCausalML"),
    "a NaN in a weight": (_nan, 1, "model.layers.0.mlp.up_proj.weight holds NaN"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_broken_source_is_refused_and_the_old_one_stays(name: str, small: str, workspace, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    plant, code, message = FAULTS[name]
    source = workspace.path / "small-source"
    saved = tmp_path / "saved"
    shutil.copytree(source, saved)
    before = {p.name: p.stat().st_mtime_ns for p in (workspace.path / "artifacts/models/small").iterdir()}
    try:
        plant(source)
        done = workspace.run("pipeline", "run", "source", "fetch", "--model", small, check=False)
    finally:
        shutil.rmtree(source)
        shutil.copytree(saved, source)
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.strip()]) == 1, done.stderr
    assert {p.name: p.stat().st_mtime_ns for p in (workspace.path / "artifacts/models/small").iterdir()} == before


def test_offline_a_hub_model_says_what_to_do(workspace, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    commit = "0123456789abcdef0123456789abcdef01234567"
    path = workspace.path / "params.yaml"
    text = path.read_text()
    raw = yaml.safe_load(text)
    raw["models"]["hub"] = {"source": f"hf:org/name@{commit}"}
    path.write_text(yaml.safe_dump(raw))
    try:
        done = workspace.run("pipeline", "run", "source", "fetch", "--model", "hub", check=False)
    finally:
        path.write_text(text)
    assert done.returncode == 3
    assert "org/name@0123456789ab is not on this host" in done.stderr
    assert "dir:<path>" in done.stderr

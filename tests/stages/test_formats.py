"""Every (format, algorithm) of llm-compressor and ModelOpt, made once of a small real model and linted by dequantizing.

One process a backend makes all of its formats: importing the library is most of the time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_backends import cut, write_safetensors

from pipeline.checkpoint import Checkpoint
from pipeline.formats import BACKENDS, GROUPED
from pipeline.lint import lint
from pipeline.making import copy_side_files

pytestmark = pytest.mark.stages
BACKENDS_HERE = ("llmcompressor", "modelopt")
# 128 must divide what is cut into 128x128 blocks; 576, the model's own width, is no multiple.
NARROW = ("fp8-block",)
# What is made with an FP8 KV cache too.
KV = {("llmcompressor", "fp8-tensor", "max"), ("llmcompressor", "int8-w8a8", "smoothquant-gptq"),
      ("modelopt", "fp8-tensor", "max"), ("modelopt", "nvfp4", "max"), ("modelopt", "int4-w4a16", "awq")}  # fmt: skip
SPECS = [
    (backend, fmt, algorithm, kv)
    for backend in BACKENDS_HERE
    for fmt, algorithm in BACKENDS[backend]
    for kv in ("bf16", "fp8")
    if kv == "bf16" or (backend, fmt, algorithm) in KV
]
SCRIPT = """
import importlib, json, sys
from pathlib import Path
specs, ids = json.loads(sys.argv[2]), json.loads(Path(sys.argv[3]).read_text())["input_ids"][:16]
backend = importlib.import_module(f"stages.{sys.argv[1]}.backend")
for spec in specs:
    Path(spec["out"]).mkdir(parents=True)
    rows = [] if spec["recipe"]["algorithm"] == "rtn" and spec["recipe"]["kv_cache"] == "bf16" else ids
    backend.quantize(Path(spec["source"]), Path(spec["out"]), spec["recipe"], rows, 0)
"""


def narrow(source: Path, out: Path, width: int = 512) -> None:
    """Write `source` with hidden size `width`: the first columns and heads of every weight."""
    whole, out_tensors = Checkpoint.open(source), {}
    out.mkdir(parents=True)
    head = whole.config["hidden_size"] // whole.config["num_attention_heads"]
    for name, info in whole.tensors.items():
        raw = whole.raw(name)
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            raw = raw[:128, :width]
        elif name.endswith(("gate_proj.weight", "up_proj.weight", "embed_tokens.weight")):
            raw = raw[:, :width]
        else:  # norms, down_proj, and the square q_proj and o_proj
            raw = raw[:width] if raw.ndim == 1 or "down_proj" in name else raw[:width, :width]
        out_tensors[name] = (info.dtype, raw.shape, raw.tobytes())
    write_safetensors(out / "model.safetensors", out_tensors)
    copy_side_files(source, out)
    heads = {"num_attention_heads": width // head, "num_key_value_heads": 128 // head, "head_dim": head}
    (out / "config.json").write_text(json.dumps(whole.config | {"hidden_size": width} | heads), encoding="utf-8")


def name_of(backend: str, fmt: str, algorithm: str, kv: str) -> str:
    return f"{backend}.{fmt}.{algorithm}.{kv}"


@pytest.fixture(scope="module")
def made(workspace: Any, fetched: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sources `small` and `narrow` and one checkpoint for each of SPECS."""
    root = tmp_path_factory.mktemp("formats")
    cut(fetched, root / "small")
    narrow(root / "small", root / "narrow")
    tokens = workspace.path / "calib_data/docs.smollm2-135m/tokens.json"
    for backend in BACKENDS_HERE:
        specs = []
        for _, fmt, algorithm, kv in (spec for spec in SPECS if spec[0] == backend):
            recipe = {"format": fmt, "algorithm": algorithm, "kv_cache": kv, "options": None}
            recipe["group_size"] = 64 if fmt in GROUPED else None  # type: ignore[assignment]
            source, out = root / source_of(fmt), root / name_of(backend, fmt, algorithm, kv)
            specs.append({"source": str(source), "out": str(out), "recipe": recipe})
        done = subprocess.run(
            [_python(workspace, backend), "-c", SCRIPT, backend, json.dumps(specs), str(tokens)],
            cwd=workspace.path, capture_output=True, text=True, timeout=1500,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        for spec in specs:
            copy_side_files(Path(spec["source"]), Path(spec["out"]))
    return root


def _python(workspace: Any, env: str) -> str:
    """Return the Python of a stage's environment in the workspace, installed if it is not yet."""
    code = f"from pipeline.runstage import env_python; print(env_python({env!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=workspace.path, capture_output=True, text=True, check=True)
    return done.stdout.split()[-1]


def source_of(fmt: str) -> str:
    return "narrow" if fmt in NARROW else "small"


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: name_of(*spec))
def test_a_format_is_made_whole_and_dequantizes_to_its_source(spec: tuple[str, str, str, str], made: Path) -> None:
    _, fmt, algorithm, kv = spec
    checkpoint, source = made / name_of(*spec), made / source_of(fmt)
    result = lint(checkpoint, source, fmt, 64 if fmt in GROUPED else None, algorithm, kv)
    assert [f for f in result["findings"] if f["severity"] == "error"] == []
    assert result["layers"] == {"quantized": 14, "ignored": 1}
    assert result["dequantized"]["compared"] == 14
    assert result["weight_bytes"] == pytest.approx(result["predicted_weight_bytes"], rel=0.002)
    assert 0.005 < result["dequantized"]["median_relative_rms"] < 0.25


@pytest.mark.parametrize("backend", BACKENDS_HERE)
def test_the_scales_of_a_kv_cache_are_calibrated(backend: str, made: Path) -> None:
    """They come from the data: two layers differ, and none is the 1 that an engine takes where there is no scale."""
    checkpoint = Checkpoint.open(made / name_of(backend, "fp8-tensor", "max", "fp8"))
    names = [name for name in checkpoint.tensors if name.endswith((".k_scale", ".v_scale"))]
    values = [float(checkpoint.read(name).reshape(())) for name in names]
    assert len(values) == 4
    assert len(set(values)) > 1
    assert all(0 < value < 1 for value in values)


@pytest.mark.parametrize("backend", BACKENDS_HERE)
def test_a_kv_cache_that_was_not_asked_for_is_found(backend: str, made: Path) -> None:
    checkpoint = made / name_of(backend, "fp8-tensor", "max", "fp8")
    rules = {f["rule"] for f in lint(checkpoint, made / "small", "fp8-tensor", None, "max")["findings"]}
    assert {"kv-scheme", "tensor-unexpected"} <= rules

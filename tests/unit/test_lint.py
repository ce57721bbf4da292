"""Tests of the linter: clean checkpoints of every layout pass; see test_lint_faults.py for broken ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from packers import KINDS, bf16, editing, editing_json, load, make_source, pack_layer, quantize, save, shard, value
from packers import lint_made as run
from packers import make_pair as make

from pipeline import layouts
from pipeline.checkpoint import Checkpoint
from pipeline.errors import InputError
from pipeline.formats import GROUPED
from pipeline.lint import lint

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("options", [{}, {"tied": False, "bias": True}], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", ["bf16", *KINDS])
def test_clean_checkpoints_pass(tmp_path: Path, kind: str, options: dict[str, bool]) -> None:
    make(tmp_path, kind, **options)
    result = run(tmp_path, kind)
    assert result["findings"] == [] and result["passed"]
    assert result["schema"] == "quantpress.lint/1" and result["checkpoint"] == "made"
    # ModelOpt's AWQ keeps the factors of some layers' inputs, and not even it says which.
    assert result["weight_bytes"] == pytest.approx(result["predicted_weight_bytes"], rel=0.01 if "awq" in kind else 0)
    assert result["layers"] == ({"quantized": 0, "ignored": 15} if kind == "bf16" else {"quantized": 14, "ignored": 1})
    if kind != "bf16":
        assert result["dequantized"]["compared"] == 14


def test_clean_shards_pass(tmp_path: Path) -> None:
    shard(make(tmp_path, "ct-int8"))
    assert run(tmp_path, "ct-int8")["findings"] == []


def test_a_fault_in_one_layer_names_only_that_layer(tmp_path: Path) -> None:
    with editing(make(tmp_path, "ct-int4")) as tensors:
        tensors[f"{Q}.weight_scale"][1][0, 0] = 0
    findings = run(tmp_path, "ct-int4")["findings"]
    assert [(f["rule"], f["subject"]) for f in findings] == [("scale-value", f"{Q}.weight_scale")]


def test_smoothing_must_be_in_the_recipe(tmp_path: Path) -> None:
    """Folded norms are fine for SmoothQuant alone; the caller may say so instead of recipe.yaml."""
    (make(tmp_path, "ct-int8-smooth") / "recipe.yaml").unlink()
    rules = {f["rule"] for f in run(tmp_path, "ct-int8-smooth")["findings"]}
    assert {"tensor-differs", "weight-error"} <= rules
    assert run(tmp_path, "ct-int8-smooth", algorithm="smoothquant-gptq")["findings"] == []
    assert not run(tmp_path, "ct-int8-smooth", algorithm="gptq")["passed"]


def test_drift_is_a_warning(tmp_path: Path) -> None:
    """GPTQ may move weights far, so what is a fault elsewhere is worth a look there."""
    folder = make(tmp_path, "ct-int4")
    with editing(folder) as tensors:
        tensors[f"{Q}.weight_scale"] = bf16(value(tensors[f"{Q}.weight_scale"]) * 1.35)
    result = run(tmp_path, "ct-int4", "gptq")
    assert [(f["rule"], f["subject"]) for f in result["findings"]] == [("weight-drift", Q)] and result["passed"]
    assert result["dequantized"]["worst_layer"] == Q
    assert [f["rule"] for f in run(tmp_path, "ct-int4")["findings"]] == ["weight-error"]


def test_nothing_quantized(tmp_path: Path) -> None:
    make(tmp_path, "bf16")
    with editing_json(tmp_path / "made" / "config.json") as config:
        config["quantization_config"] = {"quant_method": "compressed-tensors", "ignore": ["re:.*"]}
    assert "nothing-quantized" in {f["rule"] for f in run(tmp_path, "ct-int8")["findings"]}


def test_group_size_must_divide(tmp_path: Path) -> None:
    make(tmp_path, "ct-int4")
    result = lint(tmp_path / "made", tmp_path / "source", "int4-w4a16", 48)
    assert ("group-size", Q) in {(f["rule"], f["subject"]) for f in result["findings"]}


def test_old_rope_keys_mean_the_same(tmp_path: Path) -> None:
    make(tmp_path, "bf16")
    with editing_json(tmp_path / "source" / "config.json") as config:
        config |= {"rope_theta": config.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
        config["torch_dtype"] = config.pop("dtype")
    assert run(tmp_path, "bf16")["findings"] == []


@pytest.mark.parametrize("kind", ["ct-fp8", "modelopt-fp8"])
def test_a_recipe_with_a_kv_cache_needs_its_scales(tmp_path: Path, kind: str) -> None:
    """The same checkpoint passes for kv_cache bf16 and fails for fp8: a lost scale would be served as 1."""
    made = make(tmp_path, kind)
    found = lint(made, tmp_path / "source", "fp8-tensor", None, "max", "fp8")["findings"]
    missing = {f["subject"] for f in found if f["rule"] == "kv-scale-missing"}
    names = ("k_scale", "v_scale") if kind == "ct-fp8" else ("k_proj.k_scale", "v_proj.v_scale")
    assert missing == {f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in names}
    assert "kv-scheme" in {f["rule"] for f in found}


@pytest.mark.parametrize("kind", ["ct-fp8-kv", "modelopt-fp8-kv"])
def test_scales_that_the_recipe_does_not_have_are_found(tmp_path: Path, kind: str) -> None:
    made = make(tmp_path, kind)
    rules = {f["rule"] for f in lint(made, tmp_path / "source", "fp8-tensor", None, "max")["findings"]}
    assert {"kv-scheme", "tensor-unexpected"} <= rules


def test_awq_whose_smallest_columns_round_to_zero_is_whole(tmp_path: Path) -> None:
    """What rounding alone does to a column far below the others is no fold that went wrong."""
    source = make_source(tmp_path / "source")
    before = load(source / "model.safetensors")
    made, block = quantize(source, tmp_path / "made", KINDS["ct-int4"]), "model.layers.0"
    with editing(made) as tensors:
        for name in ("q_proj", "k_proj", "v_proj"):
            layer = f"{block}.self_attn.{name}"
            tensors |= pack_layer(layer, _shrunk(value(before[f"{layer}.weight"])), KINDS["ct-int4"])
        norm = f"{block}.input_layernorm.weight"
        tensors[norm] = bf16(_shrunk(value(before[norm]), divide=True))
    assert lint(made, source, "int4-w4a16", 64, "awq")["findings"] == []


def _shrunk(values: NDArray[Any], divide: bool = False) -> NDArray[Any]:
    """Divide (or multiply) every eighth column by 10."""
    out = np.array(values, np.float32)
    out[..., ::8] *= 10 if divide else 1 / 10
    return out


def test_wrong_arguments_and_a_broken_source_raise(tmp_path: Path) -> None:
    made = make(tmp_path, "ct-int4")
    with pytest.raises(InputError, match="no format 'int4'"):
        lint(made, tmp_path / "source", "int4", 64)
    with pytest.raises(InputError, match="group size"):
        lint(made, tmp_path / "source", "int4-w4a16", None)
    os.truncate(tmp_path / "source" / "model.safetensors", 9999)
    with pytest.raises(InputError, match="truncated"):
        run(tmp_path, "ct-int4")


def test_a_missing_checkpoint_is_a_finding(tmp_path: Path) -> None:
    make_source(tmp_path / "source")
    result = run(tmp_path, "ct-int4")
    assert not result["passed"] and [f["rule"] for f in result["findings"]] == ["unreadable"]


def test_large_layers_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.oracle._MAX_WEIGHTS", 1 << 13)
    folder = make(tmp_path, "ct-awq")
    assert run(tmp_path, "ct-awq")["findings"] == []
    with editing(folder) as tensors:
        a, b = (f"model.layers.{i}.mlp.up_proj.weight_packed" for i in (0, 1))
        tensors[a], tensors[b] = tensors[b], tensors[a]
    assert "weight-error" in {f["rule"] for f in run(tmp_path, "ct-awq")["findings"]}


def test_predicted_bytes_without_the_checkpoint(tmp_path: Path) -> None:
    source = Checkpoint.open(make_source(tmp_path / "source"))
    for name, kind in KINDS.items():
        made = Checkpoint.open(quantize(tmp_path / "source", tmp_path / name, kind))
        group = kind.group if kind.fmt in GROUPED else None
        predicted = layouts.predict_weight_bytes(source.tensors, kind.fmt, group, kind.method)
        assert abs(made.weight_bytes / predicted - 1) < 0.02 or kind.act_order or not kind.sym
    assert layouts.predict_weight_bytes(source.tensors, "bf16", None, None) == source.weight_bytes


def test_save_and_load_of_the_helpers_agree(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors", {"x": bf16(np.arange(4))})
    np.testing.assert_array_equal(value(load(tmp_path / "a.safetensors")["x"]), np.arange(4))

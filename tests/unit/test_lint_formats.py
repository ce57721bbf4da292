"""Planted faults in the formats with fixed blocks, in ModelOpt's INT4 and INT8, and in the scales of a KV cache."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faults import bump, drop, first, invert, json_key, renew, swap, tensor, zero
from packers import bf16, value
from packers import lint_made as run
from packers import make_pair as make

from pipeline import lint_kv

Q, DOWN, ATTN = (f"model.layers.0.{n}" for n in ("self_attn.q_proj", "mlp.down_proj", "self_attn"))
PRE = f"{DOWN}.pre_quant_scale"
GROUPS = "quantization_config.config_groups.group_0"
FAULTS: dict[str, tuple[str, Callable[[Path], None], str, str]] = {
    f"swapped {kind}": (kind, swap(f"{Q}.{part}", f"model.layers.1.self_attn.q_proj.{part}"), "weight-error", Q)
    for kind, part in (
        ("ct-int8-w8a16", "weight_packed"), ("ct-int4-w4a8", "weight_packed"), ("ct-fp8-block", "weight"),
        ("ct-nvfp4", "weight_packed"), ("ct-mxfp4", "weight_packed"), ("ct-mxfp8", "weight"),
        ("modelopt-fp8-block", "weight"), ("modelopt-int8-w8a8", "weight"), ("modelopt-int8-w8a16", "weight"),
        ("modelopt-int4-w4a16", "weight"), ("modelopt-int4-w4a8", "weight"), ("modelopt-nvfp4", "weight"),
        ("modelopt-mxfp4", "weight"), ("modelopt-mxfp8", "weight"), ("modelopt-awq", "weight"),
        ("modelopt-w4a8-awq", "weight"),
    )
}  # fmt: skip
FAULTS |= {
    "doubled exponent": ("ct-mxfp4", bump(f"{Q}.weight_scale", 1), "weight-error", Q),
    "doubled exponent, modelopt": ("modelopt-mxfp8", bump(f"{Q}.weight_scale", 1), "weight-error", Q),
    "one block's exponent": ("ct-mxfp8", bump(f"{Q}.weight_scale", 1, rows=1), "weight-error", Q),
    "nan exponent": ("ct-mxfp8", first(f"{Q}.weight_scale", 255), "exponent-value", f"{Q}.weight_scale"),
    "exponent shape": ("ct-mxfp4", renew(f"{Q}.weight_scale", "I8", (128, 4)), "exponent-dtype", f"{Q}.weight_scale"),
    "nan block scale": ("ct-nvfp4", first(f"{Q}.weight_scale", 0x7F), "block-scale-value", f"{Q}.weight_scale"),
    "no block scale": ("modelopt-nvfp4", zero(f"{Q}.weight_scale"), "block-scale-value", f"{Q}.weight_scale"),
    "global scale inverted": ("ct-nvfp4", invert(f"{Q}.weight_global_scale"), "weight-error", Q),
    "second scale gone": ("modelopt-nvfp4", drop(f"{Q}.weight_scale_2"), "scale-missing", f"{Q}.weight_scale_2"),
    "block scale shape": ("ct-fp8-block", renew(f"{Q}.weight_scale", "F32", (1,)), "scale-shape", f"{Q}.weight_scale"),
    "pre scale gone": ("modelopt-int8-w8a8", drop(f"{Q}.pre_quant_scale"), "pre-scale-missing", f"{Q}.pre_quant_scale"),
    "pre scale zero": ("modelopt-awq", first(PRE, 0), "pre-scale-value", PRE),
    "pre scale of another layer": (
        "modelopt-awq",
        tensor(lambda t: t.update({PRE: bf16(np.roll(value(t[PRE]), 7))})),
        "weight-error",
        DOWN,
    ),
    "pre scale lost by awq": ("modelopt-awq", drop(PRE), "weight-error", DOWN),
    "shape record": ("ct-int8-w8a16", first(f"{Q}.weight_shape", 9), "shape-record-value", f"{Q}.weight_shape"),
    "group size in the second file": (
        "modelopt-awq", json_key("hf_quant_config.json", "quantization.group_size", 128), "config-mirror",
        "hf_quant_config.json"),
    "group size lost": (
        "modelopt-int4-w4a8", json_key("hf_quant_config.json", "quantization.group_size", ...), "config-mirror",
        "hf_quant_config.json"),
    "second file lost": (
        "modelopt-awq", lambda d: (d / "hf_quant_config.json").unlink(), "config-mirror", "hf_quant_config.json"),
    "activations of another type": (
        "ct-int4-w4a8", json_key("config.json", f"{GROUPS}.input_activations.type", "int"), "config-quantization",
        "config.json"),
    "another algorithm": (
        "modelopt-nvfp4", json_key("config.json", "quantization_config.quant_algo", "W4A16_NVFP4"),
        "config-quantization", "config.json"),
    "kv scale gone": ("ct-fp8-kv", drop(f"{ATTN}.v_scale"), "kv-scale-missing", f"{ATTN}.v_scale"),
    "kv scale nan": (
        "modelopt-fp8-kv", first(f"{ATTN}.k_proj.k_scale", np.nan), "kv-scale-value", f"{ATTN}.k_proj.k_scale"),
    "kv scale zero": ("ct-fp8-kv", first(f"{ATTN}.k_scale", 0), "kv-scale-value", f"{ATTN}.k_scale"),
    "kv scale shape": ("ct-fp8-kv", renew(f"{ATTN}.k_scale", "F32", (3,)), "kv-scale-shape", f"{ATTN}.k_scale"),
    "kv scheme": ("ct-fp8-kv", json_key("config.json", "quantization_config.kv_cache_scheme", None), "kv-scheme",
                  "config.json"),
    "kv scheme, second file": (
        "modelopt-fp8-kv", json_key("hf_quant_config.json", "quantization.kv_cache_quant_algo", None), "kv-scheme",
        "hf_quant_config.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(tmp_path: Path, name: str) -> None:
    kind, plant, rule, subject = FAULTS[name]
    plant(make(tmp_path, kind))
    result = run(tmp_path, kind)
    found = {(f["severity"], f["rule"], f["subject"]) for f in result["findings"]}
    assert ("error", rule, subject) in found, found
    assert not result["passed"]


def test_every_rule_on_a_kv_cache_has_a_planted_fault() -> None:
    rules = set(re.findall(r'report\.error\("([a-z-]+)"', Path(lint_kv.__file__).read_text(encoding="utf-8")))
    assert len(rules) == 4
    assert rules <= {fault[2] for fault in FAULTS.values()}

"""Lint rules on the scales of a quantized KV cache: one for the keys and one for the values of every attention layer.

Without a scale vLLM takes 1.0 (layers/quantization/kv_cache.py), which serves and may clip: a lost scale is an error.
Sources: compressed-tensors 0.19 (`<attention>.k_scale`, kv_cache_scheme) and ModelOpt 0.47
(`<attention>.k_proj.k_scale`, kv_cache_scheme and hf_quant_config.json), each read on a real checkpoint.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pipeline import layouts
from pipeline.checkpoint import CheckpointError, bytes_of, read_object
from pipeline.lint_case import Case, Report

SCHEME = {"num_bits": 8, "type": "float", "dynamic": False}
# The linear layer that makes the keys, and the values: their attention module owns the cache.
_KEYS, _VALUES = ("k_proj", "qkv_proj", "query_key_value"), ("v_proj", "qkv_proj", "query_key_value")
_DTYPES = ("F32", "BF16", "F16")


def scale_names(case: Case) -> list[str]:
    """Return the tensors that a quantized KV cache needs in this checkpoint, [] where it is not quantized."""
    if case.kv_cache == "bf16" or case.layout is None:
        return []
    inside = case.layout.method == "modelopt"
    found = []
    for layer in case.layers:
        attention, _, name = layer.rpartition(".")
        for side, makers in (("k", _KEYS), ("v", _VALUES)):
            if name in makers:
                found.append(f"{layer if inside else attention}.{side}_scale")
    return found


def scale_bytes(case: Case) -> int:
    """Return the bytes of those tensors."""
    shape = () if case.layout and case.layout.method == "modelopt" else (1,)
    return len(scale_names(case)) * bytes_of("F32" if shape == () else "BF16", shape)


def check_kv(case: Case, report: Report) -> None:
    """The configs say how the KV cache is stored, and every attention layer has finite, positive scales for it."""
    _check_scheme(case, report)
    for name in scale_names(case):
        info = case.made.tensors.get(name)
        if info is None:
            report.error("kv-scale-missing", name, f"{name} is missing: the KV cache would be served with the scale 1.")
        elif info.dtype not in _DTYPES or info.shape not in ((), (1,)):
            report.error("kv-scale-shape", name, f"{name} is {info.dtype} {info.shape}, not one floating-point number.")
        else:
            value = float(np.asarray(case.made.read(name), np.float32).reshape(()))
            if not (np.isfinite(value) and value > 0):
                report.error("kv-scale-value", name, f"{name} is {value}, not finite and positive.")


def _check_scheme(case: Case, report: Report) -> None:
    wanted = SCHEME if case.kv_cache == "fp8" else None
    found = case.qconfig.get("kv_cache_scheme")
    seen = {key: found.get(key) for key in SCHEME} if isinstance(found, dict) else found
    if seen != wanted:
        said = f"quantization_config.kv_cache_scheme is {seen!r}; kv_cache: {case.kv_cache} needs {wanted!r}."
        report.error("kv-scheme", "config.json", said)
    if case.layout is None or case.layout.method != "modelopt":
        return
    name = "hf_quant_config.json"
    try:
        algo: Any = layouts.look_up(read_object(case.made.folder / name), "quantization.kv_cache_quant_algo")[0]
    except CheckpointError:
        return  # check_quantization_config has said so
    if algo != ("FP8" if case.kv_cache == "fp8" else None):
        report.error("kv-scheme", name, f"{name} says kv_cache_quant_algo = {algo!r}; the recipe has {case.kv_cache}.")

"""Formats that a recipe can store and compute, and the backends that make them."""

from __future__ import annotations

FORMATS = ("bf16", "fp8-tensor", "fp8-channel-token", "int8-w8a8", "int4-w4a16")
WEIGHT_BITS = {"bf16": 16, "fp8-tensor": 8, "fp8-channel-token": 8, "int8-w8a8": 8, "int4-w4a16": 4}
# backend -> the (format, algorithm) pairs that it makes. The archived projects are named as their owners named them.
_GPTQ, _AWQ = ("int4-w4a16", "gptq"), ("int4-w4a16", "awq")
BACKENDS: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (("bf16", "none"),),
    "modelopt": (("fp8-tensor", "max"),),
    "llmcompressor": (
        ("fp8-tensor", "max"),
        ("fp8-channel-token", "rtn"),
        ("int8-w8a8", "rtn"),
        ("int8-w8a8", "gptq"),
        ("int8-w8a8", "smoothquant-gptq"),
        ("int4-w4a16", "rtn"),
        _GPTQ,
        _AWQ,
    ),
    "gptqmodel": (_GPTQ,),
    "auto-gptq": (_GPTQ,),
    "autoawq": (_AWQ,),
}
DATA_FREE = ("none", "rtn")

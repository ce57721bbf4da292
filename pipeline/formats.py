"""Formats that a recipe can store and compute, and the backends that make them."""

from __future__ import annotations

FORMATS = (
    "bf16", "fp8-tensor", "fp8-channel-token", "fp8-block", "int8-w8a8", "int8-w8a16", "int4-w4a16", "int4-w4a8",
    "nvfp4", "mxfp4", "mxfp8",
)  # fmt: skip
WEIGHT_BITS = {
    "bf16": 16, "fp8-tensor": 8, "fp8-channel-token": 8, "fp8-block": 8, "int8-w8a8": 8, "int8-w8a16": 8,
    "int4-w4a16": 4, "int4-w4a8": 4, "nvfp4": 4, "mxfp4": 4, "mxfp8": 8,
}  # fmt: skip
# Formats whose recipe chooses the group size, and those whose blocks are fixed: rows x columns that share a scale
# (OCP Microscaling Formats 1.0 for MX; 128x128 as DeepSeek-V3's FP8, arXiv:2412.19437).
GROUPED = ("int4-w4a16", "int4-w4a8")
BLOCKS = {"fp8-block": (128, 128), "nvfp4": (1, 16), "mxfp4": (1, 32), "mxfp8": (1, 32)}

# backend -> the (format, algorithm) pairs that it makes. The archived projects are named as their owners named them.
_GPTQ, _AWQ = ("int4-w4a16", "gptq"), ("int4-w4a16", "awq")
BACKENDS: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (("bf16", "none"),),
    "modelopt": (
        ("fp8-tensor", "max"),
        ("fp8-channel-token", "rtn"),
        ("fp8-block", "rtn"),
        ("int8-w8a8", "smoothquant"),
        ("int8-w8a16", "rtn"),
        ("int4-w4a16", "rtn"),
        _AWQ,
        ("int4-w4a8", "awq"),
        ("nvfp4", "max"),
        ("mxfp4", "rtn"),
        ("mxfp8", "rtn"),
    ),
    "llmcompressor": (
        ("fp8-tensor", "max"),
        ("fp8-channel-token", "rtn"),
        ("fp8-block", "rtn"),
        ("int8-w8a8", "rtn"),
        ("int8-w8a8", "gptq"),
        ("int8-w8a8", "smoothquant-gptq"),
        ("int8-w8a16", "rtn"),
        ("int4-w4a16", "rtn"),
        _GPTQ,
        _AWQ,
        ("int4-w4a8", "rtn"),
        ("int4-w4a8", "awq"),
        ("nvfp4", "max"),
        ("mxfp4", "rtn"),
        ("mxfp8", "rtn"),
    ),
    "gptqmodel": (_GPTQ,),
    "auto-gptq": (_GPTQ,),
    "autoawq": (_AWQ,),
}
# auto-gptq cannot quantize without CUDA and is archived, so its maintained successor makes its recipes.
SUCCESSORS = {"auto-gptq": "gptqmodel"}
# backend -> what it stores, as `quant_method` names it; the first one is what its quantize stage writes.
# `modelopt-trtllm` is ModelOpt's TensorRT-LLM checkpoint, which trtllm-build reads.
LAYOUTS_OF = {
    "none": ("hf", "modelopt-trtllm"),
    "modelopt": ("modelopt", "modelopt-trtllm"),
    "llmcompressor": ("compressed-tensors",),
    "gptqmodel": ("gptq",),
    "autoawq": ("awq",),
}
# Where a backend lacks a recipe's algorithm, the nearest that it has: the cell says which one made its artifact.
STANDS_IN = {("int8-w8a8", "smoothquant-gptq"): "smoothquant"}
DATA_FREE = ("none", "rtn")
# Backends that calibrate scales for a quantized KV cache.
KV_BACKENDS = ("llmcompressor", "modelopt")

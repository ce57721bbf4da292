"""Layers as llm-compressor and ModelOpt store the formats with fixed blocks, W4A8, weight-only INT8 and KV scales."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from packing_bits import Tensors, bf16, block_max, int4, pack, pairs, spread, to_e2m1, to_f8

FLOAT8 = {"num_bits": 8, "type": "float"}
FLOAT4 = {"num_bits": 4, "type": "float"}
# fmt -> (format, weights, input_activations) of compressed-tensors
SCHEMES: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
    "int8-w8a16": ("pack-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}, None),
    "int4-w4a8": (
        "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64},
        FLOAT8 | {"strategy": "token", "dynamic": True},
    ),
    "fp8-block": (
        "float-quantized", FLOAT8 | {"strategy": "block", "block_structure": [128, 128]},
        FLOAT8 | {"strategy": "group", "dynamic": True, "group_size": 128},
    ),
    "nvfp4": (
        "nvfp4-pack-quantized", FLOAT4 | {"strategy": "tensor_group", "group_size": 16},
        FLOAT4 | {"strategy": "tensor_group", "dynamic": "local", "group_size": 16},
    ),
    "mxfp4": (
        "mxfp4-pack-quantized", FLOAT4 | {"strategy": "group", "group_size": 32},
        FLOAT4 | {"strategy": "group", "dynamic": True, "group_size": 32},
    ),
    "mxfp8": (
        "mxfp8-quantized", FLOAT8 | {"strategy": "group", "group_size": 32},
        FLOAT8 | {"strategy": "group", "dynamic": True, "group_size": 32},
    ),
}  # fmt: skip
ALGOS = {
    "fp8-block": "fp8_pb_wo", "int8-w8a8": "W8A8_SQ_PER_CHANNEL", "int8-w8a16": "W8A16", "int4-w4a16": "W4A16_AWQ",
    "int4-w4a8": "W4A8_AWQ", "nvfp4": "NVFP4", "mxfp4": "mxfp4", "mxfp8": "MXFP8",
}  # fmt: skip
GROUP_SIZES = {"int4-w4a16": 64, "int4-w4a8": 64, "nvfp4": 16, "mxfp8": 32}


def f32(value: Any) -> tuple[str, NDArray[Any]]:
    """Return a float32 tensor."""
    return "F32", np.asarray(value, np.float32)


def compressed(name: str, w: NDArray[Any], fmt: str) -> Tensors:
    """Return a layer in a compressed-tensors format of SCHEMES."""
    shape = ("I64", np.array(w.shape))
    if fmt == "int8-w8a16":
        scale = np.abs(w).max(axis=1, keepdims=True) / 127
        codes = (np.round(w / scale) + 128).astype(np.uint8)
        return {
            f"{name}.weight_packed": ("I32", np.ascontiguousarray(codes).view(np.int32)),
            f"{name}.weight_scale": bf16(scale),
            f"{name}.weight_shape": shape,
        }
    if fmt == "int4-w4a8":
        codes, _, scale = int4(w, 64, True, np.arange(w.shape[1]) // 64)
        parts: Tensors = {f"{name}.weight_packed": ("I32", pack(codes)), f"{name}.weight_scale": bf16(scale)}
        return parts | {f"{name}.weight_shape": shape}
    if fmt == "fp8-block":
        scale = block_max(w, 128, 128) / 448
        return {
            f"{name}.weight": ("F8_E4M3", to_f8(w / spread(scale, w.shape, 128, 128))),
            f"{name}.weight_scale": bf16(scale),
        }
    if fmt == "nvfp4":
        codes, blocks, whole = _nvfp4(w)
        return {
            f"{name}.weight_packed": ("U8", pairs(codes)),
            f"{name}.weight_scale": ("F8_E4M3", blocks),
            f"{name}.weight_global_scale": f32([1 / whole]),
            f"{name}.input_global_scale": f32([100.0]),
        }
    return _microscaled(name, w, fmt, "weight_packed")


def modelopt(name: str, w: NDArray[Any], fmt: str, pre: bool) -> Tensors:
    """Return a layer in a ModelOpt format of ALGOS; `pre`: with factors of the inputs taken out of the weight."""
    parts: Tensors = {}
    if pre:
        factor = bf16(np.random.default_rng(3).uniform(0.3, 3, w.shape[1]))
        parts[f"{name}.pre_quant_scale"] = factor
        w = w / (factor[1].astype(np.uint32) << 16).view(np.float32)
    if fmt in ("int8-w8a8", "int8-w8a16"):
        scale = np.abs(w).max(axis=1) / 127
        parts |= {f"{name}.weight": ("I8", np.round(w / scale[:, None]).astype(np.int8))}
        parts |= {f"{name}.weight_scale": f32(scale)}
        return parts | ({f"{name}.input_scale": f32(0.02)} if fmt == "int8-w8a8" else {})
    if fmt in ("int4-w4a16", "int4-w4a8"):
        codes, _, scale = int4(w, 64, True, np.arange(w.shape[1]) // 64)
        signed = (codes.astype(np.int64) - 8).astype(np.uint8) & 15
        parts |= {f"{name}.weight": ("U8", (signed[0::2] | signed[1::2] << 4).astype(np.uint8))}
        parts |= {f"{name}.weight_scale": f32(scale)}
        more = {f"{name}.weight_scale_2": f32(0.001), f"{name}.input_scale": f32(0.02)}
        return parts | (more if fmt == "int4-w4a8" else {})
    if fmt == "fp8-block":
        scale = block_max(w, 128, 128) / 448
        parts |= {f"{name}.weight": ("F8_E4M3", to_f8(w / spread(scale, w.shape, 128, 128)))}
        return parts | {f"{name}.weight_scale": f32(scale[:, None, :, None])}
    if fmt == "nvfp4":
        codes, blocks, whole = _nvfp4(w)
        parts |= {f"{name}.weight": ("U8", pairs(codes)), f"{name}.weight_scale": ("F8_E4M3", blocks)}
        return parts | {f"{name}.weight_scale_2": f32(whole), f"{name}.input_scale": f32(0.02)}
    return parts | _microscaled(name, w, fmt, "weight")


def _nvfp4(w: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], float]:
    """Return codes [out, in], scales [out, in/16] as float8 and the scale of the whole tensor."""
    whole = float(np.abs(w).max() / (6 * 448))
    blocks = to_f8(block_max(w, 1, 16) / 6 / whole)
    value = np.array([m / 512 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)])[blocks]
    return to_e2m1(w / spread(value * whole, w.shape, 1, 16)), blocks, whole


def _microscaled(name: str, w: NDArray[Any], fmt: str, packed: str) -> Tensors:
    """Return an MX layer: a power of two for each 32 weights, stored as exponent + 127."""
    top = {"mxfp4": 2, "mxfp8": 8}[fmt]  # exponent of the largest value of the element format
    exponent = np.floor(np.log2(block_max(w, 1, 32))) - top
    scaled = w / spread(2.0**exponent, w.shape, 1, 32)
    scale = ("U8", (exponent + 127).astype(np.uint8))
    if fmt == "mxfp4":
        return {f"{name}.{packed}": ("U8", pairs(to_e2m1(scaled))), f"{name}.weight_scale": scale}
    return {f"{name}.weight": ("F8_E4M3", to_f8(np.clip(scaled, -448, 448))), f"{name}.weight_scale": scale}


def kv_scales(block: str, method: str) -> Tensors:
    """Return the scales of one attention layer's KV cache."""
    if method == "modelopt":
        return {f"{block}.self_attn.{side}_proj.{side}_scale": f32(0.03) for side in "kv"}
    return {f"{block}.self_attn.{side}_scale": bf16(np.array([0.03])) for side in "kv"}

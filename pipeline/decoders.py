"""Dequantize a layer: one function for each way that a backend stores weights. No torch; see layouts.py.

Sources: compressed-tensors 0.19 (compressors/), ModelOpt 0.47's unified export, GPTQModel 7.6 (qlinear/), each read on
a real checkpoint; the OCP Microscaling Formats specification 1.0 for E2M1, E8M0 and blocks of 32. Every decoder takes
(checkpoint, layer, rows, dims) and returns the float32 rows `W[rows, in]`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint import Checkpoint, to_float

Floats = NDArray[np.float32]
Dims = dict[str, int]
FP8_BLOCK, NVFP4_BLOCK, MX_BLOCK = 128, 16, 32
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
E2M1 = np.concatenate([_E2M1, -_E2M1])  # value of each 4-bit code


def _rows(ck: Checkpoint, name: str, rows: slice, axis: int = 0) -> Floats:
    """Return the rows (or columns) of a scale; one value stands for all of them."""
    scale: Floats = np.asarray(ck.read(name), dtype=np.float32)
    if scale.size == 1:
        return scale.reshape(1, 1)
    part: Floats = scale.reshape(len(scale), -1)[rows] if axis == 0 else scale[:, rows].T
    return part


def cast(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
    """One stored number per weight: W = weight * weight_scale, the scale per tensor or per output row."""
    name = f"{layer}.weight"
    stored = to_float(ck.raw(name)[rows], ck.tensors[name].dtype)
    return stored * _rows(ck, f"{layer}.weight_scale", rows)


def nibbles(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Unpack `[..., n]` words to `[..., 8n]` unsigned 4-bit numbers, the lowest bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    out = np.empty((*octets.shape[:-1], octets.shape[-1] * 2), dtype=np.uint8)
    out[..., 0::2], out[..., 1::2] = octets & 15, octets >> 4
    return out


def _grouped(codes: NDArray[np.uint8], zeros: Any, scales: Floats, group_index: Any, dims: Dims) -> Floats:
    """Return (codes - zeros) * scales: codes [rows, in], zeros and scales [rows, groups]."""
    if group_index is not None:
        wide = zeros if np.ndim(zeros) == 0 else zeros[:, group_index]
        values: Floats = (codes.astype(np.float32) - wide) * scales[:, group_index]
        return values
    shaped = codes.reshape(len(codes), dims["groups"], dims["group"]).astype(np.float32)
    shaped -= zeros if np.ndim(zeros) == 0 else zeros[..., None]
    shaped *= scales[..., None]
    return shaped.reshape(codes.shape)


def pack_quantized(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
    """compressed-tensors: words along `in`, offset 8; zero points, if any, packed along `out` likewise."""
    codes = nibbles(ck.raw(f"{layer}.weight_packed")[rows])[:, : dims["in"]]
    zero_name, index_name = f"{layer}.weight_zero_point", f"{layer}.weight_g_idx"
    zeros: Any = 8
    if zero_name in ck.tensors:
        zeros = nibbles(ck.raw(zero_name).T).T[: dims["out"]][rows].astype(np.float32)
    index = ck.raw(index_name) if index_name in ck.tensors else None
    return _grouped(codes, zeros, _rows(ck, f"{layer}.weight_scale", rows), index, dims)


def gptq_zeros(ck: Checkpoint, layer: str, dims: Dims) -> NDArray[np.uint8]:
    """Return the zero points `[groups, out]`; format `gptq` stores them less one, `gptq_v2` as they are."""
    form = (ck.config.get("quantization_config") or {}).get("checkpoint_format")
    stored = nibbles(ck.raw(f"{layer}.qzeros"))[:, : dims["out"]]
    return stored if form == "gptq_v2" else (stored + np.uint8(1)) & np.uint8(15)


def gptq(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
    """GPTQ: W transposed, words along `in`."""
    codes = nibbles(ck.raw(f"{layer}.qweight")[:, rows].T)[:, : dims["in"]]
    zeros = gptq_zeros(ck, layer, dims)[:, rows].T.astype(np.float32)
    return _grouped(codes, zeros, _rows(ck, f"{layer}.scales", rows, axis=1), ck.raw(f"{layer}.g_idx"), dims)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each four bits of an AutoAWQ word hold, lowest bits first


def _awq_nibbles(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Unpack AutoAWQ's words `[rows, n]` to `[rows, 8n]` unsigned 4-bit numbers in column order."""
    found = nibbles(words).reshape(len(words), -1, 8)
    out = np.empty_like(found)
    out[..., AWQ_ORDER] = found
    return out.reshape(len(words), -1)


def awq(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
    """AutoAWQ's GEMM form: W transposed, words along `out` in an interleaved order, zero points likewise."""
    codes = _awq_nibbles(ck.raw(f"{layer}.qweight"))[:, : dims["out"]][:, rows].T
    zeros = _awq_nibbles(ck.raw(f"{layer}.qzeros"))[:, : dims["out"]][:, rows].T.astype(np.float32)
    return _grouped(codes, zeros, _rows(ck, f"{layer}.scales", rows, axis=1), None, dims)


def smoothed(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
    """ModelOpt, SmoothQuant: inputs are multiplied by pre_quant_scale, so the weight is weight * scale * that."""
    scaled: Floats = cast(ck, layer, rows, dims) * _pre_quant_scale(ck, layer)
    return scaled


def _pre_quant_scale(ck: Checkpoint, layer: str) -> Any:
    name = f"{layer}.pre_quant_scale"
    return np.asarray(ck.read(name), np.float32) if name in ck.tensors else np.float32(1)


def octets(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
    """compressed-tensors, 8 bits packed: four offset-128 bytes a word along `in`, one scale a row."""
    words = np.ascontiguousarray(ck.raw(f"{layer}.weight_packed")[rows])
    codes = words.view(np.uint8)[:, : dims["in"]].astype(np.float32) - 128
    values: Floats = codes * _rows(ck, f"{layer}.weight_scale", rows)
    return values


def row_pairs(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
    """ModelOpt, INT4: two rows a byte, the even one in the low bits, two's complement; scales per group along `in`."""
    index = np.arange(dims["out"])[rows]
    packed = ck.raw(f"{layer}.weight")[index // 2]
    codes = np.where((index % 2)[:, None] == 1, packed >> 4, packed & 15).astype(np.uint8)
    # A flipped sign bit turns two's complement into codes with the offset 8.
    values = _grouped(codes ^ np.uint8(8), 8, _rows(ck, f"{layer}.weight_scale", rows), None, dims)
    scaled: Floats = values * _pre_quant_scale(ck, layer)
    return scaled


def fp8_blocks(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
    """FP8 with one scale for 128x128 weights: [out/128, in/128], in ModelOpt's export [out/128, 1, in/128, 1]."""
    stored = to_float(ck.raw(f"{layer}.weight")[rows], "F8_E4M3")
    scale = np.asarray(ck.read(f"{layer}.weight_scale"), np.float32)
    scale = scale.reshape(-(-dims["out"] // FP8_BLOCK), -(-dims["in"] // FP8_BLOCK))
    index = np.arange(dims["out"])[rows] // FP8_BLOCK
    values: Floats = stored * np.repeat(scale[index], FP8_BLOCK, axis=1)[:, : dims["in"]]
    return values


def _e2m1(ck: Checkpoint, name: str, rows: slice) -> Floats:
    """Return the values [rows, in] of 4-bit floats, two a byte, the first one in the low bits."""
    packed = ck.raw(name)[rows]
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
    values: Floats = E2M1[codes]
    return values


def _blocks(values: Floats, scale: Any, size: int) -> Floats:
    """Return values [rows, in] times scales [rows, in/size]."""
    scaled: Floats = values * np.repeat(np.asarray(scale, np.float32), size, axis=1)[:, : values.shape[1]]
    return scaled


def _e8m0(ck: Checkpoint, name: str, rows: slice) -> Floats:
    """Return the values of 8-bit exponents: 2^(code - 127)."""
    return np.exp2(ck.raw(name)[rows].astype(np.float32) - 127)


def nvfp4(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
    """NVFP4: E2M1, an E4M3 scale for 16 weights, one FP32 scale a tensor that compressed-tensors stores inverted."""
    packed = f"{layer}.weight_packed"
    scale = to_float(ck.raw(f"{layer}.weight_scale")[rows], "F8_E4M3")
    if packed in ck.tensors:
        whole = 1 / float(np.asarray(ck.read(f"{layer}.weight_global_scale")).reshape(()))
    else:
        packed = f"{layer}.weight"
        whole = float(np.asarray(ck.read(f"{layer}.weight_scale_2")).reshape(()))
    return _blocks(_e2m1(ck, packed, rows), scale * whole, NVFP4_BLOCK)


def mxfp4(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
    """MXFP4: E2M1, an E8M0 scale for 32 weights."""
    packed = f"{layer}.weight_packed"
    name = packed if packed in ck.tensors else f"{layer}.weight"
    return _blocks(_e2m1(ck, name, rows), _e8m0(ck, f"{layer}.weight_scale", rows), MX_BLOCK)


def mxfp8(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
    """MXFP8: E4M3, an E8M0 scale for 32 weights."""
    stored = to_float(ck.raw(f"{layer}.weight")[rows], "F8_E4M3")
    return _blocks(stored, _e8m0(ck, f"{layer}.weight_scale", rows), MX_BLOCK)

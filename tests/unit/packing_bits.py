"""Bits for the packers: bfloat16, float8, 4-bit words and 4-bit codes, written without pipeline's decoders."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, tuple[str, NDArray[Any]]]  # name -> (safetensors dtype, raw bits)


def bf16(values: NDArray[Any]) -> tuple[str, NDArray[Any]]:
    """Round to bfloat16 (by cutting: any value will do for a test)."""
    return "BF16", (np.asarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def value(tensor: tuple[str, NDArray[Any]]) -> NDArray[Any]:
    """Return the values of a BF16 tensor."""
    return (tensor[1].astype(np.uint32) << 16).view(np.float32)


def _e4m3() -> NDArray[np.float64]:
    """The 127 non-negative finite float8 e4m3fn values, in order of their codes."""
    values = [m / 512 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)]
    return np.array(values[:127])


def to_f8(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Round to the nearest float8 e4m3fn code."""
    table, size = _e4m3(), np.abs(values)
    code = np.clip(np.searchsorted(table, size), 1, 126)
    code = np.where(size - table[code - 1] < table[code] - size, code - 1, code)
    return (code | np.where(values < 0, 128, 0)).astype(np.uint8)


def pack(codes: NDArray[Any]) -> NDArray[np.int32]:
    """Pack unsigned 4-bit numbers `[..., 8n]` into `[..., n]` words, the first one in the lowest bits."""
    parts = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    words = np.zeros(parts.shape[:-1], np.uint32)
    for i in range(8):
        words |= parts[..., i] << np.uint32(4 * i)
    return words.view(np.int32)


def interleaved(codes: NDArray[Any]) -> NDArray[Any]:
    """Put every eight columns in the order in which AutoAWQ packs them: even ones first, then odd ones."""
    rows, width = codes.shape
    eights = codes.reshape(rows, width // 8, 8)
    return np.concatenate([eights[..., 0::2], eights[..., 1::2]], axis=-1).reshape(rows, width)


def int4(w: NDArray[Any], group: int, sym: bool, index: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return codes [out, in], zeros and scales [out, groups]; column j of W is in group index[j]."""
    groups = w.shape[1] // group
    low, high = (np.stack([reduce(w[:, index == g], axis=1) for g in range(groups)], 1) for reduce in (np.min, np.max))
    if sym:
        scale, zero = np.maximum(-low, high) / 7.5, np.full(low.shape, 8.0)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scale = (high - low) / 15
        zero = np.round(-low / scale)
    codes = np.clip(np.round(w / scale[:, index]) + zero[:, index], 0, 15)
    return codes, zero, scale


def to_e2m1(values: NDArray[Any]) -> NDArray[np.uint8]:
    """Round to the nearest 4-bit float (OCP E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign), one code a byte."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    code = np.abs(np.abs(values)[..., None] - grid).argmin(axis=-1)
    return (code | np.where(values < 0, 8, 0)).astype(np.uint8)


def pairs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Pack 4-bit codes `[out, in]` two a byte along `in`, the first one in the low bits."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


def block_max(w: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    """Return the largest size in each block of `rows` x `columns`: [ceil(out/rows), ceil(in/columns)]."""
    out, width = w.shape
    padded = np.zeros((-(-out // rows) * rows, -(-width // columns) * columns))
    padded[:out, :width] = np.abs(w)
    shaped = padded.reshape(len(padded) // rows, rows, padded.shape[1] // columns, columns)
    return shaped.max(axis=(1, 3))


def spread(scales: NDArray[Any], shape: tuple[int, int], rows: int, columns: int) -> NDArray[Any]:
    """Repeat block scales to the shape of the weight."""
    return np.repeat(np.repeat(scales, rows, axis=0), columns, axis=1)[: shape[0], : shape[1]]

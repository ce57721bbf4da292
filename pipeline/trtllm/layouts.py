"""How a TensorRT-LLM checkpoint stores each kind of linear layer, and how to get W[out, in] back from it.

Source: headers and numbers of ModelOpt 0.47's export_tensorrt_llm_checkpoint, run on a CPU with random weights, and the
loader's rules (models/modeling_utils.py@01ea6d7). `o` and `i` are the rows and columns that a rank holds, `g` the
group.

Where do I add one: one `Kind` here, and its `quant_algo` in FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint import to_float

Floats = NDArray[np.float32]
Raw = Mapping[str, tuple[str, NDArray[Any]]]  # suffix -> (dtype, bits)
FLOAT = ("BF16", "F16", "F32")
ROWS, COLUMNS, SAME = "rows", "columns", "same"


@dataclass(frozen=True)
class Part:
    """One tensor `<layer>.<suffix>`: dtypes, shape in o, i, g, o/2, i/2, i/g or numbers, and what it goes along with.

    `along`: cut with the layer's rows, with its columns, or the same on every rank. `needs_activations`: only data that
    went through the model gives it.
    """

    suffix: str
    dtypes: tuple[str, ...]
    shape: tuple[str | int, ...]
    along: str = SAME
    needs_activations: bool = False


@dataclass(frozen=True)
class Kind:
    """One quant_algo. `error`: largest relative RMS of an honest layer; `gain`: how far a row's gain may be from 1."""

    algo: str | None
    parts: tuple[Part, ...]
    decode: Callable[[Raw, int], Floats]
    error: float
    gain: float
    grouped: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)


def _values(raw: Raw, suffix: str) -> Floats:
    dtype, bits = raw[suffix]
    return to_float(bits, dtype)


def _plain(raw: Raw, group: int) -> Floats:
    return _values(raw, "weight")


def _per_tensor(raw: Raw, group: int) -> Floats:
    """W = weight x weights_scaling_factor, one scale a tensor."""
    out: Floats = _values(raw, "weight") * _values(raw, "weights_scaling_factor").reshape(-1)[0]
    return out


def _per_channel(raw: Raw, group: int) -> Floats:
    return _values(raw, "weight") * _values(raw, "per_channel_scale")[:, None]


def _smooth(raw: Raw, group: int) -> Floats:
    """W = weight x weights_scaling_factor[out] x prequant_scaling_factor[in]."""
    scaled = _values(raw, "weight") * _values(raw, "weights_scaling_factor")[:, None]
    out: Floats = scaled * _values(raw, "prequant_scaling_factor")[None, :]
    return out


def int4_rows(packed: NDArray[Any]) -> NDArray[np.int8]:
    """Unpack `[out/2, in]` bytes to `[out, in]` signed 4-bit numbers: the low half is the even row."""
    octets = packed.view(np.uint8)
    out = np.empty((octets.shape[0] * 2, octets.shape[1]), dtype=np.int8)
    out[0::2], out[1::2] = octets & 15, octets >> 4
    return np.where(out > 7, out - 16, out).astype(np.int8)


def _awq(raw: Raw, group: int) -> Floats:
    """W = q x weights_scaling_factor[out, in/g] x prequant_scaling_factor[in]; W4A8's second scale is not in it."""
    codes = int4_rows(raw["weight"][1]).astype(np.float32)
    out: Floats = codes * np.repeat(_values(raw, "weights_scaling_factor"), group, axis=1)
    if "prequant_scaling_factor" in raw:
        out = out * _values(raw, "prequant_scaling_factor")[None, :]
    return out


_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)


def _nvfp4(raw: Raw, group: int) -> Floats:
    """W = E2M1 x weights_scaling_factor[out, in/16] x weights_scaling_factor_2; the low half is the even column."""
    octets = raw["weight"][1]
    codes = np.empty((octets.shape[0], octets.shape[1] * 2), dtype=np.uint8)
    codes[:, 0::2], codes[:, 1::2] = octets & 15, octets >> 4
    scale = _values(raw, "weights_scaling_factor") * _values(raw, "weights_scaling_factor_2").reshape(-1)[0]
    out: Floats = _E2M1[codes] * np.repeat(scale, group, axis=1)
    return out


_SCALE = Part("weights_scaling_factor", ("F32",), (1,))
_SCALE_2 = Part("weights_scaling_factor_2", ("F32",), (1,))
_INPUT = Part("activation_scaling_factor", ("F32",), (1,), needs_activations=True)
_PREQUANT = Part("prequant_scaling_factor", FLOAT, ("i",), COLUMNS)
_GROUPS = Part("weights_scaling_factor", ("F32", "BF16", "F16"), ("o", "i/g"), "both")
_NIBBLES = Part("weight", ("I8", "U8"), ("o/2", "i"), "both")
_AWQ_CONFIG = {"has_zero_point": False, "pre_quant_scale": True}

# Bounds: relative RMS of random and of real weights is 0.027 (FP8), 0.008-0.02 (INT8), 0.12 (INT4 group 128), 0.095
# (NVFP4);
# a foreign layer has 1.4, a doubled scale 1.0. A weight that stays in bf16 is equal to the last bit.
KINDS: dict[str, Kind] = {
    "none": Kind(None, (Part("weight", FLOAT, ("o", "i"), "both"),), _plain, 0.0, 0.0),
    "FP8": Kind("FP8", (Part("weight", ("F8_E4M3",), ("o", "i"), "both"), _SCALE, _INPUT), _per_tensor, 0.04, 0.1),
    "FP8_PER_CHANNEL_PER_TOKEN": Kind(
        "FP8_PER_CHANNEL_PER_TOKEN",
        (Part("weight", ("F8_E4M3",), ("o", "i"), "both"), Part("per_channel_scale", ("F32",), ("o",), ROWS)),
        _per_channel, 0.04, 0.1,
    ),
    "W8A8_SQ_PER_CHANNEL": Kind(
        "W8A8_SQ_PER_CHANNEL",
        (
            Part("weight", ("I8",), ("o", "i"), "both"), Part("weights_scaling_factor", ("F32",), ("o",), ROWS),
            _INPUT, _PREQUANT,
        ),
        _smooth, 0.1, 0.15,
    ),
    # trtllm-build quantizes these itself and skips a weight that is INT8 already, so they are stored as floats
    # (models/convert_utils.py: weight_only_quantize_dict; quantization/quantize_by_modelopt.py writes the same).
    "W8A16": Kind("W8A16", (Part("weight", FLOAT, ("o", "i"), "both"),), _plain, 0.0, 0.0),
    "W4A16": Kind("W4A16", (Part("weight", FLOAT, ("o", "i"), "both"),), _plain, 0.0, 0.0),
    "W4A16_AWQ": Kind("W4A16_AWQ", (_NIBBLES, _GROUPS, _PREQUANT), _awq, 0.3, 0.45, True, _AWQ_CONFIG),
    "W4A8_AWQ": Kind(
        "W4A8_AWQ", (_NIBBLES, _GROUPS, _PREQUANT, _SCALE_2, _INPUT), _awq, 0.3, 0.45, True, _AWQ_CONFIG
    ),
    "NVFP4": Kind(
        "NVFP4",
        (
            Part("weight", ("U8",), ("o", "i/2"), "both"),
            Part("weights_scaling_factor", ("F8_E4M3",), ("o", "i/g"), "both"), _SCALE_2, _INPUT,
        ),
        _nvfp4, 0.15, 0.3, True,
    ),
}  # fmt: skip

# What a recipe's format is called in config.json. INT4 without AWQ is W4A16_AWQ without its prequant_scaling_factor.
FORMATS = {
    "bf16": "none",
    "fp8-tensor": "FP8",
    "fp8-channel-token": "FP8_PER_CHANNEL_PER_TOKEN",
    "int8-w8a8": "W8A8_SQ_PER_CHANNEL",
    "int8-w8a16": "W8A16",
    "int4-w4a16": "W4A16_AWQ",
    "int4-w4a8": "W4A8_AWQ",
    "nvfp4": "NVFP4",
}


def part_shape(part: Part, rows: int, columns: int, group: int) -> tuple[int, ...]:
    """Return the shape that `part` has for a layer of `rows` x `columns` on one rank."""
    sizes = {"o": rows, "i": columns, "o/2": rows // 2, "i/2": columns // 2, "i/g": columns // max(group, 1)}
    return tuple(n if isinstance(n, int) else sizes[n] for n in part.shape)


def same_shape(found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    """Say whether shapes agree; one number may be stored with or without an axis."""
    return found == wanted or (wanted == (1,) and found == ())

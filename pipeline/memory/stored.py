"""How many bytes a format stores for a linear layer: by the layouts that lint proves (pipeline/layout_table.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.checkpoint import bytes_of
from pipeline.errors import InputError, unknown
from pipeline.formats import LAYOUTS_OF
from pipeline.layouts import Layout, dims_of, find_layout, part_shape, parts_of

WHOLE_ROW = 1 << 40  # stands for a group as wide as the layer
USUAL_GROUP = 128  # what published four-bit checkpoints use where they do not say it


@dataclass(frozen=True)
class Stored:
    """What a format stores of a linear layer. `group`: inputs that share a scale, or None.

    layout: the backend's own form, of which lint predicts too; None for 16 bits and for forms that nothing here makes,
    whose `per_group` and `per_tensor` bytes stand in stored.yaml. kv_scale_bytes: one calibrated scale of the cache.
    """

    fmt: str
    weight_bits: int
    compute: str
    group: int | None = None
    layout: Layout | None = None
    per_group: int = 0
    per_tensor: int = 0
    kv_scale_bytes: int = 0

    def layer_bytes(self, out: int, width: int) -> int:
        """Return the bytes of one linear layer of `out` outputs and `width` inputs."""
        if self.layout is None:
            groups = math.ceil(width / self.group) if self.group else 0
            return math.ceil(out * width * self.weight_bits / 8) + self.per_group * out * groups + self.per_tensor
        dims = dims_of((out, width), self.group)
        parts = [part for part, needed in parts_of(self.layout, {}) if needed]
        return sum(bytes_of(part.dtypes[0], part_shape(part, dims)) for part in parts)


@cache
def _table() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((Path(__file__).parent / "stored.yaml").read_text(encoding="utf-8")))


def formats() -> list[str]:
    """Return the formats whose size is known."""
    return list(_table())


def stored(
    fmt: str, group_size: int | None = None, backend: str = "", where: str = "stored.yaml", kv_scales: bool = False
) -> Stored:
    """Return what a format stores, as `backend` writes it; `kv_scales`: with calibrated scales of the KV cache.

    Raises:
        InputError: the format is not in the table (nearest name given), or its group size is not one.
    """
    if fmt not in _table():
        raise unknown("format", fmt, _table(), where)
    if group_size is not None and group_size <= 0:
        raise InputError(f"The group size {group_size} must be a whole number above zero, for instance 64 or 128.")
    entry = dict(_table()[fmt])
    usual = entry.pop("by", "")
    entry |= entry.pop("published", {})
    if entry.get("group") == "recipe":
        entry["group"] = group_size or USUAL_GROUP
    methods = [*LAYOUTS_OF.get(backend, ()), *LAYOUTS_OF.get(usual, ())]
    layout = next((found for method in methods if (found := find_layout(method, fmt))), None)
    scale = 0 if layout is None or not kv_scales else bytes_of("F32" if layout.method == "modelopt" else "BF16", ())
    return Stored(fmt=fmt, layout=layout, kv_scale_bytes=scale, **entry)


def of_checkpoint(quantization: Mapping[str, Any]) -> Stored | None:
    """Return what a published `quantization_config` stores, or None where it is not one of the known kinds."""
    method = str(quantization.get("quant_method"))
    if method == "fp8":
        # FP32 scales as ModelOpt's, in blocks too: DeepSeek-V3's weight_scale_inv of 128 x 128 (arXiv:2412.19437).
        return stored("fp8-block" if quantization.get("weight_block_size") else "fp8-tensor", backend="modelopt")
    if method == "mxfp4":
        return stored("mxfp4")
    group = quantization.get("group_size")
    group = group if type(group) is int and group > 0 else WHOLE_ROW if group == -1 else None
    if method in ("gptq", "awq") and quantization.get("bits") == 4:
        return stored("int4-w4a16", group, "gptqmodel" if method == "gptq" else "autoawq")
    if method == "compressed-tensors":
        return _compressed(quantization)
    names = {
        "FP8": "fp8-tensor",
        "NVFP4": "nvfp4",
        "MXFP8": "mxfp8",
        "W4A16_AWQ": "int4-w4a16",
        "W4A8_AWQ": "int4-w4a8",
    }
    fmt = names.get(str(quantization.get("quant_algo"))) if method == "modelopt" else None
    return stored(fmt, group, "modelopt") if fmt else None


def _compressed(quantization: Mapping[str, Any]) -> Stored | None:
    """Return what a compressed-tensors config with one group of layers stores."""
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) and len(groups) == 1 else None
    if not isinstance(first, Mapping) or not isinstance(first.get("weights"), Mapping):
        return None
    weights, activations = first["weights"], first.get("input_activations")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    fmt: str | None = None
    if (bits, kind) == (8, "float"):
        fmt = {"tensor": "fp8-tensor", "channel": "fp8-channel-token", "block": "fp8-block"}.get(str(strategy))
    elif (bits, kind) == (8, "int"):
        fmt = "int8-w8a8" if activations else "int8-w8a16"
    elif (bits, kind) == (4, "int"):
        fmt = "int4-w4a16"
    elif (bits, kind) == (4, "float"):
        fmt = "nvfp4" if activations else "nvfp4-w4a16"
    return stored(fmt, weights.get("group_size") if fmt == "int4-w4a16" else None, "llmcompressor") if fmt else None

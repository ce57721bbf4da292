"""How many bytes a format stores for a linear layer; the facts are data: stored.yaml."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import InputError, unknown

WHOLE_ROW = 1 << 40  # stands for a group as wide as the layer
USUAL_GROUP = 128  # what published four-bit checkpoints use where they do not say it


@dataclass(frozen=True)
class Stored:
    """Bytes of a format beside its packed weights; see stored.yaml. `group`: inputs that share a scale, or None."""

    fmt: str
    weight_bits: int
    compute: str
    per_tensor: float = 0
    per_out: float = 0
    per_in: float = 0
    per_group: float = 0
    per_block: float = 0
    group: int | None = None
    block: int | None = None

    def layer_bytes(self, out: int, width: int) -> int:
        """Return the bytes of one linear layer of `out` outputs and `width` inputs."""
        total = math.ceil(out * width * self.weight_bits / 8)
        total += math.ceil(self.per_tensor + self.per_out * out + self.per_in * width)
        if self.group:
            total += math.ceil(self.per_group * out * math.ceil(width / self.group))
        if self.block:
            total += math.ceil(self.per_block * math.ceil(out / self.block) * math.ceil(width / self.block))
        return total


@cache
def _table() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((Path(__file__).parent / "stored.yaml").read_text(encoding="utf-8")))


def formats() -> list[str]:
    """Return the formats whose size is known."""
    return list(_table())


def stored(fmt: str, group_size: int | None = None, backend: str = "", where: str = "stored.yaml") -> Stored:
    """Return what a format stores, as `backend` writes it.

    Raises:
        InputError: the format is not in the table (nearest name given), or its group size is not one.
    """
    if fmt not in _table():
        raise unknown("format", fmt, _table(), where)
    if group_size is not None and group_size <= 0:
        raise InputError(f"The group size {group_size} must be a whole number above zero, for instance 64 or 128.")
    entry = dict(_table()[fmt])
    entry |= entry.pop("by", {}).get(backend, {})
    if entry.get("group") == "recipe":
        entry["group"] = group_size or USUAL_GROUP
    return Stored(fmt=fmt, **entry)


def of_checkpoint(quantization: Mapping[str, Any]) -> Stored | None:
    """Return what a published `quantization_config` stores, or None where it is not one of the known kinds."""
    method = str(quantization.get("quant_method"))
    if method == "fp8":
        return stored("fp8-block" if quantization.get("weight_block_size") else "fp8-tensor")
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
    return stored(fmt, group) if fmt else None


def _compressed(quantization: Mapping[str, Any]) -> Stored | None:
    """Return what a compressed-tensors config with one group of layers stores."""
    groups = quantization.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, Mapping) and len(groups) == 1 else None
    if not isinstance(first, Mapping) or not isinstance(first.get("weights"), Mapping):
        return None
    weights, activations = first["weights"], first.get("input_activations")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if (bits, kind) == (8, "float"):
        by = {"tensor": "fp8-tensor", "channel": "fp8-channel-token", "block": "fp8-block"}
        return stored(by[strategy]) if strategy in by else None
    if (bits, kind) == (8, "int"):
        return stored("int8-w8a8" if activations else "int8-w8a16")
    if (bits, kind) == (4, "int"):
        return stored("int4-w4a16", weights.get("group_size"))
    return stored("nvfp4" if activations else "nvfp4-w4a16") if (bits, kind) == (4, "float") else None

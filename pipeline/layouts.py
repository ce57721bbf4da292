"""How each kind of checkpoint stores a quantized linear layer: questions about the layouts of layout_table.py.

Where do I add a layout: one `Layout` entry in layout_table.py, its decoder in decoders.py, its bound in oracle.py, and
one packer in tests/unit/packers.py.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Mapping
from typing import Any

from pipeline.checkpoint import TensorInfo, bytes_of, linear_layers
from pipeline.layout_parts import GROUP, Layout, Part, dims_of, look_up, part_shape, parts_of
from pipeline.layout_table import LAYOUTS

__all__ = [
    "ALWAYS_IGNORED", "GROUP", "LAYOUTS", "Layout", "Part", "dims_of", "find_layout", "ignore_list", "look_up",
    "matches", "part_shape", "parts_of", "predict_weight_bytes",
]  # fmt: skip
ALWAYS_IGNORED = frozenset({"lm_head"})  # what every backend of this project leaves alone


def find_layout(method: Any, fmt: str) -> Layout | None:
    """Return the layout of `fmt` as quant_method `method` stores it, or None."""
    return next((entry for entry in LAYOUTS if (entry.method, entry.fmt) == (method, fmt)), None)


def ignore_list(layout: Layout, qconfig: Mapping[str, Any]) -> list[str]:
    """Return the modules that the config says were left alone: names, globs, or `re:` patterns."""
    entries = qconfig.get(layout.ignore)
    if layout.method == "awq":  # AutoAWQ never packs the head and does not say so
        return ["lm_head", *map(str, entries or [])]
    if layout.method != "gptq":
        return [str(entry) for entry in entries] if isinstance(entries, list) else []
    # GPTQModel has no list: a flag for the head, and `dynamic` keys that start with "-:" for everything else.
    rules = entries if isinstance(entries, Mapping) else {}
    skipped = [f"re:{key.removeprefix('-:')}" for key in map(str, rules) if key.startswith("-:")]
    return skipped if qconfig.get("lm_head") else ["lm_head", *skipped]


def matches(entry: str, module: str) -> bool:
    """Say whether an ignore entry covers a module. A pattern that is no regular expression covers nothing."""
    if entry.startswith("re:"):
        try:
            return re.match(entry.removeprefix("re:"), module) is not None
        except re.error:
            return False
    return entry == module or (any(c in entry for c in "*?[") and fnmatch.fnmatchcase(module, entry))


def predict_weight_bytes(
    source: Mapping[str, TensorInfo],
    fmt: str,
    group_size: int | None,
    layout: str | None,
    qconfig: Mapping[str, Any] | None = None,
    ignored: Collection[str] = ALWAYS_IGNORED,
) -> int:
    """Return the bytes of all tensors that a recipe leads to, headers not counted.

    Args:
        source: the tensors of the source checkpoint, by name.
        fmt: the recipe's format.
        group_size: the recipe's group size, None where the format has no groups.
        layout: the quant_method that stores it; None for bf16.
        qconfig: what decides on parts that not every checkpoint has (zero points); none of them without it.
        ignored: linear layers that stay as they are.
    """
    entry = find_layout(layout, fmt)
    total = sum(tensor.nbytes for tensor in source.values())
    if entry is None:
        return total
    for layer in linear_layers({"tie_word_embeddings": False}, source):
        weight = source[f"{layer}.weight"]
        if layer in ignored:
            continue
        dims = dims_of(weight.shape, group_size)
        parts = [part for part, needed in parts_of(entry, qconfig or {}) if needed]
        total += sum(bytes_of(part.dtypes[0], part_shape(part, dims)) for part in parts) - weight.nbytes
    return total

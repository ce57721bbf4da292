"""What a layout says: the tensors of a quantized layer, their dtypes and shapes, and what the configs must hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.checkpoint import Checkpoint
from pipeline.decoders import Dims, Floats

GROUP = "<group_size>"  # stands for the recipe's group size in `Layout.config`
FLOAT_SCALE = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class Part:
    """One tensor stored for a layer, `<layer>.<suffix>`.

    `shape` is made of numbers and names of `dims_of`. With `when` = (path, value) the part must be there
    exactly if `quantization_config` holds that value; an `optional` one may be there.
    """

    suffix: str
    kind: str
    dtypes: tuple[str, ...]
    shape: tuple[str | int, ...]
    when: tuple[str, Any] | None = None
    optional: bool = False


@dataclass(frozen=True)
class Layout:
    """One on-disk form of one format.

    `parts[0]` holds the weight. `config`: path in `quantization_config` (`*` is every key) to the allowed
    values. `mirror`: a second file that repeats facts of `quantization_config`: (file, {path there: path in
    config}); `mirror_config`: path there to the allowed values.
    """

    method: str
    fmt: str
    parts: tuple[Part, ...]
    config: Mapping[str, tuple[Any, ...]]
    decode: Callable[[Checkpoint, str, slice, Dims], Floats]
    ignore: str = "ignore"
    symmetric: str = ""
    ordered: tuple[str, Any] | None = None
    mirror: tuple[str, Mapping[str, str]] | None = None
    mirror_config: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def dims_of(shape: tuple[int, ...], group_size: int | None) -> Dims:
    """Return the sizes that `Part.shape` may name, for a weight of `shape` (out, in)."""
    out, width = shape
    group = group_size or max(width, 1)
    return {"out": out, "in": width, "group": group, "groups": -(-width // group)}


def part_shape(part: Part, dims: Dims) -> tuple[int, ...]:
    """Return the shape that `part` must have; 'in/8' is the ceiling of in / 8."""
    return tuple(_size(n, dims) if isinstance(n, str) else n for n in part.shape)


def _size(name: str, dims: Dims) -> int:
    key, _, divisor = name.partition("/")
    return -(-dims[key] // int(divisor or 1))


def parts_of(layout: Layout, qconfig: Mapping[str, Any]) -> Iterator[tuple[Part, bool]]:
    """Yield (part, must be there) for every part that may be there under this `quantization_config`."""
    for part in layout.parts:
        if part.when is None:
            yield part, not part.optional
        elif part.when[1] in look_up(qconfig, part.when[0]):
            yield part, True


def look_up(value: Any, path: str) -> list[Any]:
    """Return what a dotted `path` leads to in nested mappings: `*` follows every key, [None] is nothing."""
    found = [value]
    for key in path.split("."):
        step: list[Any] = []
        for item in found:
            if isinstance(item, Mapping):
                step += list(item.values()) if key == "*" else [item.get(key)]
            else:
                step.append(None)
        found = step or [None]
    return found

"""How each kind of checkpoint stores a quantized linear layer: a table of data, and the decoders it names.

Sources: compressed-tensors 0.19 (compressors/), ModelOpt 0.47's unified export, GPTQModel 7.6 (qlinear/),
each read on a real checkpoint. `W[out, in]` is the source weight, `g` the group size along `in`.

Where do I add a layout: one `Layout` entry here and one packer in tests/unit/packers.py.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint import Checkpoint, TensorInfo, bytes_of, linear_layers, to_float

Floats = NDArray[np.float32]
Dims = dict[str, int]
GROUP = "<group_size>"  # stands for the recipe's group size in `Layout.config`
FLOAT_SCALE = ("BF16", "F16", "F32")
ALWAYS_IGNORED = frozenset({"lm_head"})  # what every backend of this project leaves alone


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
    config}).
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


def dims_of(shape: tuple[int, ...], group_size: int | None) -> Dims:
    """Return the sizes that `Part.shape` may name, for a weight of `shape` (out, in)."""
    out, width = shape
    group = group_size or max(width, 1)
    sizes = {"out": out, "in": width, "group": group, "groups": -(-width // group)}
    return sizes | {"out/8": -(-out // 8), "in/8": -(-width // 8)}


def part_shape(part: Part, dims: Dims) -> tuple[int, ...]:
    """Return the shape that `part` must have."""
    return tuple(dims[n] if isinstance(n, str) else n for n in part.shape)


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


def _rows(ck: Checkpoint, name: str, rows: slice, axis: int = 0) -> Floats:
    """Return the rows (or columns) of a scale; one value stands for all of them."""
    scale: Floats = np.asarray(ck.read(name), dtype=np.float32)
    if scale.size == 1:
        return scale.reshape(1, 1)
    part: Floats = scale.reshape(len(scale), -1)[rows] if axis == 0 else scale[:, rows].T
    return part


def _cast(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
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


def _pack_quantized(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
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
    form = look_up(ck.config, "quantization_config.checkpoint_format")[0]
    stored = nibbles(ck.raw(f"{layer}.qzeros"))[:, : dims["out"]]
    return stored if form == "gptq_v2" else (stored + np.uint8(1)) & np.uint8(15)


def _gptq(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
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


def _awq(ck: Checkpoint, layer: str, rows: slice, dims: Dims) -> Floats:
    """AutoAWQ's GEMM form: W transposed, words along `out` in an interleaved order, zero points likewise."""
    codes = _awq_nibbles(ck.raw(f"{layer}.qweight"))[:, : dims["out"]][:, rows].T
    zeros = _awq_nibbles(ck.raw(f"{layer}.qzeros"))[:, : dims["out"]][:, rows].T.astype(np.float32)
    return _grouped(codes, zeros, _rows(ck, f"{layer}.scales", rows, axis=1), None, dims)


def _compressed(
    fmt: str,
    form: str,
    bits: int,
    kind: str,
    strategy: str,
    activations: tuple[str, bool] | None,
    *parts: Part,
) -> Layout:
    """Return a compressed-tensors layout: the schemes of that library differ only in these arguments."""
    weights, inputs = "config_groups.*.weights.", "config_groups.*.input_activations"
    config: dict[str, tuple[Any, ...]] = {
        "format": (form,),
        "quantization_status": ("compressed",),
        f"{weights}num_bits": (bits,),
        f"{weights}type": (kind,),
        f"{weights}strategy": (strategy,),
        f"{weights}group_size": (GROUP,),
        f"{weights}symmetric": (True, False) if bits == 4 else (True,),
    }
    if activations is None:
        config[inputs] = (None,)
    else:
        wanted = {"num_bits": bits, "type": kind, "strategy": activations[0], "dynamic": activations[1]}
        config |= {f"{inputs}.{key}": (value,) for key, value in wanted.items()}
    decode = _pack_quantized if bits == 4 else _cast
    return Layout("compressed-tensors", fmt, parts, config, decode, symmetric=f"{weights}symmetric")


def _modelopt(fmt: str, algo: str, *parts: Part) -> Layout:
    """Return a layout of ModelOpt's unified export; KV-cache scales are there only when asked for."""
    kv = tuple(Part(f"{side}_scale", "scale", ("F32", "BF16"), (), optional=True) for side in "kv")
    mirror = {"quantization.quant_algo": "quant_algo", "quantization.exclude_modules": "ignore"}
    return Layout(
        "modelopt",
        fmt,
        parts + kv,
        {"quant_algo": (algo,), "config_groups.*.weights.num_bits": (8, None)},
        _cast,
        mirror=("hf_quant_config.json", mirror),
    )


_SYM, _ORDER = "config_groups.*.weights.symmetric", "config_groups.*.weights.actorder"
_F8 = Part("weight", "packed", ("F8_E4M3",), ("out", "in"))
_I8 = Part("weight", "packed", ("I8",), ("out", "in"))
_PER_ROW = Part("weight_scale", "scale", FLOAT_SCALE, ("out", 1))

LAYOUTS: tuple[Layout, ...] = (
    _compressed(
        "int4-w4a16", "pack-quantized", 4, "int", "group", None,
        Part("weight_packed", "packed", ("I32",), ("out", "in/8")),
        Part("weight_scale", "scale", FLOAT_SCALE, ("out", "groups")),
        Part("weight_shape", "shape-record", ("I64", "I32"), (2,)),
        Part("weight_zero_point", "zero-point", ("I32",), ("out/8", "groups"), when=(_SYM, False)),
        Part("weight_g_idx", "group-index", ("I32",), ("in",), when=(_ORDER, "group")),
    ),
    _compressed("int8-w8a8", "int-quantized", 8, "int", "channel", ("token", True), _I8, _PER_ROW),
    _compressed(
        "fp8-channel-token", "float-quantized", 8, "float", "channel", ("token", True), _F8, _PER_ROW,
    ),
    _compressed(
        "fp8-tensor", "float-quantized", 8, "float", "tensor", ("tensor", False), _F8,
        Part("weight_scale", "scale", FLOAT_SCALE, (1,)),
        Part("input_scale", "activation-scale", FLOAT_SCALE, (1,)),
    ),
    _modelopt(
        "fp8-tensor", "FP8", _F8,
        Part("weight_scale", "scale", ("F32",), ()),
        Part("input_scale", "activation-scale", ("F32",), ()),
    ),
    _modelopt(
        "fp8-channel-token", "FP8_PER_CHANNEL_PER_TOKEN", _F8,
        Part("weight_scale", "scale", ("F32", "BF16"), ("out",)),
    ),
    Layout(
        "gptq",
        "int4-w4a16",
        (
            Part("qweight", "packed", ("I32",), ("in/8", "out")),
            Part("scales", "scale", ("F16", "BF16"), ("groups", "out")),
            Part("qzeros", "zero-point", ("I32",), ("groups", "out/8")),
            Part("g_idx", "group-index", ("I32",), ("in",)),
        ),
        {
            "bits": (4,),
            "group_size": (GROUP,),
            "pack_dtype": ("int32", None),
            "checkpoint_format": ("gptq", "gptq_v2", None),
        },
        _gptq,
        ignore="dynamic",
        symmetric="sym",
        ordered=("desc_act", False),
        mirror=(
            "quantize_config.json",
            {key: key for key in ("bits", "group_size", "sym", "desc_act", "lm_head", "checkpoint_format")},
        ),
    ),
    Layout(
        "awq",
        "int4-w4a16",
        (
            Part("qweight", "packed", ("I32",), ("in", "out/8")),
            Part("scales", "scale", ("F16", "BF16"), ("groups", "out")),
            Part("qzeros", "zero-point", ("I32",), ("groups", "out/8")),
        ),
        {"bits": (4,), "group_size": (GROUP,), "version": ("gemm",), "zero_point": (True,)},
        _awq,
        ignore="modules_to_not_convert",
    ),
)  # fmt: skip


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

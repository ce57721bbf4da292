"""Reading a checkpoint folder (safetensors and config.json) without torch, and without trusting it.

The safetensors format: 8 bytes of little-endian header length, a JSON header, then the data; every tensor is
a byte range of the data, and the ranges touch without holes (huggingface/safetensors, section "Format").
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import InputError

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
# Bytes per element, and how numpy holds the raw bits (numpy has no bfloat16 and no float8).
_RAW: dict[str, type[np.generic]] = {
    "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "U16": np.uint16, "I16": np.int16, "U32": np.uint32,
    "I32": np.int32, "U64": np.uint64, "I64": np.int64, "F16": np.float16, "F32": np.float32,
    "F64": np.float64, "BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip
# The reference reader's own limit; it also bounds what a flipped length byte can make this reader allocate.
_MAX_HEADER_BYTES = 100_000_000
_NOT_LINEAR = re.compile(r"embed|norm|^(wte|wpe|ln_?\w*)$")


class CheckpointError(InputError):
    """A checkpoint that cannot be read; `subject` is the file or tensor at fault."""

    def __init__(self, subject: str, message: str) -> None:
        """Keep the `subject` beside the `message`."""
        super().__init__(message)
        self.subject = subject


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a safetensors file. `offsets`: first byte and end, counted from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, int]
    file: Path

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.offsets[1] - self.offsets[0]


def bytes_of(dtype: str, shape: Iterable[int]) -> int:
    """Return the size in bytes of a tensor of a known `dtype` and `shape`."""
    return np.dtype(_RAW[dtype]).itemsize * math.prod(shape)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read and check the header of one safetensors file; no tensor data is read.

    Returns:
        Every tensor by name, in the order of the header.

    Raises:
        InputError: missing or truncated file, bad header, or a tensor whose range, dtype and shape disagree;
        the
            message names the file and the tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise _bad(path, f"is {size} bytes long, too short for a safetensors header")
            length = int.from_bytes(prefix, "little")
            if length > size - 8 or length > _MAX_HEADER_BYTES:
                raise _bad(path, f"says its header is {length} bytes long, but the file has {size} bytes")
            raw = file.read(length)
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})") from None
    tensors = {name: _entry(path, name, entry, 8 + length) for name, entry in _header_json(path, raw).items()}
    _check_ranges(path, tensors.values(), 8 + length, size)
    return tensors


def _bad(path: Path, what: str, subject: str | None = None) -> CheckpointError:
    return CheckpointError(subject or path.name, f"{path} {what}. Fetch or make the checkpoint again.")


def _header_json(path: Path, raw: bytes) -> dict[str, Any]:
    """Parse the header strictly: a repeated key or a NaN is damage that json.loads would let through."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _bad(path, f"names '{key}' twice in its header", key)
            found[key] = value
        return found

    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8, bad JSON and absurd integers
        raise _bad(path, f"has a header that is not JSON ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise _bad(path, "has a header that is not a JSON object")
    header.pop("__metadata__", None)
    return header


def _entry(path: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    """Turn one header entry into a TensorInfo; every field may be damaged."""
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise _bad(path, f"describes tensor '{name}' by something else than dtype, shape, data_offsets", name)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _RAW:
        raise _bad(path, f"gives tensor '{name}' the unknown dtype {str(dtype)[:40]!r}", name)
    if not _naturals(shape) or len(shape) > 32 or math.prod(max(1, n) for n in shape) >= 1 << 60:
        raise _bad(path, f"gives tensor '{name}' an impossible shape", name)
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _bad(path, f"gives tensor '{name}' an impossible byte range", name)
    want, have = bytes_of(dtype, shape), offsets[1] - offsets[0]
    if want != have:
        raise _bad(path, f"gives tensor '{name}' ({dtype} {shape}, {want} bytes) a range of {have} bytes", name)
    return TensorInfo(name, dtype, tuple(shape), (data_start + offsets[0], data_start + offsets[1]), path)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _check_ranges(path: Path, tensors: Iterable[TensorInfo], start: int, size: int) -> None:
    """Raise unless the ranges cover the data exactly once: no overlap, no hole, no end past the file."""
    at = start
    for tensor in sorted(tensors, key=lambda t: t.offsets):
        if tensor.offsets[1] > size:
            raise _bad(
                path,
                f"is truncated: tensor '{tensor.name}' ends at byte {tensor.offsets[1]}, the file has {size}",
                tensor.name,
            )
        if tensor.offsets[0] != at:
            what = "overlaps the one before it" if tensor.offsets[0] < at else "starts after a hole"
            raise _bad(path, f"has tensor '{tensor.name}' where it {what}", tensor.name)
        at = tensor.offsets[1]
    if at != size:
        raise _bad(path, f"has {size - at} bytes after its last tensor")


@cache
def _f8_table() -> NDArray[np.float32]:
    """Return the values of the 256 codes of float8 e4m3fn (arXiv:2209.05433): no infinity, two NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    value[(code & 127) == 127] = np.nan
    return np.where(code & 128, -value, value).astype(np.float32)


def to_float(raw: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Convert what `Checkpoint.raw` gives (any shape) to float32, without loss for 16 bits and fewer."""
    if dtype == "BF16":
        return np.asarray(raw.astype(np.uint32) << 16).view(np.float32)
    if dtype == "F8_E4M3":
        return np.asarray(_f8_table()[raw], dtype=np.float32)
    return raw.astype(np.float32)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose headers, index and config.json have been read and agree.

    `index_bytes` is what the index says the tensors add up to, None without an index or without that number.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    index_bytes: int | None = None
    _maps: dict[Path, NDArray[np.uint8]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Read config.json and all headers of `folder`: one safetensors file, or shards with an index.

        Raises:
            InputError: no folder, no config, only pickles, or files that are damaged or disagree.
        """
        if not folder.is_dir():
            raise CheckpointError(folder.name, f"There is no checkpoint folder {folder}.")
        config = read_object(folder / "config.json")
        files = sorted(folder.glob("*.safetensors"))
        index = folder / INDEX
        if index.is_file():
            return cls(folder, config, *_read_shards(index, files))
        if not files:
            pickles = sorted(f.name for f in folder.iterdir() if f.suffix in PICKLES)
            found = f"only {', '.join(pickles[:3])}, and a pickle can run code" if pickles else "none"
            raise CheckpointError(
                pickles[0] if pickles else folder.name,
                f"{folder} must hold weights as safetensors, safetensors only, and has {found}. "
                "Convert it with safetensors' own convert.py, or pick a revision that has safetensors.",
            )
        if len(files) > 1:
            names = ", ".join(f.name for f in files[:3])
            raise CheckpointError(INDEX, f"{folder} has {len(files)} weight files ({names}, ...) and no {INDEX}.")
        return cls(folder, config, read_header(files[0]))

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors together, headers not counted."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def parameters(self) -> int:
        """Number of stored values of all tensors together (packed values count once a container)."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    def raw(self, name: str) -> NDArray[Any]:
        """Return a tensor's bits, memory-mapped and read-only, in its shape: BF16 as uint16, F8 as uint8."""
        info = self.tensors[name]
        if info.file not in self._maps:
            self._maps[info.file] = np.memmap(info.file, dtype=np.uint8, mode="r")
        part = self._maps[info.file][slice(*info.offsets)]
        return part.view(np.ndarray).view(_RAW[info.dtype]).reshape(info.shape)

    def read(self, name: str) -> NDArray[Any]:
        """Return a tensor's values in its shape: BF16 and F8_E4M3 as float32, other dtypes as they are."""
        dtype = self.tensors[name].dtype
        return to_float(self.raw(name), dtype) if dtype in ("BF16", "F8_E4M3") else self.raw(name)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object.

    Raises:
        InputError: missing, not JSON, or something else than an object; the message names the file.
    """
    try:
        value = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise _bad(path, f"cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        raise _bad(path, "is not valid JSON") from None
    if not isinstance(value, dict):
        raise _bad(path, "must hold a JSON object")
    return value


def _read_shards(index: Path, files: list[Path]) -> tuple[dict[str, TensorInfo], int | None]:
    """Read every shard that the index names and check that both tell the same story."""
    content = read_object(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not all(_plain_name(v) for v in weight_map.values()):
        raise _bad(index, "has no weight_map from tensor names to file names")
    tensors: dict[str, TensorInfo] = {}
    for shard in sorted(set(weight_map.values()) | {f.name for f in files}):
        if not (index.parent / shard).is_file():
            raise CheckpointError(shard, f"{index} names the shard {shard}, which is missing. Fetch or make it again.")
        for name, info in read_header(index.parent / shard).items():
            if name in tensors:
                raise _bad(index, f"has tensor '{name}' in {tensors[name].file.name} and again in {shard}", name)
            if weight_map.get(name) != shard:
                raise _bad(index, f"puts tensor '{name}' in {weight_map.get(name)}, but it is in {shard}", name)
            tensors[name] = info
    if absent := sorted(set(weight_map) - set(tensors)):
        raise _bad(index, f"names tensor '{absent[0]}', which is not in {weight_map[absent[0]]}", absent[0])
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return tensors, total if type(total) is int else None


def _plain_name(value: Any) -> bool:
    """A shard is a file of the same folder: an index must not reach out of it."""
    return isinstance(value, str) and value.endswith(".safetensors") and "/" not in value and "\\" not in value


def is_tied(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> bool:
    """Say whether the head shares the embedding: the config's flag, else whether lm_head.weight is absent."""
    text = config.get("text_config")
    flag = config.get("tie_word_embeddings", text.get("tie_word_embeddings") if isinstance(text, dict) else None)
    return flag if isinstance(flag, bool) else "lm_head.weight" not in tensors


def linear_layers(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Return the names of the linear modules of a source checkpoint, lm_head too when present or tied."""
    names = [
        name.removesuffix(".weight")
        for name, info in tensors.items()
        if name.endswith(".weight")
        and len(info.shape) == 2
        and not _NOT_LINEAR.search(name.removesuffix(".weight").rsplit(".", 1)[-1])
    ]
    return names if "lm_head" in names or not is_tied(config, tensors) else [*names, "lm_head"]

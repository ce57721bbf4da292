"""How far do two checkpoints of one recipe agree, tensor by tensor? For instance one made on a CPU and one on a GPU.

A quantized weight is compared code by code (two 4-bit codes of a byte are two codes), because a rounding that fell to
the other side moves one code and says nothing of the bytes beside it; floating tensors by relative RMS difference.
Numbers only: what agreement is good enough is for evaluate to say.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint import Checkpoint, TensorInfo, to_float
from pipeline.errors import InputError

_FLOATS = ("BF16", "F16", "F32", "F64")


class Difference(NamedTuple):
    """One tensor: codes or values compared, those that are equal, relative RMS difference, the largest code distance.

    `relative_rms` is |a - b| / |a| of the values as stored, None for packed integers, whose scale is elsewhere;
    `code_distance` is None for floating tensors.
    """

    name: str
    kind: str
    elements: int
    equal: int
    relative_rms: float | None
    code_distance: int | None


def kind_of(name: str) -> str:
    """Return what a tensor is in its layer: the last part of its name, `weight` apart for norms and embeddings."""
    module, _, last = name.rpartition(".")
    parent = module.rpartition(".")[2]
    if last == "weight" and ("norm" in parent or "embed" in parent or parent == "lm_head"):
        return f"{parent.replace('input_', '').replace('post_attention_', '')}.weight"
    return last


def codes(raw: NDArray[Any], dtype: str, bits: int | None) -> NDArray[np.int64]:
    """Return the codes of stored integers; `bits` 4 unpacks the eight codes of an int32 or the two of a byte."""
    if dtype == "F8_E4M3":
        # Sign and magnitude: the distance between two codes counts representable values, through zero.
        magnitude = (raw & 0x7F).astype(np.int64)
        return np.where(raw & 0x80, -magnitude, magnitude)
    if bits != 4:
        return raw.astype(np.int64)
    flat = np.ascontiguousarray(raw).view(np.uint8).reshape(-1)
    return np.stack([flat & 0x0F, flat >> 4], axis=-1).astype(np.int64).reshape(-1)


def compare_tensor(a: NDArray[Any], b: NDArray[Any], info: TensorInfo, bits: int | None) -> Difference:
    """Compare two tensors of one shape and dtype, as `Checkpoint.raw` gives them."""
    kind = kind_of(info.name)
    if info.dtype in _FLOATS:
        x, y = to_float(np.asarray(a), info.dtype), to_float(np.asarray(b), info.dtype)
        equal = int(np.count_nonzero(np.asarray(a) == np.asarray(b)))
        power = float(np.square(x, dtype=np.float64).sum())
        error = float(np.square(x - y, dtype=np.float64).sum())
        return Difference(info.name, kind, x.size, equal, _relative(error, power), None)
    packed = bits if info.name.endswith(("weight_packed", "qweight", "qzeros")) else None
    x_codes, y_codes = codes(np.asarray(a), info.dtype, packed), codes(np.asarray(b), info.dtype, packed)
    apart = np.abs(x_codes - y_codes)
    relative = None
    if packed is None and info.dtype == "F8_E4M3":
        x, y = to_float(np.asarray(a), info.dtype), to_float(np.asarray(b), info.dtype)
        error = float(np.square(x - y, dtype=np.float64).sum())
        relative = _relative(error, float(np.square(x, dtype=np.float64).sum()))
    elif packed is None:
        relative = _relative(float(np.square(apart).sum()), float(np.square(x_codes).sum()))
    far = int(apart.max()) if apart.size else 0
    return Difference(info.name, kind, x_codes.size, int((apart == 0).sum()), relative, far)


def _relative(error: float, power: float) -> float:
    return (error / power) ** 0.5 if power else float(error > 0)


def bits_of(config: dict[str, Any]) -> int | None:
    """Return the weight bits that a quantization config states, or None."""
    found = config.get("quantization_config") or {}
    for group in (found.get("config_groups") or {}).values():
        return (group.get("weights") or {}).get("num_bits")
    bits = found.get("bits")
    return bits if isinstance(bits, int) else None


def compare(first: Path, second: Path) -> dict[str, Any]:
    """Compare two checkpoint folders.

    Returns:
        `only_in_first`, `only_in_second`, `unlike` (other dtype or shape), and per kind of tensor the number of
        tensors, of those equal in every byte, the share of equal elements, the largest relative RMS difference and
        the largest distance of two codes.

    Raises:
        InputError: a folder that cannot be read, or the two store other numbers of bits.
    """
    a, b = Checkpoint.open(first), Checkpoint.open(second)
    bits = bits_of(a.config)
    if bits != bits_of(b.config):
        raise InputError(f"{first} stores {bits} bits a weight and {second} {bits_of(b.config)}: two recipes.")
    shared = [n for n in a.tensors if n in b.tensors]
    if not shared:
        raise InputError(f"{first} and {second} have no tensor of one name: two models, or two layouts.")
    unlike = [
        f"{n}: {a.tensors[n].dtype} {list(a.tensors[n].shape)} and {b.tensors[n].dtype} {list(b.tensors[n].shape)}"
        for n in shared
        if (a.tensors[n].dtype, a.tensors[n].shape) != (b.tensors[n].dtype, b.tensors[n].shape)
    ]
    names = {text.split(":")[0] for text in unlike}
    found = [compare_tensor(a.raw(n), b.raw(n), a.tensors[n], bits) for n in shared if n not in names]
    return {
        "schema": "quantpress.compare/1",
        "first": first.as_posix(),
        "second": second.as_posix(),
        "tensors": len(found),
        "identical_tensors": sum(d.equal == d.elements for d in found),
        "only_in_first": sorted(set(a.tensors) - set(b.tensors)),
        "only_in_second": sorted(set(b.tensors) - set(a.tensors)),
        "unlike": unlike,
        "kinds": {k: _summary([d for d in found if d.kind == k]) for k in dict.fromkeys(d.kind for d in found)},
    }


def _summary(rows: list[Difference]) -> dict[str, Any]:
    relative = [(r.relative_rms, r.name) for r in rows if r.relative_rms is not None]
    distances = [r.code_distance for r in rows if r.code_distance is not None]
    worst = min(rows, key=lambda r: r.equal / max(1, r.elements))
    return {
        "tensors": len(rows),
        "identical": sum(r.equal == r.elements for r in rows),
        "elements": sum(r.elements for r in rows),
        "equal_share": round(sum(r.equal for r in rows) / max(1, sum(r.elements for r in rows)), 6),
        "least_equal": {"name": worst.name, "share": round(worst.equal / max(1, worst.elements), 6)},
        "largest_relative_rms": max(relative)[0] if relative else None,
        "largest_code_distance": max(distances) if distances else None,
    }


def table(found: dict[str, Any]) -> str:
    """Return the comparison as a table for a terminal."""
    lines = [f"{'TENSORS':26} {'COUNT':>5} {'SAME':>5} {'EQUAL':>9} {'LARGEST REL. RMS':>17} {'CODES APART':>12}"]
    for kind, row in found["kinds"].items():
        rms = "-" if row["largest_relative_rms"] is None else f"{row['largest_relative_rms']:.2e}"
        far = "-" if row["largest_code_distance"] is None else str(row["largest_code_distance"])
        lines.append(f"{kind:26} {row['tensors']:5} {row['identical']:5} {row['equal_share']:9.4%} {rms:>17} {far:>12}")
    for key, text in (("only_in_first", "only in the first"), ("only_in_second", "only in the second")):
        lines += [f"{text}: {name}" for name in found[key][:10]]
    lines += [f"unlike: {text}" for text in found["unlike"][:10]]
    lines.append(f"{found['identical_tensors']} of {found['tensors']} tensors are equal in every byte.")
    return "\n".join(lines)

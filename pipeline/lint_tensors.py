"""Lint rules on tensors: which layers are quantized, how, with which numbers; the rest is the source's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import layouts, oracle
from pipeline.checkpoint import Checkpoint, TensorInfo, is_tied, to_float
from pipeline.decoders import gptq_zeros
from pipeline.lint_case import Case, Report
from pipeline.lint_kv import scale_names

_CHUNK = 1 << 24  # elements looked at together: bounds memory on huge embeddings
# The bits of a float that are all set in NaN and infinity (in NaN alone for e4m3, which has no infinity).
_SPECIAL = {"BF16": 0x7F80, "F8_E4M3": 0x7F, "F8_E5M2": 0x7C}


def check_tied(case: Case, report: Report) -> None:
    """The output head shares the embedding exactly if it did in the source."""
    want, have = (
        is_tied(case.source.config, case.source.tensors),
        is_tied(case.made.config, case.made.tensors),
    )
    if want != have:
        report.error("tied", "tie_word_embeddings", f"Tied embeddings: source {want}, checkpoint {have}.")
    heads = [name for name in case.made.tensors if name.startswith("lm_head.")]
    if not want or "lm_head.weight" in case.source.tensors or not heads:
        return
    embedding = next((name for name in case.made.tensors if name.endswith("embed_tokens.weight")), None)
    if heads == ["lm_head.weight"] and embedding and same_bits(case.made, heads[0], case.made, embedding):
        report.warn("tied", heads[0], "lm_head.weight repeats the tied embedding: right, but stored twice.")
    else:
        report.error("tied", heads[0], f"{heads[0]} differs from the embedding, but the source has them tied.")


def check_ignore_list(case: Case, report: Report) -> list[str]:
    """Return the layers stored quantized; every other one, and nothing else, must be on the ignore list."""
    if case.layout is None:
        return []
    packed, main = [], case.layout.parts[0].suffix
    tied = is_tied(case.source.config, case.source.tensors)
    for layer in case.layers:
        source = case.source.tensors.get(f"{layer}.weight")
        found = case.made.tensors.get(f"{layer}.{main}")
        ignored = any(layouts.matches(entry, layer) for entry in case.ignored)
        if found and source and (main != "weight" or found.dtype != source.dtype):
            packed.append(layer)
            if ignored:
                report.error("ignored-but-packed", layer, f"{layer} is on the ignore list, but is stored quantized.")
        elif source and f"{layer}.weight" not in case.made.tensors and not (tied and layer == "lm_head"):
            report.error("layer-missing", layer, f"{layer} has neither {main} nor weight in the checkpoint.")
        elif not ignored:
            report.error("not-quantized", layer, f"{layer} is neither quantized nor on the ignore list.")
    parents = {name.rpartition(".")[0] for name in case.source.tensors} | set(case.layers)
    modules = {name.rsplit(".", depth)[0] for name in parents for depth in range(name.count(".") + 1)}
    for entry in case.ignored:
        if not any(layouts.matches(entry, module) for module in modules):
            report.error("ignore-stale", entry, f"The ignore list has {entry!r}, which matches no module.")
    if not packed:
        report.error("nothing-quantized", case.made.folder.name, f"No layer is stored as {case.fmt}.")
    return packed


def check_parts(case: Case, layer: str, report: Report) -> bool:
    """Check dtypes, shapes and values of what a layer is stored as; say whether it can be dequantized."""
    assert case.layout is not None
    dims = layouts.dims_of(case.source.tensors[f"{layer}.weight"].shape, case.group_size)
    before = len(report.findings)
    if dims["in"] % dims["group"]:
        report.error("group-size", layer, f"{layer} has {dims['in']} inputs: group {dims['group']} does not divide.")
    for part, needed in layouts.parts_of(case.layout, case.qconfig):
        name, want = f"{layer}.{part.suffix}", layouts.part_shape(part, dims)
        info = case.made.tensors.get(name)
        if info is None:
            if needed:
                report.error(f"{part.kind}-missing", name, f"{name} is missing; {case.fmt} needs it.")
        elif info.dtype not in part.dtypes:
            report.error(f"{part.kind}-dtype", name, f"{name} is {info.dtype}, not {' or '.join(part.dtypes)}.")
        elif info.shape != want:
            report.error(f"{part.kind}-shape", name, f"{name} has shape {info.shape}; its scheme needs {want}.")
        elif fault := _value_fault(case, layer, part.kind, name, dims):
            report.error(f"{part.kind}-value", name, f"{name} {fault}.")
    return len(report.findings) == before


def _value_fault(case: Case, layer: str, kind: str, name: str, dims: Mapping[str, int]) -> str | None:
    """Return what is wrong with the numbers of one part of the right shape, or None."""
    assert case.layout is not None
    value = case.made.read(name)
    if kind == "exponent":  # 255 is the NaN of E8M0
        bad = int((value == 255).sum())
        return f"has {bad} of {value.size} exponents that are NaN" if bad else None
    if kind == "block-scale":  # a block of tiny weights may round to a scale of 0, a whole layer may not
        good = np.isfinite(value) & (value >= 0)
        if good.all() and value.any():
            return None
        return f"has {int((~good).sum())} of {value.size} values not finite and positive, or no value above 0"
    if kind.endswith("scale"):
        good = np.isfinite(value) & (value > 0)
        return None if good.all() else f"has {int((~good).sum())} of {good.size} values not finite and positive"
    if kind == "shape-record" and value.tolist() != [dims["out"], dims["in"]]:
        return f"says {value.tolist()}, the source layer is {[dims['out'], dims['in']]}"
    if kind == "zero-point" and case.layout.method == "gptq" and case.qconfig.get(case.layout.symmetric):
        zeros = gptq_zeros(case.made, layer, dict(dims))
        return (
            None if (zeros == 8).all() else f"has {int((zeros != 8).sum())} zero points off the middle, but sym is true"
        )
    if kind == "group-index":
        if value.min() < 0 or value.max() >= dims["groups"]:
            return f"has groups {value.min()} to {value.max()}; there are {dims['groups']}"
        if (np.bincount(value, minlength=dims["groups"]) != dims["group"]).any():
            return f"does not give each group {dims['group']} inputs"
        rule = case.layout.ordered
        if rule and case.qconfig.get(rule[0]) == rule[1] and (np.diff(value) < 0).any():
            return f"is out of order, but {rule[0]} is {rule[1]}, so a kernel will not read it"
    return None


def check_tensors(case: Case, packed: list[str], report: Report) -> None:
    """What was not quantized is the source's, bit for bit; nothing is lost, added, NaN or infinite."""
    quantized = {f"{layer}.weight" for layer in packed}
    plain = {name: info for name, info in case.source.tensors.items() if name not in quantized}
    parts: dict[str, str] = {}
    if case.layout is not None:
        kinds = {part.suffix: part.kind for part, _ in layouts.parts_of(case.layout, case.qconfig)}
        parts = {f"{layer}.{suffix}": kind for layer in packed for suffix, kind in kinds.items()}
    parts |= dict.fromkeys(scale_names(case), "kv-scale")
    for name, info in plain.items():
        found = case.made.tensors.get(name)
        if found is None:
            # A linear layer that is gone has its own rule, unless nothing is quantized.
            if case.fmt == "bf16" or name.removesuffix(".weight") not in case.layers:
                report.error("tensor-missing", name, f"{name} is in the source and not in the checkpoint.")
        elif found.shape != info.shape:
            report.error("tensor-shape", name, f"{name} has shape {found.shape}, the source {info.shape}.")
        elif not oracle.may_differ(name, case.moves):
            _check_equal(case, found, info, report)
    for name, info in case.made.tensors.items():
        if name not in plain and name not in parts and not name.startswith("lm_head."):
            report.error("tensor-unexpected", name, f"{name} belongs to no layer of the source in this layout.")
        if not parts.get(name, "").endswith("scale") and (bad := _not_finite(case.made, info)):
            report.error("not-finite", name, f"{name} has {bad} values that are NaN or infinite.")


def _check_equal(case: Case, found: TensorInfo, info: TensorInfo, report: Report) -> None:
    name = info.name
    if found.dtype == info.dtype:
        if not same_bits(case.made, name, case.source, name):
            report.error("tensor-differs", name, f"{name} is not quantized, but differs from the source.")
        return
    report.warn("tensor-dtype", name, f"{name} is {found.dtype}, {info.dtype} in the source.")
    want, have = (to_float(ck.raw(name), ck.tensors[name].dtype) for ck in (case.source, case.made))
    if not np.allclose(want, have, rtol=2.0**-8, atol=1e-7):  # one rounding to bfloat16, the coarsest 16-bit type
        report.error("tensor-differs", name, f"{name} differs from the source by more than rounding.")


def same_bits(one: Checkpoint, name: str, other: Checkpoint, twin: str) -> bool:
    """Say whether two tensors have the same shape, dtype and bits."""
    a, b = one.tensors[name], other.tensors[twin]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    pairs = zip(_chunks(one.raw(name)), _chunks(other.raw(twin)), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


def _chunks(raw: NDArray[Any]) -> Iterator[NDArray[Any]]:
    flat = raw.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        yield flat[start : start + _CHUNK]


def _not_finite(ck: Checkpoint, info: TensorInfo) -> int:
    """Count NaN and infinity in a float tensor; 0 for other dtypes."""
    if info.dtype in _SPECIAL:
        mask = _SPECIAL[info.dtype]
        return sum(int(np.count_nonzero((chunk & mask) == mask)) for chunk in _chunks(ck.raw(info.name)))
    if info.dtype in ("F16", "F32", "F64"):
        return sum(int(np.count_nonzero(~np.isfinite(chunk))) for chunk in _chunks(ck.raw(info.name)))
    return 0


def check_values(case: Case, sound: Mapping[str, None], report: Report) -> dict[str, Any] | None:
    """Dequantize the layers whose form is `sound` and hold them against the source; see pipeline/oracle.py.

    Returns:
        How many were compared, the median error and the worst one (relative RMS), or None if none was.
    """
    if case.layout is None or not sound:
        return None
    judge = oracle.Oracle(case.made, case.source, case.layout, case.group_size, case.moves)
    bound = oracle.BOUNDS[case.fmt]
    with np.errstate(all="ignore"):  # a NaN in a layer has its own finding; here it must only not pass
        measures = list(judge.measure(sound))
    for m in measures:
        drift = f"{m.layer} differs from the source's weight by {m.error:.1%} (relative RMS)"
        row = f"row {m.row} is {m.row_gain:.2f} times the source's"
        limit = bound.gptq if "gptq" in case.moves else bound.error
        if not m.error <= limit:
            report.error("weight-error", m.layer, f"{drift}, {limit:.0%} is the most for {case.fmt}; {row}.")
        elif not abs(m.row_gain - 1) <= bound.row_gain:
            report.error("weight-row", m.layer, f"{m.layer} has a wrong row or scale: {row}.")
        elif not m.column_drift <= oracle.COLUMN_DRIFT:
            report.error("weight-columns", m.layer, f"{m.layer} and the norm it reads were not folded together.")
        elif m.error > bound.error:
            report.warn("weight-drift", m.layer, f"{drift}: GPTQ may do that where calibration says little.")
    worst = max(measures, key=lambda m: m.error if np.isfinite(m.error) else np.inf)
    median = float(np.median([m.error for m in measures]))
    return {
        "compared": len(measures),
        "median_relative_rms": round(median, 5) if np.isfinite(median) else None,
        "worst_relative_rms": round(worst.error, 5) if np.isfinite(worst.error) else None,
        "worst_layer": worst.layer,
    }

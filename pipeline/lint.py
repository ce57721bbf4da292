"""Is a checkpoint whole, and is it the source quantized as the recipe says? No GPU, no torch, a second.

`lint` does not stop at the first fault: everything it finds becomes a finding with a rule, a subject (the
tensor or file) and a sentence. Only a broken *source* or wrong arguments raise. The rules live in
lint_config.py (config.json), lint_tensors.py (tensors) and here (files, sizes); layouts.py says how each
backend stores a layer, oracle.py compares the numbers.
"""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import layouts, oracle
from pipeline.checkpoint import INDEX, PICKLES, Checkpoint, CheckpointError, linear_layers
from pipeline.errors import InputError, unknown
from pipeline.formats import GROUPED
from pipeline.lint_case import Case, Report
from pipeline.lint_config import check_config, check_quantization_config
from pipeline.lint_kv import check_kv, scale_bytes
from pipeline.lint_tensors import check_ignore_list, check_parts, check_tensors, check_tied, check_values

FORMATS = ("bf16", *oracle.BOUNDS)
# Share of the predicted bytes: the dtype of a scale is the backend's choice, the bits of a layer are not.
SIZE_TOLERANCE = 0.02
# Files that a backend or the quantize stage adds beside what the source has.
KNOWN_EXTRAS = frozenset({
    "recipe.yaml", "quantize_config.json", "quant_log.csv", "hf_quant_config.json", "config.json", INDEX,
})  # fmt: skip
_WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".gguf", ".h5", ".msgpack", *PICKLES)


def lint(
    checkpoint: Path,
    source: Path,
    fmt: str,
    group_size: int | None,
    algorithm: str | None = None,
    kv_cache: str = "bf16",
) -> dict[str, Any]:
    """Check `checkpoint` against the `source` it was made from; return the content of lint.json.

    Args:
        checkpoint: folder to check.
        source: folder it was made from, 16 or 32 bits per weight.
        fmt: the recipe's format, one of FORMATS.
        group_size: the recipe's group size in weights, None where the format has no groups.
        algorithm: the recipe's algorithm; decides what may differ and how far. Read from recipe.yaml if None.
        kv_cache: how the recipe stores keys and values; fp8 needs calibrated scales.

    Raises:
        InputError: unknown format, a grouped format without group size, or a source that cannot be read.
    """
    if fmt not in FORMATS:
        raise unknown("format", fmt, FORMATS, "the linter")
    if fmt in GROUPED and not group_size:
        raise InputError(f"Format {fmt} needs a group size, for instance 64 or 128.")
    group_size = group_size if fmt in GROUPED else None
    original, report = Checkpoint.open(source), Report()
    result: dict[str, Any] = {"schema": "quantpress.lint/1", "checkpoint": checkpoint.name, "format": fmt}
    facts: dict[str, Any] = {"layers": {"quantized": 0, "ignored": 0}, "weight_bytes": None}
    facts |= {"predicted_weight_bytes": None, "dequantized": None}
    try:
        made = Checkpoint.open(checkpoint)
    except CheckpointError as error:
        report.error("unreadable", error.subject, str(error))
    else:
        facts = _check(_case(made, original, (fmt, group_size, algorithm, kv_cache)), report)
    if checkpoint.is_dir():
        _check_files(checkpoint, source, report)
    passed = all(finding.severity != "error" for finding in report.findings)
    return result | {"passed": passed, "findings": [asdict(f) for f in report.findings]} | facts


def _case(made: Checkpoint, source: Checkpoint, asked: tuple[str, int | None, str | None, str]) -> Case:
    fmt, group_size, algorithm, kv_cache = asked
    found = made.config.get("quantization_config")
    qconfig = found if isinstance(found, dict) else {}
    layout = layouts.find_layout(qconfig.get("quant_method"), fmt)
    moves = oracle.moves_of(made.folder, algorithm) if layout else frozenset()
    if layout and layout.method == "gptq":
        moves |= {"gptq"}
    layers = linear_layers(source.config, source.tensors)
    ignored = layouts.ignore_list(layout, qconfig) if layout else []
    return Case(made, source, fmt, group_size, qconfig, layout, moves, layers, ignored, kv_cache)


def _check(case: Case, report: Report) -> dict[str, Any]:
    """Run every rule that needs readable tensors; return what lint.json says beside the findings."""
    check_config(case, report)
    check_quantization_config(case, report)
    check_tied(case, report)
    if case.layout is not None:
        check_kv(case, report)
    packed = check_ignore_list(case, report)
    sound = {layer: None for layer in packed if check_parts(case, layer, report)}
    check_tensors(case, packed, report)
    predicted = _check_size(case, report)
    return {
        "layers": {"quantized": len(packed), "ignored": len(case.layers) - len(packed)},
        "weight_bytes": case.made.weight_bytes,
        "predicted_weight_bytes": predicted,
        "dequantized": check_values(case, sound, report),
    }


def _check_size(case: Case, report: Report) -> int | None:
    """The bytes are what the recipe predicts: about the right number of layers was quantized."""
    if case.made.index_bytes not in (None, case.made.weight_bytes):
        report.warn(
            "index-size",
            INDEX,
            f"{INDEX} says {case.made.index_bytes} bytes, the shards have {case.made.weight_bytes}.",
        )
    if case.layout is None and case.fmt != "bf16":
        return None
    method = case.layout.method if case.layout else None
    predicted = layouts.predict_weight_bytes(case.source.tensors, case.fmt, case.group_size, method, case.qconfig)
    predicted += scale_bytes(case)
    tolerance = SIZE_TOLERANCE if case.layout else 0.0
    if abs(case.made.weight_bytes - predicted) > tolerance * predicted:
        report.error(
            "size",
            case.made.folder.name,
            f"The tensors have {case.made.weight_bytes} bytes; {case.fmt} predicts {predicted} "
            f"(tolerance {tolerance:.0%}).",
        )
    return predicted


def _check_files(checkpoint: Path, source: Path, report: Report) -> None:
    """Every file that is not weights is the source's, byte for byte; nothing that can run code is added."""
    want, have = (set(_files(folder)) for folder in (source, checkpoint))
    filecmp.clear_cache()
    for name in sorted(want):
        if name.endswith(_WEIGHT_SUFFIXES) or name == "config.json":
            continue
        if name not in have:
            report.error("file-missing", name, f"{name} is in the source and not in the checkpoint.")
        elif not filecmp.cmp(source / name, checkpoint / name, shallow=False):
            report.error("file-differs", name, f"{name} is not byte-equal to the source's.")
    for name in sorted(have):
        if name.endswith(PICKLES):
            report.error("pickle", name, f"{name} is a pickle, which can run code when it is loaded.")
        elif name.endswith(".py") and name not in want:
            report.error("remote-code", name, f"{name} is code that the source does not have.")
        elif name not in want and name not in KNOWN_EXTRAS and not name.endswith(".safetensors"):
            report.warn("file-unexpected", name, f"{name} is neither in the source nor written by a known backend.")


def _files(folder: Path) -> Iterator[str]:
    """Yield the names of all files below `folder`, without tool folders such as .git or .cache."""
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if path.is_file() and not any(part.startswith(".") for part in name.parts[:-1]):
            yield name.as_posix()

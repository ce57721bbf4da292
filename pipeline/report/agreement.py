"""How far two makings of one recipe agree: from the compare.json that `compare-checkpoints --out` leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.report.sources import is_number, plain, read_doc

SCHEMA = "quantpress.compare/1"
NUMBERS = {
    "equal_share": "equal_share",
    "code_distance": "largest_code_distance",
    "relative_rms": "largest_relative_rms",
}


def agreement_rows(root: Path) -> list[dict[str, Any]]:
    """Return one row per artifacts/results/<artifact>/compare.json, by name.

    Each has artifact, path, problem, first, second, identical and tensors (counts), missing (names in one alone), and
    kinds: of every kind of tensor that is not the same in every byte, kind, identical, tensors, equal_share (of codes
    or values), code_distance (None for floats) and relative_rms (None for packed integers).
    """
    found = []
    for file in sorted((root / "artifacts/results").glob("*/compare.json")):
        doc = read_doc(root, file.relative_to(root).as_posix(), SCHEMA)
        row: dict[str, Any] = {"artifact": file.parent.name, "path": doc.path, "problem": doc.problem}
        if doc.data is not None:
            row |= _row(doc.data)
        found.append(row)
    return found


def _row(record: dict[str, Any]) -> dict[str, Any]:
    kinds = record.get("kinds")
    shown = []
    for kind, value in kinds.items() if isinstance(kinds, dict) else ():
        if not isinstance(value, dict) or not all(is_number(value.get(k)) for k in ("identical", "tensors")):
            return {"problem": f"the kind {plain(kind)} has no counts"}
        if value["identical"] == value["tensors"]:
            continue
        counts = {"kind": plain(kind), "identical": value["identical"], "tensors": value["tensors"]}
        shown.append(counts | {ours: _number(value.get(theirs)) for ours, theirs in NUMBERS.items()})
    missing = [
        plain(name) for key in ("only_in_first", "only_in_second", "unlike") for name in record.get(key) or [] if name
    ]
    return {
        "first": plain(record.get("first") or "not recorded"),
        "second": plain(record.get("second") or "not recorded"),
        "identical": record.get("identical_tensors"),
        "tensors": record.get("tensors"),
        "missing": missing,
        "kinds": shown,
    }


def _number(value: object) -> Any:
    return value if is_number(value) else None

"""The baseline's own timing where it was only timed beside others: every bench.json has it as its other side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.evidence.repeat import BENCH, METRICS
from pipeline.report.sources import Doc, is_number, read_doc

REFERENCE = "this is the baseline, and it was not timed against itself here"


def beside(root: Path, cell: str) -> tuple[Doc, str] | None:
    """Return a bench.json of the baseline `cell` from the latest run that timed it beside another, and whose that is.

    Its `candidate` is that run's baseline side; it has no ratio, with the reason. `elsewhere` of a point: {cell,
    output_tok_s} of the same side in the other runs, so that a reader sees how far they agree. None where no run has
    it.
    """
    found = []
    for path in (root / "artifacts/results").glob("*/bench.json"):
        doc = read_doc(root, path.relative_to(root).as_posix(), BENCH)
        if doc.raw("baseline") == cell and path.parent.name != cell:
            found.append((str(doc.raw("finished_at")), path.parent.name, doc))
    if not found:
        return None
    found.sort(key=lambda item: item[:2], reverse=True)
    _, other, doc = found[0]
    rest = [(cell, run) for _, cell, run in found[1:]]
    workloads = {
        name: _side(name, load, rest) for name, load in doc.mapping("workloads").items()
        if isinstance(load, dict) and load.get("against", "baseline") == "baseline"
    }  # fmt: skip
    data: dict[str, Any] = {"schema": BENCH, "cell": cell, "baseline": cell, "is_baseline": False, "beside": other}
    data |= {key: doc.raw(key) for key in ("host", "client", "locks", "git_commit", "finished_at", "order")}
    data |= {"server": {"candidate": doc.mapping("server", "baseline")}, "workloads": workloads}
    return Doc(doc.path, data), other


def _side(workload: str, load: dict[str, Any], rest: list[tuple[str, Doc]]) -> dict[str, Any]:
    """Return a workload with the baseline's side of every point as its candidate."""
    none = {"not_measured": dict.fromkeys(METRICS, REFERENCE)}
    keys = ("name", "concurrency", "rate", "requests", "warmup", "client_bound", "front_end_bound", "baseline")
    points = [
        {key: p.get(key) for key in keys}
        | {"candidate": p.get("baseline"), "ratio": none, "elsewhere": _elsewhere(workload, p, rest)}
        for p in load.get("points") or []
        if isinstance(p, dict) and not p.get("soak")
    ]
    return load | {"points": points, "left_out": []}


def _elsewhere(workload: str, point: dict[str, Any], rest: list[tuple[str, Doc]]) -> list[dict[str, Any]]:
    """Return the baseline's output tokens/s at the same load in the other runs."""
    rates = [
        (cell, Doc(doc.path, p).raw("baseline", "output_tok_s"))
        for cell, doc in rest
        for p in doc.items("workloads", workload, "points")
        if isinstance(p, dict) and all(p.get(key) == point.get(key) for key in ("name", "concurrency", "rate"))
    ]
    return [{"cell": cell, "output_tok_s": rate} for cell, rate in rates if is_number(rate)]

"""The baseline's own timing where it was only timed beside others: every bench.json has it as its other side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.evidence.repeat import BENCH
from pipeline.report.sources import Doc, read_doc

RATIOS = ("output_tok_s", "ttft_ms", "tpot_ms", "e2e_ms")
REFERENCE = "this is the baseline, and it was not timed against itself here"


def beside(root: Path, cell: str) -> tuple[Doc, str] | None:
    """Return a bench.json of the baseline `cell` from the latest run that timed it beside another, and whose that is.

    Its `candidate` is that run's baseline side; it has no ratio, with the reason. None where no run has it, or the
    package is another one now.
    """
    found = []
    for path in (root / "artifacts/results").glob("*/bench.json"):
        doc = read_doc(root, path.relative_to(root).as_posix(), BENCH)
        if doc.raw("baseline") == cell and path.parent.name != cell:
            found.append((str(doc.raw("finished_at")), path.parent.name, doc))
    if not found:
        return None
    _, other, doc = max(found, key=lambda item: item[:2])
    workloads = {
        name: _side(load) for name, load in doc.mapping("workloads").items()
        if isinstance(load, dict) and load.get("against", "baseline") == "baseline"
    }  # fmt: skip
    data: dict[str, Any] = {"schema": BENCH, "cell": cell, "baseline": cell, "is_baseline": False, "beside": other}
    data |= {key: doc.raw(key) for key in ("host", "client", "locks", "git_commit", "finished_at", "order")}
    data |= {"server": {"candidate": doc.mapping("server", "baseline")}, "workloads": workloads}
    return Doc(doc.path, data), other


def _side(load: dict[str, Any]) -> dict[str, Any]:
    """Return a workload with the baseline's side of every point as its candidate."""
    none = {"not_measured": dict.fromkeys(RATIOS, REFERENCE)}
    keys = ("name", "concurrency", "rate", "requests", "warmup", "client_bound", "baseline")
    points = [
        {key: p.get(key) for key in keys} | {"candidate": p.get("baseline"), "ratio": none}
        for p in load.get("points") or []
        if isinstance(p, dict) and not p.get("soak")
    ]
    return load | {"points": points, "left_out": []}

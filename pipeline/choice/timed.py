"""What was timed of one cell, read from bench.json and requests.csv: load points with their requests."""

from __future__ import annotations

import csv
import itertools
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.choice.objective import MET, MISSED, OPEN, Attained, Slo, attained
from pipeline.evidence.beside import beside
from pipeline.evidence.repeat import read_bench
from pipeline.report.apart import gpu_marks, load_marks
from pipeline.report.sources import Doc, interval, is_number

GAIN_PER_DOUBLING = 0.10


@dataclass
class TimedPoint:
    """One load of one workload: the cell's numbers beside its baseline's.

    `rows`: the cell's steady requests. `ratio`, `band`: output tokens/s over the baseline's with its 95% interval.
    """

    workload: str
    name: str
    loop: str
    load: float
    tok_s: float | None
    seconds: float | None
    ratio: float | None
    band: list[float] | None
    tokens: float | None
    marks: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    latency: dict[str, float | None] = field(default_factory=dict)

    def judge(self, slo: Slo) -> Attained:
        """Judge the point's requests by an objective."""
        if not self.rows and slo.limits:
            return Attained(OPEN, 0, 0, "requests.csv has no requests of this point")
        return attained(self.rows, slo)

    def goodput_s(self, slo: Slo) -> float | None:
        """Return requests per second that meet the objective, None where the window is not known."""
        return attained(self.rows, slo).met / self.seconds if self.seconds and self.rows else None


def read_points(root: Path, cell: str) -> tuple[list[TimedPoint], Doc]:
    """Return a cell's timed points and its bench.json; no points where `problem` says why.

    A baseline that was only timed beside others is read from the latest of those runs.
    """
    doc, whose, side = read_bench(root, cell), cell, "B"
    if doc.data is None and (found := beside(root, cell)):
        (doc, whose), side = found, "A"
    rows = read_requests(root / f"artifacts/results/{whose}/requests.csv", side)
    points = []
    for workload, load in doc.mapping("workloads").items():
        if not isinstance(load, dict) or load.get("against", "baseline") != "baseline":
            continue
        for entry in load.get("points") or []:
            if isinstance(entry, dict) and not entry.get("soak"):
                points.append(_point(str(workload), load, entry, rows))
    return points, doc


def _point(workload: str, load: dict[str, Any], entry: dict[str, Any], rows: dict[Any, Any]) -> TimedPoint:
    loop = "open" if entry.get("rate") else "closed"
    amount = entry.get("rate") or entry.get("concurrency") or 0
    name = str(entry.get("name") or f"c{amount}")
    side = Doc(workload, entry.get("candidate") if isinstance(entry.get("candidate"), dict) else {})
    tok_s, ratio = side.raw("output_tok_s"), Doc(workload, entry).raw("ratio", "output_tok_s")
    clean = side.raw("errors") == 0 and side.raw("output_tokens_ok") is True
    marks = [] if clean else ["requests failed or had other lengths"]
    marks += [*load_marks(Doc(workload, entry)), *gpu_marks(Doc(workload, load))]
    seconds = side.raw("steady", "seconds")
    return TimedPoint(
        workload=workload,
        name=name,
        loop=loop,
        load=float(amount),
        tok_s=tok_s if is_number(tok_s) and clean else None,
        seconds=seconds if is_number(seconds) else None,
        ratio=ratio if is_number(ratio) and clean else None,
        band=interval(Doc(workload, entry).raw("ratio_ci95", "output_tok_s")),
        tokens=load.get("output_tokens") if is_number(load.get("output_tokens")) else None,
        marks=marks,
        rows=rows.get((workload, name), []),
        latency={k: side.raw(k, "p50") for k in ("ttft_ms", "tpot_ms", "e2e_ms")},
    )


def read_requests(path: Path, side: str = "B") -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Return the steady requests of a side (B: the candidate) by (workload, point); failed ones count as misses."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    if not path.is_file():
        return found
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row.get("side") != side or row.get("steady") == "0":
                continue
            entry: dict[str, Any] = {"failed": row.get("steady") == "error"}
            entry |= {k: _number(row.get(k)) for k in ("ttft_ms", "tpot_ms", "e2e_ms")}
            found.setdefault((str(row.get("workload")), str(row.get("point"))), []).append(entry)
    return found


def _number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def operating_point(points: list[TimedPoint], slo: Slo) -> tuple[TimedPoint | None, str]:
    """Return the highest load of one workload that meets an objective, and the reason where there is none.

    Loads above a missed one do not count, whatever they show. Without limits it is the load of most tokens/s.
    """
    timed = sorted((p for p in points if p.tok_s), key=lambda p: p.load)
    if not timed:
        return None, "no usable timing"
    if not slo.limits:
        return max(timed, key=lambda p: p.tok_s or 0.0), f"most output tokens/s of all loads of {timed[0].workload}"
    best, open_ = None, []
    for point in timed:
        found = point.judge(slo)
        if found.verdict == MISSED:
            reason = f"missed at {point.name}: {found.reason}"
            return best, reason if best is None else f"highest load that meets it; {reason}"
        if found.verdict == MET:
            best = point
        else:
            open_.append(f"{point.name}: {found.reason}")
    if best is None:
        return None, f"not shown at any load ({'; '.join(open_)})"
    return best, "met at the highest load that was timed, so the limit may lie above" if best is timed[-1] else (
        f"highest load that is shown to meet it; not shown beyond ({'; '.join(open_)})"
    )


def knee(points: list[TimedPoint], slo: Slo) -> tuple[TimedPoint | None, str]:
    """Return the knee of one closed-loop workload: the last load that meets the objective, else where gains fade.

    Gains fade where a doubling of the concurrency adds at most 10% output tokens/s.
    """
    closed = sorted((p for p in points if p.loop == "closed" and p.tok_s), key=lambda p: p.load)
    if len(closed) < 2:
        return None, "fewer than two closed-loop loads were timed"
    if slo.limits and (best := operating_point(closed, slo)[0]):
        return best, "last load that meets the objective"
    for before, after in itertools.pairwise(closed):
        gain = ((after.tok_s or 0) / (before.tok_s or 1)) ** (1 / math.log2(after.load / before.load)) - 1
        if gain <= GAIN_PER_DOUBLING:
            return before, f"the next doubling adds {100 * gain:.0f}% output tokens/s"
    return closed[-1], "throughput still grows at the highest load that was timed"


def stops_being_faster(points: list[TimedPoint]) -> str:
    """Say at which concurrency of one workload the cell stops being faster than its baseline.

    Faster: the whole 95% interval of the ratio lies above 1.
    """
    closed = sorted((p for p in points if p.loop == "closed" and p.ratio), key=lambda p: p.load)
    if not closed:
        return "not measured (no closed-loop ratio)"
    faster = [bool(p.band and p.band[0] > 1) for p in closed]
    if not any(faster):
        return f"not shown to be faster at any load ({closed[0].name} to {closed[-1].name})"
    last = max(i for i, f in enumerate(faster) if f)
    if last == len(closed) - 1:
        return f"faster up to the highest load that was timed ({closed[-1].name})"
    return f"from {closed[last + 1].name} on"


def usd_per_million(price_usd_per_h: float | None, count: int, tok_s: float | None) -> float | None:
    """Return the cost of a million output tokens at a throughput: price of one GPU times GPUs, or None."""
    if price_usd_per_h is None or not tok_s:
        return None
    return price_usd_per_h * count / (3600 * tok_s) * 1e6

"""How far a timing repeats: 95% intervals of speed ratios from whole legs, not from requests alone.

Requests of one batch are not independent, so an interval over requests (bench.json has one) says how well one leg is
known and nothing of the next one: two legs of one server can lie 10% apart where that interval is 1% wide. Here the
spread is taken over legs: those of the baseline in every run of the same target, engine and client, and the
candidate's own. An interval is never narrower than the one over requests. Pure but for reading the results.
"""

from __future__ import annotations

import csv
import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from scipy.stats import t as student

from pipeline.report.sources import Doc, interval, is_number, read_doc

BENCH = "quantpress.bench/1"
METRICS = ("output_tok_s", "ttft_ms", "tpot_ms", "e2e_ms")
LATENCIES = METRICS[1:]
NO_SPREAD = "one leg a side, and the baseline was timed in one run only: nothing says how far it repeats"

# (workload, load, metric) -> one number a leg.
Legs = dict[tuple[str, str, str], list[float]]


class Spread(NamedTuple):
    """How far one leg lies from the next, as a standard deviation of its logarithm.

    df: degrees of freedom. legs, runs: of the baseline, that it was taken from.
    """

    sd: float
    df: int
    legs: int
    runs: int

    def factor(self, candidate_legs: int, baseline_legs: int) -> float:
        """Return the factor by which a ratio of means of so many legs may be off, one side of a 95% interval (t)."""
        error = self.sd * math.sqrt(1 / candidate_legs + 1 / baseline_legs)
        return math.exp(float(student.ppf(0.975, self.df)) * error)


def spread(runs: Iterable[list[float]], own: list[float]) -> Spread | None:
    """Return the spread of one leg: the baseline's about their common mean together with the candidate's about theirs.

    Args:
        runs: for each run the baseline's legs, in any positive unit.
        own: the candidate's legs.

    Returns:
        None where there are not two legs of either.
    """
    found = [[math.log(x) for x in legs if x > 0] for legs in runs]
    found = [legs for legs in found if legs]
    baseline = [x for legs in found for x in legs]
    candidate = [math.log(x) for x in own if x > 0]
    df = max(len(baseline) - 1, 0) + max(len(candidate) - 1, 0)
    if df == 0:
        return None
    return Spread(math.sqrt((_squares(baseline) + _squares(candidate)) / df), df, len(baseline), len(found))


def _squares(values: list[float]) -> float:
    mean = sum(values) / len(values) if values else 0.0
    return sum((x - mean) ** 2 for x in values)


def widened(ratio: float, requests: list[float] | None, factor: float) -> list[float]:
    """Return the interval of a ratio from the factor that legs give; never narrower than the one over requests."""
    low, high = ratio / factor, ratio * factor
    return [min(low, requests[0]), max(high, requests[1])] if requests else [low, high]


def read_bench(root: Path, cell: str) -> Doc:
    """Read a cell's bench.json with intervals from legs: `ratio_ci95` is replaced and every point has `repeats`.

    `repeats`: for each metric {sd_pct, df, legs, runs}, `legs` and `runs` of the baseline that it is taken from, and
    `noise_pct`, by how much two single legs of one server differ in 95% of cases; or {not_measured: {metric: why}}.
    Where no spread is known `ratio_ci95` is None.
    """
    doc = read_doc(root, f"artifacts/results/{cell}/bench.json", BENCH)
    if doc.data is None:
        return doc
    own = legs_of(root, cell, doc, "candidate")
    runs = _baseline_runs(root, cell, doc)
    workloads = {
        name: load | {"points": [_point(name, p, own, runs) if isinstance(p, dict) else p for p in load["points"]]}
        if isinstance(load, dict) and isinstance(load.get("points"), list) else load
        for name, load in doc.mapping("workloads").items()
    }  # fmt: skip
    return replace(doc, data=doc.data | {"workloads": workloads})


def _point(workload: str, point: dict[str, Any], own: Legs, runs: list[tuple[bool, Legs]]) -> dict[str, Any]:
    doc, name = Doc(workload, point), _name(point)
    bands: dict[str, Any] = {}
    repeats: dict[str, Any] = {"not_measured": {}}
    for metric in METRICS:
        key = (workload, name, metric)
        found = spread([legs.get(key, []) for _, legs in runs], own.get(key, []))
        mine = next((len(legs.get(key, [])) for is_own, legs in runs if is_own), 0)
        ratio = doc.raw("ratio", metric)
        bands[metric] = None
        if found is None or not mine or not own.get(key):
            repeats["not_measured"][metric] = NO_SPREAD
            continue
        repeats[metric] = {
            "sd_pct": 100 * found.sd, "df": found.df, "legs": found.legs, "runs": found.runs,
            "noise_pct": 100 * (found.factor(1, 1) - 1),
        }  # fmt: skip
        if is_number(ratio) and ratio > 0:
            over_requests = interval(doc.raw("ratio_ci95", metric))
            bands[metric] = widened(ratio, over_requests, found.factor(len(own[key]), mine))
    return point | {"ratio_ci95": bands, "repeats": repeats}


def _name(point: dict[str, Any]) -> str:
    return str(point.get("name") or f"c{point.get('concurrency')}")


def leg_marks(point: Doc) -> list[str]:
    """Return for each side whose own legs lie further apart than the two sides do that they do, and by how much."""
    ratio = point.raw("ratio", "output_tok_s")
    if not is_number(ratio) or ratio <= 0:
        return []
    marks = []
    for side in ("baseline", "candidate"):
        rates = [x for x in point.items(side, "repeats", "output_tok_s") if is_number(x) and x > 0]
        apart = max(rates) / min(rates) if rates else 1.0
        if apart > max(ratio, 1 / ratio):
            marks.append(f"the {side}'s own legs lie {100 * (apart - 1):.1f}% apart, more than the two sides do")
    return marks


def _baseline_runs(root: Path, cell: str, doc: Doc) -> list[tuple[bool, Legs]]:
    """Return the baseline's legs of every comparable run, and whether it is the run of `doc`.

    Comparable: the same baseline cell, engine version, client and kind of host. The run of the baseline against
    itself has the same server on both sides.
    """
    found = []
    for path in sorted((root / "artifacts/results").glob("*/bench.json")):
        name = path.parent.name
        other = doc if name == cell else _read(str(root), name, path.stat().st_mtime_ns)
        if other.data is None or _kind(other) != _kind(doc):
            continue
        legs = legs_of(root, name, other, "baseline")
        if other.raw("is_baseline") is True and other is not doc:
            for key, values in legs_of(root, name, other, "candidate").items():
                legs = legs | {key: legs.get(key, []) + values}
        found.append((other is doc, legs))
    return found


def _kind(doc: Doc) -> tuple[Any, ...]:
    gpus = [g.get("name") if isinstance(g, dict) else g for g in doc.items("host", "gpus")]
    return (
        doc.raw("baseline"), doc.raw("server", "baseline", "version"), doc.raw("client", "tool"),
        doc.raw("host", "cpu"), doc.raw("host", "cores") if not gpus else None, tuple(sorted({str(g) for g in gpus})),
    )  # fmt: skip


@functools.lru_cache(maxsize=256)
def _read(root: str, cell: str, _changed: int) -> Doc:
    return read_doc(Path(root), f"artifacts/results/{cell}/bench.json", BENCH)


def legs_of(root: Path, cell: str, doc: Doc, side: str) -> Legs:
    """Return one number a leg of a side (`candidate`, `baseline`): tokens/s as recorded, latencies as means, ms.

    Only closed loops: an open one's tokens/s are what was sent.
    """
    path = root / f"artifacts/results/{cell}/requests.csv"
    means = _latencies(str(path), path.stat().st_mtime_ns) if path.is_file() else {}
    letter = "B" if side == "candidate" else "A"
    found: Legs = {}
    for workload, load in doc.mapping("workloads").items():
        for point in Doc(workload, load if isinstance(load, dict) else {}).items("points"):
            if not isinstance(point, dict) or not point.get("concurrency"):
                continue
            name = _name(point)
            rates = Doc(workload, point).items(side, "repeats", "output_tok_s")
            found[workload, name, "output_tok_s"] = [float(x) for x in rates if is_number(x)]
            for metric in LATENCIES:
                found[workload, name, metric] = means.get((workload, name, letter, metric), [])
    return found


@functools.lru_cache(maxsize=256)
def _latencies(path: str, _changed: int) -> dict[tuple[str, str, str, str], list[float]]:
    """Return the mean latency of every leg's steady requests, ms, by (workload, load, side, metric)."""
    values: dict[tuple[str, str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with Path(path).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row.get("steady") != "1":
                continue
            for metric in LATENCIES:
                try:
                    value = float(row.get(metric) or "nan")
                except ValueError:
                    continue
                if math.isfinite(value):
                    key = (str(row.get("workload")), str(row.get("point")), str(row.get("side")), metric)
                    values[key][str(row.get("leg"))].append(value)
    return {key: [sum(v) / len(v) for v in legs.values()] for key, legs in values.items()}

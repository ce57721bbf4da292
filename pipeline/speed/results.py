"""From legs to what bench.json and requests.csv hold."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.errors import WorkError
from pipeline.speed.leg import Leg
from pipeline.speed.points import compare, side, statistic
from pipeline.speed.steady import Row, settled, window
from pipeline.speed.workloads import Point, Workload

SHARED_LIMIT = 0.01
SPEED_COLUMNS = ("load", "output_tok_s", "speedup", "ttft_ms_p50", "tpot_ms_p50", "e2e_ms_p50")
COLUMNS = ("workload", "point", "side", "leg", "sent_s", "steady", "ttft_ms", "tpot_ms", "e2e_ms", "output_tokens")


class Timed:
    """What was timed so far: `workloads` as bench.json holds them, and every request for requests.csv."""

    def __init__(self) -> None:
        """Start with nothing."""
        self.workloads: dict[str, Any] = {}
        self.requests: list[tuple[Any, ...]] = []
        self._left_out: dict[str, list[dict[str, Any]]] = {}

    def leave_out(self, name: str, point: Point, why: str) -> None:
        """Note a point that is not timed."""
        self._left_out.setdefault(name, []).append({"name": point.name, "reason": why})

    def add(self, name: str, workload: Workload, points: list[Point], legs: list[tuple[str, Leg]]) -> None:
        """Add a workload's legs in the order in which they ran; sides are A (baseline) and B (candidate).

        Raises:
            WorkError: requests failed, answers have other lengths, or prompts were shared that should not be.
        """
        by_side: dict[str, dict[str, list[list[Row]]]] = {"A": {}, "B": {}}
        for number, (which, leg) in enumerate(legs):
            for point in points:
                rows = leg.rows.get(point.name, [])
                by_side[which].setdefault(point.name, []).append(rows)
                self._note(name, point, which, number, rows)
        found = []
        for point in points:
            entry = self._point(name, workload, point, by_side)
            entry["client"] = [leg.beside["client"].get(point.name) for _, leg in legs]
            entry["client_bound"] = any((c or {}).get("bound") for c in entry["client"])
            entry["front_end"] = [leg.beside["front_end"].get(point.name) for _, leg in legs]
            entry["front_end_bound"] = any((f or {}).get("bound") for f in entry["front_end"])
            if "soak" in entry:
                entry["soak"]["server_memory"] = [leg.beside.get("server_rss_mib") for _, leg in legs]
                entry["soak"]["gpu_memory_growth_pct"] = [
                    gpu.get("memory_growth_pct")
                    for _, leg in legs
                    for gpu in (leg.beside.get("gpu") or {}).get("gpus", [])
                ]
            found.append(entry)
        hit = check_sharing(name, workload, [leg for _, leg in legs])
        self.workloads[name] = {
            "prompt_tokens": workload.mean_prompt if workload.mix else workload.prompt_tokens,
            "output_tokens": workload.mean_output if workload.mix else workload.output_tokens,
            "mix": [m.model_dump() for m in workload.mix] if workload.mix else None,
            "streaming": workload.streaming,
            "against": workload.against,
            "order": workload.sides,
            "prefix_cache_hit_rate": hit,
            "legs": [{"side": which, **_beside(leg)} for which, leg in legs],
            "points": found,
            "left_out": self._left_out.get(name, []),
        }

    def _point(self, name: str, workload: Workload, point: Point, rows: dict[str, Any]) -> dict[str, Any]:
        entry = {"name": point.name, "loop": point.loop, **point.model_dump(), "requests": point.count}
        if workload.order == "A":
            only = rows["A"].get(point.name, [])
            entry["candidate"] = side(only, point.concurrency)
            return entry | {"soak": soak([r for leg in only for r in leg])}
        compared = compare(rows["B"].get(point.name, []), rows["A"].get(point.name, []), point.concurrency)
        for which in () if workload.soak else ("candidate", "baseline"):
            check_point(compared[which], f"{name}, {point.name}, {which}")
        entry |= compared
        if workload.soak:
            entry["soak"] = soak([r for leg in rows["B"].get(point.name, []) for r in leg])
        return entry

    def _note(self, name: str, point: Point, which: str, number: int, rows: list[Row]) -> None:
        found = window(rows, point.concurrency)
        kept = {id(r) for r in found.kept} if found else set()
        first = min((r["start_ns"] for r in rows), default=0)
        for r in sorted(rows, key=lambda r: r["start_ns"]):
            sent = round((r["start_ns"] - first) / 1e9, 3)
            values = ["" if r.get(k) is None else round(r[k], 2) for k in ("ttft_ms", "tpot_ms", "e2e_ms")]
            steady = "error" if r.get("error") else int(id(r) in kept)
            self.requests.append(
                (name, point.name, which, number + 1, sent, steady, *values, r.get("output_tokens", ""))
            )


def requests_csv(timed: Timed) -> str:
    """Return every counted request as CSV: what goodput at any objective is computed from, without a new run."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(timed.requests)
    return out.getvalue()


def speed_csv(workloads: dict[str, Any]) -> str:
    """Return one row a load point for `dvc plots diff`: the load, the cell's numbers and its speedup."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(SPEED_COLUMNS)
    for name, points in summary(workloads).items():
        for point, values in points.items():
            writer.writerow([f"{name} {point}", *(values.get(column, "") for column in SPEED_COLUMNS[1:])])
    return out.getvalue()


def _beside(leg: Leg) -> dict[str, Any]:
    return {k: v for k, v in leg.beside.items() if k != "client"}


def check_point(found: dict[str, Any], where: str) -> None:
    """Fail when requests failed or answers have another length than the forced one.

    Raises:
        WorkError: the numbers would not mean what their name says.
    """
    if found["errors"] or found["e2e_ms"]["n"] == 0:
        raise WorkError(f"{found['errors']} requests failed at {where}; {found['e2e_ms']['n']} succeeded and count.")
    if not found["output_tokens_ok"]:
        raise WorkError(f"At {where} some answers did not have the forced number of tokens.")


def check_sharing(name: str, workload: Workload, legs: list[Leg]) -> float | None:
    """Return the highest prefix-cache hit rate of the legs, None where the server gives none.

    Raises:
        WorkError: over 1% in a workload that asks for no sharing: its TTFT would be that of a cache.
    """
    rates = [r for leg in legs if (r := leg.beside["prefix_cache"]["hit_rate"]) is not None]
    worst = max(rates, default=None)
    if worst is not None and worst > SHARED_LIMIT and not workload.shared_prefix_tokens:
        raise WorkError(
            f"{name}: the server found {worst:.1%} of the prompt tokens in its prefix cache; the limit is "
            f"{SHARED_LIMIT:.0%} for a workload without shared_prefix_tokens."
        )
    return worst


def unsettled(points: Sequence[Point], leg: Leg) -> list[str]:
    """Return the names of the points whose latencies had not settled."""
    names = []
    for point in points:
        found = window(leg.rows.get(point.name, []), point.concurrency)
        if found and settled(found.kept)["settled"] is False:
            names.append(point.name)
    return names


def soak(rows: list[Row]) -> dict[str, Any]:
    """Return error rate and how latencies moved over a long run: the last quarter of it against the first, by time."""
    good = [r for r in rows if not r.get("error")]
    result: dict[str, Any] = {"requests": len(rows), "errors": len(rows) - len(good)}
    result["error_rate"] = result["errors"] / len(rows) if rows else None
    if not good:
        return result
    start = min(r["start_ns"] for r in rows)
    span = max(r["start_ns"] for r in rows) - start
    result["duration_s"] = round(span / 1e9, 1)
    for name in ("ttft_ms", "e2e_ms"):
        quarters = [
            [
                r[name]
                for r in good
                if r.get(name) is not None and q * span <= 4 * (r["start_ns"] - start) <= (q + 1) * span
            ]
            for q in (0, 3)
        ]
        first, last = (statistic(values) for values in quarters)
        both = first["mean"] and last["mean"]
        growth = 100 * (last["mean"] / first["mean"] - 1) if both else None
        result[name] = {"first_quarter": first, "last_quarter": last, "drift_pct": growth}
    return result


def summary(workloads: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers people compare between revisions, as nested mappings: `dvc metrics diff` skips lists."""
    found: dict[str, Any] = {}
    for name, load in workloads.items():
        for point in load["points"]:
            row: dict[str, Any] = {"output_tok_s": point["candidate"]["output_tok_s"]}
            row |= {f"{k}_p50": point["candidate"][k]["p50"] for k in ("ttft_ms", "tpot_ms", "e2e_ms")}
            # Streamed over not streamed is no speedup over the baseline.
            over = "streamed_over_not" if load.get("against") == "not-streamed" else "speedup"
            row[over] = (point.get("ratio") or {}).get("output_tok_s")
            found.setdefault(name, {})[point["name"]] = {
                k: float(np.round(v, 4)) for k, v in row.items() if v is not None
            }
    return found

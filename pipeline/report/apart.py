"""Timings that are no ratio over the baseline: streamed against not streamed, soak; and the marks of a load point."""

from __future__ import annotations

from typing import Any

from pipeline.evidence.repeat import leg_marks
from pipeline.report.sources import Doc, absent, is_number, measured


def apart_from_ratios(bench: Doc) -> dict[str, Any]:
    """Return {names, streaming, soak}: workloads that must not stand among ratios over the baseline, and their facts.

    streaming: for each load the end-to-end and throughput ratio of streamed over not streamed, on one server.
    soak: for each load its length, error rate, drift of latencies and growth of memory, last quarter against first.
    """
    found: dict[str, Any] = {"names": set(), "streaming": [], "soak": []}
    for name, load in bench.mapping("workloads").items():
        doc = Doc(bench.path, load if isinstance(load, dict) else {})
        points = [Doc(bench.path, p) for p in doc.items("points") if isinstance(p, dict)]
        if doc.raw("against") == "not-streamed":
            found["names"].add(name)
            for point in points:
                ratios = {key: point.fact("ratio", key) for key in ("e2e_ms", "output_tok_s")}
                found["streaming"].append({"workload": str(name), "load": point.raw("name"), **ratios})
        elif any(point.mapping("soak") for point in points):
            found["names"].add(name)
            found["soak"] += [_soak(str(name), point) for point in points if point.mapping("soak")]
    return found


def _soak(name: str, point: Doc) -> dict[str, Any]:
    memory = [m.get("growth_pct") for m in point.items("soak", "server_memory") if isinstance(m, dict)]
    grown: list[Any] = [g for g in memory if is_number(g)]
    on_gpu = [g for g in point.items("soak", "gpu_memory_growth_pct") if is_number(g)]
    return {
        "workload": name,
        "load": point.raw("name"),
        "duration_s": point.fact("soak", "duration_s"),
        "error_rate": point.fact("soak", "error_rate"),
        "ttft_drift_pct": point.fact("soak", "ttft_ms", "drift_pct"),
        "e2e_drift_pct": point.fact("soak", "e2e_ms", "drift_pct"),
        "server_memory_growth_pct": measured(max(grown)) if grown else absent("the server's memory was not sampled"),
        "gpu_memory_growth_pct": measured(max(on_gpu)) if on_gpu else absent("no GPU was sampled"),
    }


def load_marks(point: Doc) -> list[str]:
    """Return what a reader must know before using a load point: drift, a client or front end at its limit, warm-up."""
    marks = leg_marks(point)
    if point.raw("client_bound") is True:
        marks.append("the client limited the load")
    if point.raw("front_end_bound") is True:
        marks.append("the server's front end limited the load")
    legs = point.items("candidate", "steady", "legs") + point.items("baseline", "steady", "legs")
    if any(isinstance(leg, dict) and leg.get("settled") is False for leg in legs):
        marks.append("latencies had not settled: the first quarter of a leg differs from the rest")
    return marks


def gpu_marks(load: Doc) -> list[str]:
    """Return what a reader must know of the GPU while a workload was timed: what throttled it, who else used it."""
    throttled: dict[str, None] = {}
    others: dict[str, set[str]] = {}
    nameless = False
    for leg in load.items("legs"):
        doc = Doc(load.path, leg if isinstance(leg, dict) else {})
        if doc.raw("gpu", "shared") is True:
            found = {str(p.get("pid")) for p in doc.items("gpu", "other_processes") if isinstance(p, dict)}
            nameless |= not found
            others.setdefault(str(doc.raw("side")), set()).update(found)
        else:
            others.setdefault(str(doc.raw("side")), set())
        for gpu in doc.items("gpu", "gpus"):
            names = Doc(load.path, gpu if isinstance(gpu, dict) else {}).items("throttled")
            throttled |= dict.fromkeys(map(str, names))
    marks = [f"the GPU was held back: {', '.join(throttled)}"] if throttled else []
    # The other side's server stands on the same GPU, idle: it is a stranger in the legs of one side alone.
    strangers = set.intersection(*others.values()) if others else set()
    return [*marks, "other processes used the GPU"] if strangers or nameless else marks

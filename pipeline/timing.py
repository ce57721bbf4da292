"""Request timings: names, units, percentiles only where there are enough samples, ratios with intervals.

Definitions (one for every engine and client; `definition_id` stands beside each value in bench.json):
ttft: send to first streamed token. tpot: (end - first token) / (output tokens - 1), the first token excluded.
inter_chunk: gaps between streamed chunks. e2e: send to end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

# The smallest n for which a 95% one-sided upper confidence bound of the percentile exists: p**n <= 0.05.
SAMPLES_NEEDED = {"p50": 1, "p90": 29, "p95": 59, "p99": 299}
DEFINITIONS = {
    "ttft_ms": "ttft/1: request sent to first token received, ms",
    "tpot_ms": "tpot-excl-first/1: (last token - first token) / (output tokens - 1), ms",
    "inter_chunk_ms": "inter-chunk/1: gaps between streamed chunks, pooled over requests, ms",
    "e2e_ms": "e2e/1: request sent to last token received, ms",
    "output_tok_s": "output-throughput/1: output tokens / sum over legs of (last end - first send), tok/s",
}
RESAMPLES = 2_000


def statistic(values: list[float]) -> dict[str, Any]:
    """Return n, mean and the percentiles that `values` are enough for; the others are null with the reason."""
    n = len(values)
    result: dict[str, Any] = {"n": n, "mean": float(np.mean(values)) if n else None}
    reasons = {}
    for name, needed in SAMPLES_NEEDED.items():
        enough = n >= needed
        result[name] = float(np.percentile(values, float(name[1:]))) if enough else None
        if not enough:
            reasons[name] = f"{n} samples, {name} needs {needed}"
    result["not_measured"] = reasons
    return result


def point(legs: list[list[dict[str, Any]]], output_tokens: int) -> dict[str, Any]:
    """Return the metrics of one load point of one side.

    Throughput is tokens over the time in which this side was under load: the sum of its legs' windows, never the span
    from its first leg to its last, which in an A B B A run holds the other side's legs.

    Args:
        legs: for each leg of this side one dict a request with start_ns, end_ns, ttft_ms, tpot_ms, e2e_ms,
            output_tokens and inter_chunk_ms (a list); failed ones have `error`.
        output_tokens: the length that every answer was forced to.
    """
    requests = [r for leg in legs for r in leg]
    good = [r for r in requests if not r.get("error")]
    result: dict[str, Any] = {name: statistic([r[name] for r in good]) for name in ("ttft_ms", "tpot_ms", "e2e_ms")}
    result["inter_chunk_ms"] = statistic([gap for r in good for gap in r["inter_chunk_ms"]])
    wall_s = sum(_window_s([r for r in leg if not r.get("error")]) for leg in legs)
    tokens = sum(r["output_tokens"] for r in good)
    result["output_tok_s"] = tokens / wall_s if wall_s else None
    result["request_s"] = len(good) / wall_s if wall_s else None
    result["errors"] = len(requests) - len(good)
    result["output_tokens_ok"] = bool(good) and all(r["output_tokens"] == output_tokens for r in good)
    return result


def _window_s(leg: list[dict[str, Any]]) -> float:
    return float(max(r["end_ns"] for r in leg) - min(r["start_ns"] for r in leg)) / 1e9 if leg else 0.0


def ratios(candidate: list[dict[str, Any]], baseline: list[dict[str, Any]], seed: int = 0) -> dict[str, Any]:
    """Return candidate over baseline for each metric, with bootstrap 95% intervals over requests.

    For latencies it is the ratio of means. Throughput of a closed loop is concurrency over mean latency, so its ratio
    is the inverse of the ratio of e2e means; the measured one (tokens over wall time) is reported beside it. The
    interval covers request-to-request spread within this run, not drift between runs.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {"ratio": {}, "ratio_ci95": {}}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        a = np.array([r[name] for r in candidate if not r.get("error")])
        b = np.array([r[name] for r in baseline if not r.get("error")])
        if not len(a) or not len(b) or b.mean() == 0:
            found["ratio"][name], found["ratio_ci95"][name] = None, None
            continue
        found["ratio"][name] = float(a.mean() / b.mean())
        if min(len(a), len(b)) < 5:
            found["ratio_ci95"][name] = None
            continue
        resampled = rng.choice(a, (RESAMPLES, len(a))).mean(axis=1) / rng.choice(b, (RESAMPLES, len(b))).mean(axis=1)
        found["ratio_ci95"][name] = [float(x) for x in np.quantile(resampled, [0.025, 0.975])]
    return found


def compare(
    candidate: list[list[dict[str, Any]]], baseline: list[list[dict[str, Any]]], output_tokens: int
) -> dict[str, Any]:
    """Return candidate, baseline, their ratios and intervals for one load point; both sides as lists of legs."""
    a, b = point(candidate, output_tokens), point(baseline, output_tokens)
    found = ratios([r for leg in candidate for r in leg], [r for leg in baseline for r in leg])
    both = a["output_tok_s"] and b["output_tok_s"]
    found["ratio"]["output_tok_s"] = a["output_tok_s"] / b["output_tok_s"] if both else None
    band = found["ratio_ci95"]["e2e_ms"]
    if both and band:
        # Tokens over wall time move with the inverse of the latency, so its relative interval is carried over.
        centre = found["ratio"]["output_tok_s"] * found["ratio"]["e2e_ms"]
        found["ratio_ci95"]["output_tok_s"] = [centre / band[1], centre / band[0]]
    else:
        found["ratio_ci95"]["output_tok_s"] = None
    return {"candidate": a, "baseline": b, **found}

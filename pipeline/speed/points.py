"""One load point: statistics of each side, spread over repeats, ratios with intervals, drift between baseline legs."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np

from pipeline.speed.definitions import SAMPLES_NEEDED
from pipeline.speed.steady import Row, Window, settled, tokens_between, window

RESAMPLES = 2_000
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")


def statistic(values: list[float], why: str | None = None) -> dict[str, Any]:
    """Return n, mean and the percentiles that `values` are enough for; the others are null with the reason.

    `why` is the reason where a metric cannot exist at all, e.g. for answers that were not streamed.
    """
    n = len(values)
    result: dict[str, Any] = {"n": n, "mean": float(np.mean(values)) if n else None}
    reasons = {} if n else {"mean": why or "no request succeeded"}
    for name, needed in SAMPLES_NEEDED.items():
        enough = n >= needed
        result[name] = float(np.percentile(values, float(name[1:]))) if enough else None
        if not enough:
            reasons[name] = why or f"{n} samples, {name} needs {needed}"
    result["not_measured"] = reasons
    return result


def side(legs: list[list[Row]], concurrency: int | None) -> dict[str, Any]:
    """Return the metrics of one side at one point, from the steady windows of its legs.

    Throughput is tokens over the time in which this side was under full load: the sum of its legs' windows, never the
    span from its first leg to its last, which in an A B B A run holds the other side's legs.

    Args:
        legs: for each leg one dict a request with start_ns, end_ns, e2e_ms, output_tokens, expected_tokens, and where
            it was streamed ttft_ms, tpot_ms, inter_chunk_ms (a list); failed ones have `error`.
        concurrency: of a closed loop; None for an open one.
    """
    windows = [w for leg in legs if (w := window(leg, concurrency))]
    rows = [r for leg in legs for r in leg]
    good = [r for r in rows if not r.get("error")]
    kept = [r for w in windows for r in w.kept]
    streamed = any(r.get("ttft_ms") is not None for r in good)
    why = None if streamed or not good else "answers were not streamed"
    result: dict[str, Any] = {}
    for name in LATENCIES:
        values = [r[name] for r in kept if r.get(name) is not None]
        result[name] = statistic(values, None if name == "e2e_ms" else why)
    result["inter_chunk_ms"] = statistic([gap for r in kept for gap in r.get("inter_chunk_ms") or ()], why)
    per_leg = [_rate(leg, w) for leg in legs if (w := window(leg, concurrency))]
    seconds = sum(w.seconds for w in windows)
    result["output_tok_s"] = sum(t for t, _, _ in per_leg) / seconds if seconds else None
    result["request_s"] = sum(r for _, r, _ in per_leg) / seconds if seconds else None
    result["steady"] = {
        "seconds": round(seconds, 3),
        "requests": len(kept),
        "left_out_ramp": sum(w.ramp for w in windows),
        "left_out_drain": sum(w.drain for w in windows),
        "legs": [settled(w.kept) for w in windows],
    }
    result["repeats"] = spread([t / s for t, _, s in per_leg])
    result["errors"] = len(rows) - len(good)
    result["in_one_piece"] = sum(r.get("ttft_ms") is None for r in good) if streamed else 0
    result["output_tokens_ok"] = bool(good) and all(r["output_tokens"] == r["expected_tokens"] for r in good)
    return result


def _rate(leg: list[Row], found: Window) -> tuple[float, float, float]:
    """Return output tokens, requests ended and seconds of one steady window."""
    good = [r for r in leg if not r.get("error")]
    tokens = sum(tokens_between(r, found.start_ns, found.end_ns) for r in good)
    ended = sum(found.start_ns < r["end_ns"] <= found.end_ns for r in good)
    return tokens, float(ended), found.seconds


def spread(values: list[float]) -> dict[str, Any]:
    """Return the output tokens/s of each repeat, their median and their spread in % of it."""
    if len(values) < 2:
        return {"n": len(values), "output_tok_s": values, "median": values[0] if values else None, "spread_pct": None,
                "not_measured": {"spread_pct": f"{len(values)} leg; a spread needs two"}}  # fmt: skip
    middle = median(values)
    return {
        "n": len(values), "output_tok_s": values, "median": middle,
        "spread_pct": 100 * (max(values) - min(values)) / middle,
    }  # fmt: skip


def ratios(candidate: list[Row], baseline: list[Row], seed: int = 0) -> dict[str, Any]:
    """Return candidate over baseline for each latency, with bootstrap 95% intervals over requests.

    It is the ratio of means. The interval covers request-to-request spread within this run, not drift between runs.
    """
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {"ratio": {}, "ratio_ci95": {}}
    for name in LATENCIES:
        a = np.array([r[name] for r in candidate if r.get(name) is not None])
        b = np.array([r[name] for r in baseline if r.get(name) is not None])
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


def compare(candidate: list[list[Row]], baseline: list[list[Row]], concurrency: int | None) -> dict[str, Any]:
    """Return candidate, baseline, their ratios, intervals and drift for one load point; both sides as lists of legs."""
    a, b = side(candidate, concurrency), side(baseline, concurrency)
    found = ratios(_kept(candidate, concurrency), _kept(baseline, concurrency))
    both = a["output_tok_s"] and b["output_tok_s"]
    found["ratio"]["output_tok_s"] = a["output_tok_s"] / b["output_tok_s"] if both else None
    band = found["ratio_ci95"]["e2e_ms"]
    if both and band and concurrency:
        # Throughput of a closed loop moves with the inverse of the latency, so its relative interval is carried over.
        centre = found["ratio"]["output_tok_s"] * found["ratio"]["e2e_ms"]
        found["ratio_ci95"]["output_tok_s"] = [centre / band[1], centre / band[0]]
    else:
        found["ratio_ci95"]["output_tok_s"] = None
    found["drift"] = drift(b["repeats"]["output_tok_s"], found["ratio"]["output_tok_s"])
    return {"candidate": a, "baseline": b, **found}


def _kept(legs: list[list[Row]], concurrency: int | None) -> list[Row]:
    return [r for leg in legs if (w := window(leg, concurrency)) for r in w.kept]


def drift(baseline_tok_s: list[float], ratio: float | None) -> dict[str, Any]:
    """Return how far the baseline's own legs lie apart, %, and whether that is more than candidate against baseline."""
    if len(baseline_tok_s) < 2:
        reason = "one baseline leg; the orders ABBA and repeats above 1 have two"
        return {"pct": None, "exceeds_difference": None, "not_measured": {"pct": reason}}
    pct = 100 * (max(baseline_tok_s) / min(baseline_tok_s) - 1)
    exceeds = None if ratio is None else pct > 100 * (max(ratio, 1 / ratio) - 1)
    return {"pct": pct, "exceeds_difference": exceeds}

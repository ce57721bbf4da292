"""Paired accuracy: the candidate against the baseline on the same items (arXiv:2411.00640, arXiv:2407.09141).

Binary items: Tango's score interval and McNemar's mid-p. Fractions and repeated answers: a paired bootstrap of 10,000
resamples with the item as the cluster.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.evidence.items import mcnemar_mid_p, score_bound
from pipeline.evidence.resample import cluster_mean

SCORE, BOOTSTRAP = "Tango's score interval", "paired bootstrap over items, 10,000 resamples, Student's t"


def compare_items(baseline: dict[str, float] | None, candidate: dict[str, float]) -> dict[str, Any]:
    """Return accuracy, and with a baseline the paired difference, its 95% interval, flips and recovery.

    A flip is an item that scores less (right to wrong) or more (wrong to right) than in the baseline.

    Args:
        baseline: `{item id: score 0..1}` of the baseline, or None for the baseline itself.
        candidate: the same of the candidate.

    Raises:
        ValueError: the two did not answer the same items, or there is none.
    """
    if not candidate:
        raise ValueError("no item was answered")
    values = np.array([candidate[key] for key in sorted(candidate)])
    n = len(values)
    result: dict[str, Any] = {
        "n": n,
        "accuracy": float(values.mean()),
        "stderr": float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else None,
        "binary": _binary(values),
        "baseline_accuracy": None,
        "delta_pp": None,
        "delta_pp_ci95": None,
        "delta_pp_se": None,
        "delta_method": None,
        "flips_right_to_wrong": None,
        "flips_wrong_to_right": None,
        "flips_pct": None,
        "mcnemar_mid_p": None,
        "recovery_pct": None,
    }
    if baseline is None:
        return result
    if baseline.keys() != candidate.keys():
        odd = sorted(baseline.keys() ^ candidate.keys())
        raise ValueError(f"baseline and candidate answered different items: {len(odd)} differ, first {odd[0]}")
    before = np.array([baseline[key] for key in sorted(candidate)])
    worse, better = int((values < before).sum()), int((values > before).sum())
    result |= {
        "binary": _binary(values) and _binary(before),
        "baseline_accuracy": float(before.mean()),
        "delta_pp": float(100 * (values - before).mean()),
        "flips_right_to_wrong": worse,
        "flips_wrong_to_right": better,
        "flips_pct": 100 * (worse + better) / n,
        "recovery_pct": float(100 * values.mean() / before.mean()) if before.mean() > 0 else None,
    }
    return result | (_of_binary(n, worse, better) if result["binary"] else _of_scores(values - before))


def _binary(values: NDArray[np.float64]) -> bool:
    return bool(np.isin(values, (0.0, 1.0)).all())


def _of_binary(n: int, worse: int, better: int) -> dict[str, Any]:
    # Damage is a loss and the difference a gain: the interval changes its sign and its ends.
    low, high = (score_bound(n, worse, better, level) for level in (0.025, 0.975))
    return {
        "delta_pp_ci95": [-100 * high, -100 * low] if n > 1 else None,
        "delta_method": SCORE,
        "mcnemar_mid_p": mcnemar_mid_p(worse, better),
    }


def _of_scores(gap: NDArray[np.float64]) -> dict[str, Any]:
    found = cluster_mean(100 * gap, np.arange(len(gap)))
    return {"delta_pp_ci95": found.interval(), "delta_pp_se": found.se, "delta_method": BOOTSTRAP}

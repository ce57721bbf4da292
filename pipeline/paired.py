"""Paired accuracy: the candidate against the baseline on the same items (arXiv:2411.00640, arXiv:2407.09141)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def compare_items(baseline: dict[str, float] | None, candidate: dict[str, float]) -> dict[str, Any]:
    """Return accuracy, and with a baseline the paired difference, its 95% interval, flips and recovery.

    The interval is the paired normal one, from the spread of the per-item differences; with few discordant items it is
    an approximation, and the number of flips stands beside it.

    Args:
        baseline: `{item id: 0.0 or 1.0}` of the baseline, or None for the baseline itself.
        candidate: the same of the candidate.

    Raises:
        ValueError: the two did not answer the same items.
    """
    values = np.array([candidate[key] for key in sorted(candidate)])
    n = len(values)
    result: dict[str, Any] = {
        "n": n,
        "accuracy": float(values.mean()),
        "stderr": float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else None,
        "baseline_accuracy": None,
        "delta_pp": None,
        "delta_pp_ci95": None,
        "flips_right_to_wrong": None,
        "flips_wrong_to_right": None,
        "recovery_pct": None,
    }
    if baseline is None:
        return result
    if baseline.keys() != candidate.keys():
        odd = sorted(baseline.keys() ^ candidate.keys())
        raise ValueError(f"baseline and candidate answered different items: {len(odd)} differ, first {odd[0]}")
    before = np.array([baseline[key] for key in sorted(candidate)])
    gap = values - before
    half = 1.96 * float(gap.std(ddof=1)) / math.sqrt(n) if n > 1 else None
    delta = float(gap.mean())
    result |= {
        "baseline_accuracy": float(before.mean()),
        "delta_pp": 100 * delta,
        "delta_pp_ci95": None if half is None else [100 * (delta - half), 100 * (delta + half)],
        "flips_right_to_wrong": int((gap < 0).sum()),
        "flips_wrong_to_right": int((gap > 0).sum()),
        "recovery_pct": float(100 * values.mean() / before.mean()) if before.mean() > 0 else None,
    }
    return result

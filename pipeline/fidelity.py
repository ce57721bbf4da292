"""Token-level fidelity: how close the candidate's next-token distributions are to the baseline's on fixed text.

Both servers give the log-probabilities of their top-k tokens and of the token that stands in the text. All other tokens
are merged into one bucket; by the data-processing inequality the KL of the merged distributions is a lower bound on the
true KL. Pure numpy.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
RESAMPLES = 10_000


class Logprobs(NamedTuple):
    """Of one run over `[windows][positions]` of text, k kept per position.

    ids: int `[positions_total, k]`, the top-k token ids by rank.
    logprobs: float `[positions_total, k]`, natural logarithms, falling.
    actual: float `[positions_total]`, log-probability of the token that stands in the text.
    window: int `[positions_total]`, which window a position is in.
    """

    ids: NDArray[np.int64]
    logprobs: Array
    actual: Array
    window: NDArray[np.int64]


def bucketed_kl(baseline: Logprobs, candidate: Logprobs) -> Array:
    """Return KL(baseline || candidate) in nats per position, `[positions]`, over shared top-k tokens and one bucket.

    A token counts as shared when both kept it; only then are both its probabilities known.
    """
    same = baseline.ids[:, :, None] == candidate.ids[:, None, :]
    p = np.exp(baseline.logprobs)
    q = np.einsum("nij,nj->ni", same, np.exp(candidate.logprobs))
    shared = same.any(axis=2)
    p_shared = np.where(shared, p, 0.0)
    q_shared = np.where(shared, q, 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(shared & (p > 0), p * (np.log(p) - np.log(np.where(shared, q, 1.0))), 0.0)
    p_rest = np.clip(1.0 - p_shared.sum(axis=1), 0.0, 1.0)
    # Rounding can leave the candidate's rest at zero while the baseline's is not; the floor keeps the bound finite.
    q_rest = np.clip(1.0 - q_shared.sum(axis=1), 1e-9, 1.0)
    rest = np.where(p_rest > 0, p_rest * (np.log(np.maximum(p_rest, 1e-300)) - np.log(q_rest)), 0.0)
    return np.asarray(np.maximum(terms.sum(axis=1) + rest, 0.0), dtype=np.float64)


def perplexity(actual: Array) -> float:
    """Return exp of the mean negative log-probability of the text's own tokens."""
    return float(np.exp(-actual.mean()))


def bootstrap_by_window(values: Array, window: NDArray[np.int64], seed: int = 0) -> tuple[float, float]:
    """Return a 95% interval of the mean of `values`, resampling whole windows.

    Positions of one window are not independent, so the window is the cluster.

    Args:
        values: float `[positions]`.
        window: int `[positions]`, the cluster of each position.
        seed: of the resampling.
    """
    labels, inverse = np.unique(window, return_inverse=True)
    sums = np.bincount(inverse, weights=values)
    counts = np.bincount(inverse)
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, len(labels), size=(RESAMPLES, len(labels)))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def summarize(baseline: Logprobs | None, candidate: Logprobs, top_k: int) -> dict[str, Any]:
    """Return the `fidelity` part of eval.json; what needs a baseline is null without one.

    Raises:
        ValueError: the two runs are not over the same positions.
    """
    result: dict[str, Any] = {
        "tokens": len(candidate.actual),
        "windows": len(np.unique(candidate.window)),
        "top_k": top_k,
        "perplexity": perplexity(candidate.actual),
        "top1_agreement_pct": None,
        "kl_mean": None,
        "kl_mean_ci95": None,
        "kl_median": None,
        "kl_p99": None,
        "kl_max": None,
        "kl_kind": f"lower bound in nats: tokens in both top-{top_k}, the rest in one bucket",
        "shared_mass_mean": None,
        "baseline_perplexity": None,
        "perplexity_ratio": None,
        "perplexity_ratio_ci95": None,
    }
    if baseline is None:
        return result
    if len(baseline.actual) != len(candidate.actual) or not np.array_equal(baseline.window, candidate.window):
        raise ValueError(
            f"baseline and candidate were not read on the same text: {len(baseline.actual)} "
            f"against {len(candidate.actual)} positions"
        )
    kl = bucketed_kl(baseline, candidate)
    gap = baseline.actual - candidate.actual
    low, high = bootstrap_by_window(gap, candidate.window)
    shared = (baseline.ids[:, :, None] == candidate.ids[:, None, :]).any(axis=2)
    result |= {
        "top1_agreement_pct": float(100 * (baseline.ids[:, 0] == candidate.ids[:, 0]).mean()),
        "kl_mean": float(kl.mean()),
        "kl_mean_ci95": list(bootstrap_by_window(kl, candidate.window)),
        "kl_median": float(np.median(kl)),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        "shared_mass_mean": float(np.where(shared, np.exp(baseline.logprobs), 0.0).sum(axis=1).mean()),
        "baseline_perplexity": perplexity(baseline.actual),
        "perplexity_ratio": float(np.exp(gap.mean())),
        "perplexity_ratio_ci95": [float(np.exp(low)), float(np.exp(high))],
    }
    return result

"""Token-level fidelity: how close the candidate's next-token distributions are to the baseline's on fixed text.

Both servers give the log-probabilities of their top-k tokens and of the token that stands in the text. All other tokens
are merged into one bucket; by the data-processing inequality the KL of the merged distributions is a lower bound on the
true KL. Intervals resample whole windows (10,000 times): the positions of one window are not independent. Pure.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.evidence.resample import cluster_mean

Array = NDArray[np.float64]


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
        "top1_agreement_pct_ci95": None,
        "top1_agreement_pct_se": None,
        "kl_mean": None,
        "kl_mean_ci95": None,
        "kl_mean_se": None,
        "kl_median": None,
        "kl_p99": None,
        "kl_max": None,
        "kl_kind": f"lower bound in nats: tokens in both top-{top_k}, the rest in one bucket",
        "shared_mass_mean": None,
        "baseline_perplexity": None,
        "perplexity_ratio": None,
        "perplexity_ratio_ci95": None,
        "log_perplexity_ratio_se": None,
    }
    if baseline is None:
        return result
    if len(baseline.actual) != len(candidate.actual) or not np.array_equal(baseline.window, candidate.window):
        raise ValueError(
            f"baseline and candidate were not read on the same text: {len(baseline.actual)} "
            f"against {len(candidate.actual)} positions"
        )
    kl = bucketed_kl(baseline, candidate)
    kl_mean = cluster_mean(kl, candidate.window)
    same_first = 100.0 * (baseline.ids[:, 0] == candidate.ids[:, 0])
    top1 = cluster_mean(same_first, candidate.window)
    gap = cluster_mean(baseline.actual - candidate.actual, candidate.window)
    span = gap.interval()
    shared = (baseline.ids[:, :, None] == candidate.ids[:, None, :]).any(axis=2)
    result |= {
        "top1_agreement_pct": top1.value,
        "top1_agreement_pct_ci95": top1.interval(),
        "top1_agreement_pct_se": top1.se,
        "kl_mean": kl_mean.value,
        "kl_mean_ci95": kl_mean.interval(),
        "kl_mean_se": kl_mean.se,
        "kl_median": float(np.median(kl)),
        "kl_p99": float(np.quantile(kl, 0.99)),
        "kl_max": float(kl.max()),
        "shared_mass_mean": float(np.where(shared, np.exp(baseline.logprobs), 0.0).sum(axis=1).mean()),
        "baseline_perplexity": perplexity(baseline.actual),
        "perplexity_ratio": float(np.exp(gap.value)),
        "perplexity_ratio_ci95": None if span is None else [float(np.exp(x)) for x in span],
        "log_perplexity_ratio_se": gap.se,
    }
    return result

"""An estimate with its standard error over clusters: what is resampled is the item or the window, never the token."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
RESAMPLES = 10_000
# Numbers that scipy may hold at once for one batch of resamples: 32 MB.
BATCH_NUMBERS = 4_000_000


class Estimate(NamedTuple):
    """A mean over clusters. `se` is None when there are too few clusters to see a spread."""

    value: float
    se: float | None
    clusters: int

    def interval(self, level: float = 0.95) -> list[float] | None:
        """Return the two-sided interval: Student's t with clusters - 1 degrees of freedom on the bootstrap's error."""
        if self.se is None:
            return None
        half = float(stats.t.ppf(0.5 + level / 2, self.clusters - 1)) * self.se
        return [self.value - half, self.value + half]


def cluster_mean(values: Array, cluster: NDArray[Any], seed: int = 0) -> Estimate:
    """Return the mean of `values` with the bootstrap's standard error, whole clusters resampled 10,000 times.

    Args:
        values: float `[n]`.
        cluster: `[n]`, the label of what is independent: the window of a token, the question of a repeated answer.
        seed: of the resampling; the same seed gives the same error.
    """
    _, inverse = np.unique(cluster, return_inverse=True)
    sums = np.bincount(inverse, weights=values).astype(np.float64)
    return ratio_of_sums(sums, np.bincount(inverse).astype(np.float64), seed)


def ratio_of_sums(above: Array, below: Array, seed: int = 0, log: bool = False) -> Estimate:
    """Return sum(above) / sum(below) over clusters with its bootstrap error.

    Args:
        above: float `[clusters]`.
        below: float `[clusters]`, in the same order.
        seed: of the resampling.
        log: give the natural logarithm of the ratio, whose spread is even on both sides.
    """
    count = len(above)

    def statistic(top: Array, bottom: Array, axis: int = -1) -> Array:
        found = top.sum(axis=axis) / bottom.sum(axis=axis)
        return np.asarray(np.log(found) if log else found)

    value = float(statistic(above, below))
    if count < 2:
        return Estimate(value, None, count)
    if np.allclose(above * below[0], below * above[0], rtol=1e-12, atol=0):
        return Estimate(value, 0.0, count)
    found = stats.bootstrap(
        (above, below), statistic, n_resamples=RESAMPLES, paired=True, vectorized=True, method="percentile",
        batch=max(1, BATCH_NUMBERS // count), rng=np.random.default_rng(seed),
    )  # fmt: skip
    # The bootstrap of n clusters is narrow by sqrt((n-1)/n) (arXiv:1411.5279, section on small samples).
    return Estimate(value, float(found.standard_error) * float(np.sqrt(count / (count - 1))), count)

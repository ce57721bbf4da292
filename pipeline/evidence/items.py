"""The same items answered twice: McNemar's mid-p, Tango's score interval, Holm's correction. Pure.

`worse` are items the baseline had right and the candidate has wrong, `better` the other way round; damage is
(worse - better) / items, so that more is worse.

Sources: mid-p McNemar: Fagerland, Lydersen, Laake, BMC Med Res Methodol 13:91 (2013); score interval of a paired
difference: Tango, Statist. Med. 17 (1998) 891-908; Holm, Scand. J. Statist. 6 (1979) 65-70; half an item added to each
cell, for an error that does not vanish without flips: Agresti and Min, Statist. Med. 24 (2005) 729-740.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq
from scipy.stats import binom, norm


def mcnemar_mid_p(worse: int, better: int) -> float:
    """Return the two-sided mid-p value of McNemar's test; 1 without any flip."""
    flips = worse + better
    if flips == 0 or worse == better:
        return 1.0
    less = min(worse, better)
    return min(1.0, float(2 * binom.cdf(less, flips, 0.5) - binom.pmf(less, flips, 0.5)))


def score_z(items: int, worse: int, better: int, damage: float, shift: float = 0.0) -> float:
    """Return Tango's score statistic for a true `damage` (-1..1): far below 0 says that less is true, above 0 more.

    `shift` items are taken from worse - better: 0.5 is the correction for continuity, which keeps the rate of false
    alarms of few flips below its level (docs/verdict-calibration.md; without it, up to 9% for 5%).
    """
    a = 2 * items
    b = -worse - better + (2 * items - worse + better) * damage
    c = -better * damage * (1 - damage)
    rare = (math.sqrt(max(b * b - 4 * a * c, 0.0)) - b) / (2 * a)
    variance = items * (2 * rare + damage * (1 - damage))
    gap = worse - better - items * damage - shift
    if variance <= 1e-12:
        return 0.0 if abs(gap) < 1e-9 else math.copysign(math.inf, gap)
    return gap / math.sqrt(variance)


def score_bound(items: int, worse: int, better: int, level: float) -> float:
    """Return the damage that a one-sided interval of confidence `level` ends at; `level` < 0.5 gives the lower end."""
    target = float(norm.ppf(1 - level))

    def miss(damage: float) -> float:
        return max(min(score_z(items, worse, better, damage), 1e6), -1e6) - target

    edge = 1 - 1e-12
    if miss(-edge) <= 0:
        return -1.0
    if miss(edge) >= 0:
        return 1.0
    return float(brentq(miss, -edge, edge, xtol=1e-10))


def smooth_flips(items: int, worse: int, better: int) -> float:
    """Return the share of flipped items with one flip added: no sample shows that flips never happen."""
    return (worse + better + 1) / (items + 2)


def holm(p_values: dict[str, float]) -> dict[str, float]:
    """Return Holm's adjusted p-values, which bound the chance of one or more false alarms among all of them."""
    adjusted: dict[str, float] = {}
    largest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: (item[1], item[0]))):
        largest = max(largest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = largest
    return {name: adjusted[name] for name in p_values}

"""PASS, FAIL or INCONCLUSIVE by non-inferiority: whether the damage is shown to lie below or above a margin.

PASS: the one-sided 95% bound of the damage lies at or below the margin. FAIL: the damage is shown to be above it, after
Holm's correction over all tests that can block together (a release passes only if each of them passes, which needs no
correction: an intersection-union test, Berger, Technometrics 24 (1982) 295-300). Anything else is INCONCLUSIVE, so that
want of evidence is never a PASS.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from scipy.stats import norm, t

from pipeline.evidence.items import holm, score_bound, score_z, smooth_flips
from pipeline.evidence.power import ALPHA, POWER, items_needed, smallest_damage
from pipeline.evidence.resample import Estimate

PASS, FAIL, INCONCLUSIVE = "PASS", "FAIL", "INCONCLUSIVE"
# Fewer clusters than this show no spread that a verdict may rest on.
FEWEST_CLUSTERS = 8
# Of a FAIL over items: the correction for continuity, in items. See score_z.
CONTINUITY = 0.5


@dataclass(frozen=True)
class Comparison:
    """One comparison with one margin; `damage`, `margin`, `bound`, `detectable` are in the same unit, more is worse.

    damage: as seen. bound: upper one-sided bound of it. detectable: the smallest damage that this sample tells from
    none at the promised power. fails_from: the true damage from which a FAIL is promised at that power. items: how many
    were compared, in units of `item`. needed: items for a PASS if there is no damage; needed_as_seen: items for a firm
    answer if the true damage is what was seen, None if no number would do. p_pass, p_fail: one-sided p-values of "at or
    above the margin" and of "at or below it".
    """

    damage: float
    margin: float
    bound: float
    detectable: float
    fails_from: float
    items: int
    item: str
    needed: int | None
    needed_as_seen: int | None
    p_pass: float
    p_fail: float


def of_items(
    items: int, worse: int, better: int, margin: float, alpha: float = ALPHA, power: float = POWER
) -> Comparison:
    """Test paired binary items against a margin in accuracy (0..1).

    Args:
        items: how many were compared.
        worse: right in the baseline, wrong in the candidate.
        better: the other way round.
        margin: accepted loss of accuracy, 0..1.
        alpha: one-sided level.
        power: of the statements about sample size.
    """
    z = score_z(items, worse, better, margin)
    damage = (worse - better) / items
    flips = smooth_flips(items, worse, better)
    seen = smallest_damage(items, flips, alpha, power)
    return Comparison(
        damage=damage,
        margin=margin,
        bound=score_bound(items, worse, better, 1 - alpha),
        detectable=min(seen, 1.0),
        fails_from=min(margin + seen + CONTINUITY / items, 1.0),
        items=items,
        item="items",
        needed=items_needed(flips, margin, 0.0, alpha, power),
        needed_as_seen=items_needed(flips, margin, damage, alpha, power),
        p_pass=float(norm.cdf(z)),
        p_fail=float(norm.sf(score_z(items, worse, better, margin, CONTINUITY))),
    )


def of_mean(found: Estimate, margin: float, item: str, alpha: float = ALPHA, power: float = POWER) -> Comparison | None:
    """Test a mean over clusters, for which more is worse, against a margin of the same unit.

    Args:
        found: the damage, its standard error and the number of clusters.
        margin: accepted damage.
        item: what a cluster is, in the plural: windows, items, answers.
        alpha: one-sided level.
        power: of the statements about sample size.

    Returns:
        The test, or None when fewer than 8 clusters show no spread to rest on.
    """
    if found.se is None or found.clusters < FEWEST_CLUSTERS or not math.isfinite(found.value):
        return None
    freedom = found.clusters - 1
    factor = float(t.isf(alpha, freedom) + t.ppf(power, freedom))
    z = (found.value - margin) / found.se if found.se > 0 else math.copysign(math.inf, found.value - margin)
    if found.se == 0 and found.value == margin:
        z = 0.0

    def needed(damage: float) -> int | None:
        distance = abs(margin - damage)
        if distance == 0:
            return None
        return max(FEWEST_CLUSTERS, math.ceil(found.clusters * (factor * float(found.se or 0.0) / distance) ** 2))

    return Comparison(
        damage=found.value,
        margin=margin,
        bound=found.value + float(t.isf(alpha, freedom)) * found.se,
        detectable=factor * found.se,
        fails_from=margin + factor * found.se,
        items=found.clusters,
        item=item,
        needed=needed(0.0),
        needed_as_seen=needed(found.value),
        p_pass=float(t.cdf(z, freedom)),
        p_fail=float(t.sf(z, freedom)),
    )


def verdict(test: Comparison, p_fail: float, alpha: float = ALPHA) -> str:
    """Return the verdict; `p_fail` is the test's own, or Holm's when several can block."""
    if test.p_pass <= alpha:
        return PASS
    return FAIL if p_fail <= alpha else INCONCLUSIVE


def judge(tests: dict[str, Comparison], alpha: float = ALPHA) -> dict[str, dict[str, Any]]:
    """Judge the tests that can block together: each with its fields, `p_fail_holm` and `verdict`."""
    corrected = holm({name: test.p_fail for name, test in tests.items()})
    return {
        name: asdict(test) | {"p_fail_holm": corrected[name], "verdict": verdict(test, corrected[name], alpha)}
        for name, test in tests.items()
    }

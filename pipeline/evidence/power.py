"""How many items a comparison needs, and the smallest damage that a number of items can show.

Paired binary items, normal approximation: with a share `flips` of items whose correctness differs between the two
models and a true damage d, the difference of accuracies has the standard error sqrt((flips - d^2) / n); see
arXiv:2411.00640 (paired differences) and Connor, Biometrics 43 (1987) 207-211 (McNemar's test). One-sided, because only
damage is asked for.
"""

from __future__ import annotations

import math

from scipy.stats import norm

from pipeline.errors import InputError

ALPHA = 0.05
POWER = 0.80
MOST_ITEMS = 10**9


def both_tails(alpha: float = ALPHA, power: float = POWER) -> float:
    """Return z_alpha + z_power: how many standard errors a difference must measure to be found at that rate."""
    return float(norm.isf(alpha) + norm.ppf(power))


def items_needed(
    flips: float, margin: float, damage: float = 0.0, alpha: float = ALPHA, power: float = POWER
) -> int | None:
    """Return the items that show, at this power, that a true `damage` lies on its own side of `margin`.

    Args:
        flips: share of items whose correctness differs between the two models, 0..1.
        margin: accepted loss of accuracy, 0..1 (0.01 is one percentage point).
        damage: the true loss of accuracy; 0 is "the two are equal".
        alpha: one-sided level.
        power: chance that the answer is reached.

    Returns:
        The number of items, or None when the damage is the margin itself: no number of items tells them apart.
    """
    distance = abs(margin - damage)
    if distance == 0:
        return None
    variance = max(flips - damage**2, 0.0)
    found = math.ceil(variance * (both_tails(alpha, power) / distance) ** 2)
    return max(found, 1) if found <= MOST_ITEMS else None


def smallest_damage(items: int, flips: float, alpha: float = ALPHA, power: float = POWER) -> float:
    """Return the smallest loss of accuracy (0..1) that `items` paired items tell from none at this power."""
    return both_tails(alpha, power) * math.sqrt(flips / items)


def check(flips: float, margin: float, damage: float, alpha: float, power: float) -> None:
    """Check what a person typed.

    Raises:
        InputError: a value that is no share, or values that contradict each other.
    """
    for name, value in (("flips", flips), ("margin", margin), ("alpha", alpha), ("power", power)):
        if not (math.isfinite(value) and 0 < value < 1):
            hint = f" For {value:g}% write {value / 100:g}." if 1 <= value <= 100 else ""
            raise InputError(f"--{name} is a share between 0 and 1, not {value:g}.{hint}")
    if not (math.isfinite(damage) and -1 < damage < 1):
        raise InputError(f"--damage is a share between -1 and 1, not {damage:g}.")
    if abs(damage) > flips:
        raise InputError(
            f"--damage {damage:g} is more than --flips {flips:g}: accuracy cannot change by more than the share of "
            "items that flip."
        )
    if damage >= margin:
        raise InputError(f"--damage {damage:g} is not below --margin {margin:g}: there is nothing to pass.")
    if alpha >= 0.5 or power <= alpha:
        raise InputError(f"--alpha must be below 0.5 and below --power; found alpha {alpha:g} and power {power:g}.")

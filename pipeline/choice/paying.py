"""Where a precision pays and where it stops: its ratios over the baseline, load by load, in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

FASTER, SLOWER, OPEN = "faster", "slower", "no difference shown"


class Load(NamedTuple):
    """One closed load: output tokens/s over the baseline's with its 95% interval over legs (evidence/repeat.py)."""

    concurrency: int
    ratio: float
    band: list[float] | None

    @property
    def state(self) -> str:
        """FASTER or SLOWER where the whole interval lies on one side of 1, else OPEN."""
        if self.band is None:
            return OPEN
        return FASTER if self.band[0] > 1 else SLOWER if self.band[1] < 1 else OPEN

    @property
    def words(self) -> str:
        """The measurement: '0.93x [0.91, 0.95] at 256', with why it shows nothing where it does not."""
        shown = f"[{self.band[0]:.2f}, {self.band[1]:.2f}]" if self.band else "(no interval: it was not repeated)"
        return f"{self.ratio:.2f}x {shown} at {self.concurrency}"


def pays(loads: Sequence[Load]) -> str:
    """Say where a cell pays over its baseline on one workload, and between which loads it stops.

    A ratio whose interval holds 1, or that has none, is not faster.
    """
    if not loads:
        return "not measured (no closed load with a usable ratio)"
    ordered = sorted(loads, key=lambda load: load.concurrency)
    faster = [load for load in ordered if load.state == FASTER]
    first, last = ordered[0], ordered[-1]
    if not faster:
        where = f"from {first.concurrency} to {last.concurrency} in flight" if first is not last else "at the one timed"
        what = "slower" if all(load.state == SLOWER for load in ordered) else "not shown to pay at any load"
        return f"{what} {where}: {', '.join(load.words for load in ordered)}"
    if len(faster) == len(ordered):
        if first is last:
            return f"pays at the one load timed, {last.words}"
        return f"pays at every load timed, {last.words}"
    best = faster[-1]
    after = ordered[ordered.index(best) + 1 :]
    below = [load for load in ordered if load.concurrency < best.concurrency and load.state != FASTER]
    text = f"pays up to the highest load timed, {last.words}"
    if after:
        verb = "stops paying" if after[0].state == SLOWER else "is not shown to pay any more"
        text = f"{verb} between {best.concurrency} and {after[0].concurrency} requests in flight: "
        text += ", ".join(load.words for load in (best, *after))
    return text + (f"; below that not faster: {', '.join(load.words for load in below)}" if below else "")

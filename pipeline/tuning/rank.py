"""From the legs of a tuning run to ratios over the cell's own options, and to what is proposed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from scipy.stats import t as student

from pipeline.speed.points import LATENCIES, side
from pipeline.speed.steady import Row
from pipeline.speed.workloads import Point
from pipeline.tuning.spec import OWN

SCHEMA = "quantpress.tune/1"
# A gain below this is not worth a change of options, however quiet the host was.
LEAST_GAIN = 0.02
# A load whose own legs lie so many times as far apart as the other loads' do has a noise of its own.
LOUD = 1.5


class Proposal(NamedTuple):
    """A variant that beat the cell's own options at a load by more than chance gives; `margin` is what that may be."""

    point: str
    variant: str
    ratio: float
    margin: float
    changes_answers: bool

    @property
    def text(self) -> str:
        """The measurement in one sentence."""
        after = "; it changes answers, so evaluate it first" if self.changes_answers else ""
        chance = f"chance gives up to {100 * self.margin:.1f}%"
        return f"{self.variant}: {self.ratio:.2f}x tokens/s at {self.point} ({chance}){after}"


def order(variants: Sequence[str]) -> list[str]:
    """Return the sides in the order of their legs: own options first and last, so that drift shows.

    The last leg is on another start of the same server: two starts may differ by more than two legs of one.
    """
    return [OWN, *variants, OWN]


def point(load: Point, legs: Mapping[str, list[list[Row]]]) -> dict[str, Any]:
    """Return one load: each side's numbers and its ratio over the cell's own options.

    Args:
        load: the load point.
        legs: for each side the requests of each of its legs, own options with two or more.

    Returns:
        name, loop, concurrency or rate, `noise` (how far the throughput of the own legs lies apart, as a share of
        their mean), and per side output_tok_s, latencies and `ratio` (over own: tokens/s; for TTFT and TPOT the
        candidate's mean over own's, so less is better).
    """
    found = {name: side(rows, load.concurrency) for name, rows in legs.items()}
    own = found[OWN]
    rates = [side([rows], load.concurrency)["output_tok_s"] for rows in legs[OWN]]
    known = [rate for rate in rates if rate]
    noise = (max(known) - min(known)) / (sum(known) / len(known)) if len(known) > 1 else None
    sides = {}
    for name, values in found.items():
        entry = {"output_tok_s": values["output_tok_s"], "request_s": values["request_s"], "errors": values["errors"]}
        entry |= {key: values[key] for key in LATENCIES} | {"steady": values["steady"]}
        entry["ratio"] = {"output_tok_s": _over(values["output_tok_s"], own["output_tok_s"])}
        entry["ratio"] |= {key: _over(values[key]["mean"], own[key]["mean"]) for key in LATENCIES}
        sides[name] = entry
    return {"name": load.name, "loop": load.loop, "concurrency": load.concurrency, "rate": load.rate,
            "requests": load.count, "noise": noise, "sides": sides}  # fmt: skip


def margins(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Return for each load by how much chance alone may set a variant apart from the own options, as a share.

    The own options' two legs are all that repeats in a run (each on a server of its own), so their spread is taken over
    all its loads together: one degree of freedom a load, Student's t. A load whose own legs lie over LOUD times as far
    apart as the others' do is left out of those and has its own spread, with the one degree that it has. A variant has
    one leg against two: sqrt(1 + 1/2). At 95% for all variants of a load together (Bonferroni); simulated with equal
    variants 1 to 2% of loads have a false gain, and 10% of one that is six times as noisy as the others and does not
    show it. None where the own legs had failed requests, or are not two.
    """
    known = {load["name"]: load["noise"] / math.sqrt(2) for load in record["points"]
             if load["noise"] is not None and not load["sides"][OWN]["errors"]}  # fmt: skip
    found: dict[str, float | None] = {}
    for load in record["points"]:
        name = load["name"]
        if name not in known:
            found[name] = None
            continue
        quiet = [sd for other, sd in known.items() if other != name]
        loud = bool(quiet) and known[name] > LOUD * _pooled(quiet)
        degrees = [known[name]] if loud else list(known.values())
        tests = max(1, len(load["sides"]) - 1)
        found[name] = float(student.ppf(1 - 0.025 / tests, len(degrees))) * _pooled(degrees) * math.sqrt(1.5)
    return found


def _pooled(sds: Sequence[float]) -> float:
    return math.sqrt(sum(sd**2 for sd in sds) / len(sds))


def judge(ratio: float | None, margin: float | None, errors: int = 0) -> str:
    """Return how a ratio over the own options is to be taken.

    One of 'not measured', 'failed requests', 'noise not known', 'within noise' (see margins), 'too little' (under
    LEAST_GAIN either way), 'faster', 'slower'.
    """
    if ratio is None:
        return "not measured"
    if errors:
        return "failed requests"
    if margin is None:
        return "noise not known"
    if abs(ratio - 1) <= margin:
        return "within noise"
    if abs(ratio - 1) <= LEAST_GAIN:
        return "too little"
    return "faster" if ratio > 1 else "slower"


def proposals(record: Mapping[str, Any]) -> list[Proposal]:
    """Return per load the variant with the most tokens/s, when it beats the own options by more than chance gives.

    A variant counts when its gain is over LEAST_GAIN and over the margin of its load; nothing is proposed where that is
    not known. Where the best one changes answers, the best that does not is proposed as well.
    """
    found = []
    chance = margins(record)
    for load in record["points"]:
        better = []
        margin = chance[load["name"]]
        for name, values in load["sides"].items():
            ratio = values["ratio"]["output_tok_s"]
            if name != OWN and margin is not None and judge(ratio, margin, values["errors"]) == "faster":
                changes = bool(record["variants"][name]["changes_answers"])
                better.append(Proposal(load["name"], name, ratio, margin, changes))
        better.sort(key=lambda p: -p.ratio)
        found += better[:1]
        if better and better[0].changes_answers:
            found += [p for p in better if not p.changes_answers][:1]
    return found


def _over(value: float | None, own: float | None) -> float | None:
    return value / own if value and own else None

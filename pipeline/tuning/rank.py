"""From the legs of a tuning run to ratios over the cell's own options, and to what is proposed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any, NamedTuple

from scipy.stats import t as student

from pipeline.speed.points import LATENCIES, side
from pipeline.speed.steady import Row
from pipeline.speed.workloads import Point
from pipeline.tuning.spec import OWN

SCHEMA = "quantpress.tune/1"
# A gain below this is not worth a change of options, however quiet the host was.
LEAST_GAIN = 0.02
# Own legs of a run, on two starts of the server by turns: a spread of fewer says little.
OWN_LEGS = 4


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
    """Return the sides in the order of their legs: own options first, last, and evenly between the variants.

    Own legs are by turns on two starts of the same server (`OWN_LEGS` in all): two starts may differ by more than two
    legs of one, and legs far apart in time show drift.
    """
    gaps = OWN_LEGS - 1
    cuts = [round(number * len(variants) / gaps) for number in range(gaps + 1)]
    found = [OWN]
    for start, end in itertools.pairwise(cuts):
        found += [*variants[start:end], OWN]
    return found


def point(load: Point, legs: Mapping[str, list[list[Row]]]) -> dict[str, Any]:
    """Return one load: each side's numbers and its ratio over the cell's own options.

    Args:
        load: the load point.
        legs: for each side the requests of each of its legs, own options with two or more.

    Returns:
        name, loop, concurrency or rate, `own_tok_s` (throughput of each own leg), `noise` (how far they lie apart, as
        a share of their mean), and per side output_tok_s, latencies and `ratio` (over own: tokens/s; for TTFT and TPOT
        the candidate's mean over own's, so less is better).
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
            "requests": load.count, "own_tok_s": rates, "noise": noise, "sides": sides}  # fmt: skip


def margins(record: Mapping[str, Any]) -> dict[str, float | None]:
    """Return for each load by how much chance alone may set a variant apart from the own options, as a share.

    The own options' legs at that load are all that repeats, so their spread is taken: Student's t for one leg of a
    variant against the mean of n own legs, sqrt(1 + 1/n), at 95% for all variants of the load together (Bonferroni).
    Equal variants have a false gain at 2.5% of loads, however much noisier one load is than another; that is why loads
    are not taken together. None where the own legs had failed requests, or are fewer than two.
    """
    found: dict[str, float | None] = {}
    for load in record["points"]:
        own = _own(load)
        if (n := len(own)) < 2:
            found[load["name"]] = None
            continue
        t = float(student.ppf(1 - 0.025 / max(1, len(load["sides"]) - 1), n - 1))
        found[load["name"]] = t * stdev(own) / mean(own) * math.sqrt(1 + 1 / n)
    return found


def _own(load: Mapping[str, Any]) -> list[float]:
    """Return the own legs' throughputs, tokens/s, none where requests of theirs failed.

    Results of before 2026-12 have only how far two legs lie apart, as a share of their mean.
    """
    if load["sides"][OWN]["errors"]:
        return []
    if load.get("own_tok_s"):
        return [rate for rate in load["own_tok_s"] if rate]
    return [] if load["noise"] is None else [1 - load["noise"] / 2, 1 + load["noise"] / 2]


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

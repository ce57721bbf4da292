"""One cell's results against the policy: every check with its verdict, its margin and what its sample could see."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from pipeline.evidence.items import holm
from pipeline.evidence.policy import AtLeast, Floor, Policy
from pipeline.evidence.resample import Estimate
from pipeline.evidence.verdicts import FAIL, INCONCLUSIVE, PASS, Comparison, of_items, of_mean, verdict
from pipeline.report.sources import Doc, interval, is_number

NOT_MEASURED = "NOT MEASURED"
BLOCKING = ("critical", "supporting")


class Docs(NamedTuple):
    """The files that one cell is judged by."""

    evaluation: Doc
    bench: Doc
    quantize: Doc
    lint: Doc
    model: Doc


class Check(NamedTuple):
    """One line of the policy applied to one cell.

    kind: lint, canary, tasks, fidelity, speed or limits. unit: of `value` and `limit`, as text. comparison: the
    statistics behind it, in the unit that `show` turns into people's; None for a check that is only passed or not.
    available: items that there are to ask, None where nothing says so.
    """

    kind: str
    tier: str
    value: float | None
    limit: str
    unit: str
    comparison: Comparison | None = None
    passed: bool | None = None
    reason: str = ""
    scale: str = "plain"
    available: int | None = None


def checks(docs: Docs, policy: Policy, floors: Iterable[Floor] = ()) -> dict[str, Check]:
    """Return every check of the policy that applies to a cell, by name; `floors` are those that hold on its target."""
    found: dict[str, Check] = {"lint": _flag("lint", "critical", docs.lint, "passed")}
    if policy.quality.canary:
        found["canary"] = _flag("canary", policy.quality.canary.tier, docs.evaluation, "canary", "passed")
    found |= dict(_tasks(docs.evaluation, policy))
    found |= dict(_fidelity(docs.evaluation, policy))
    found |= dict(_answers(docs.evaluation, policy))
    found |= {floor.name: _speed(docs.bench, floor, policy) for floor in floors}
    return found | dict(_limits(docs, policy))


def _flag(kind: str, tier: str, doc: Doc, *keys: str) -> Check:
    value = doc.raw(*keys)
    if isinstance(value, bool):
        return Check(kind, tier, None, "passed", "", passed=value, reason="passed" if value else "failed")
    return Check(kind, tier, None, "passed", "", reason=doc.problem or f"{doc.path} has no {'.'.join(keys)}")


def _tasks(doc: Doc, policy: Policy) -> Iterator[tuple[str, Check]]:
    """Tasks with a margin that this run's tier includes; one that the run left out for its tier is not judged."""
    for name, rule in policy.tasks.items():
        entry = doc.mapping("tasks", name)
        limit = f"at most {rule.margin_pp:g} lost"
        if not entry:
            if doc.problem:
                yield name, Check("tasks", rule.tier, None, limit, "pp", reason=doc.problem)
            continue
        comparison = _of_task(entry, rule.margin_pp / 100, policy)
        delta = entry.get("delta_pp")
        reason = "" if comparison else f"{doc.path} has no flips or error of {name}"
        of = Doc(doc.path, entry).raw("chosen", "of")
        yield name, Check("tasks", rule.tier, delta, limit, "pp", comparison, reason=reason, scale="accuracy",
                          available=of if isinstance(of, int) else None)  # fmt: skip


def _of_task(entry: dict[str, Any], margin: float, policy: Policy) -> Comparison | None:
    n, worse, better = (_number(entry.get(k)) for k in ("n", "flips_right_to_wrong", "flips_wrong_to_right"))
    if n is None or n < 1:
        return None
    if entry.get("binary", True):
        if worse is None or better is None:
            return None
        return of_items(int(n), int(worse), int(better), margin, policy.alpha, policy.power)
    delta, se = _number(entry.get("delta_pp")), _number(entry.get("delta_pp_se"))
    if delta is None or se is None:
        return None
    return of_mean(Estimate(-delta / 100, se / 100, int(n)), margin, "items", policy.alpha, policy.power)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and is_number(value) else None


def _fidelity(doc: Doc, policy: Policy) -> Iterator[tuple[str, Check]]:
    def estimate(value: float | None, se: str) -> Estimate | None:
        spread, windows = doc.raw("fidelity", se), doc.raw("fidelity", "windows")
        if value is None or not (is_number(spread) and is_number(windows)):
            return None
        return Estimate(value, spread, int(windows))

    def check(key: str, tier: str, limit: str, margin: float, found: Estimate | None, unit: str, scale: str) -> Check:
        value = doc.raw("fidelity", key)
        comparison = of_mean(found, margin, "windows", policy.alpha, policy.power) if found else None
        reason = "" if comparison else doc.problem or f"{doc.path} has no {key} with an error over 8 windows or more"
        shown = value if is_number(value) else None
        return Check("fidelity", tier, shown, limit, unit, comparison, reason=reason, scale=scale)

    rules = policy.quality
    ratio, kl, top1 = (doc.raw("fidelity", k) for k in ("perplexity_ratio", "kl_mean", "top1_agreement_pct"))
    if most := rules.perplexity_ratio:
        found = estimate(math.log(ratio) if is_number(ratio) and ratio > 0 else None, "log_perplexity_ratio_se")
        limit = f"at most {most.max:g}"
        yield "perplexity_ratio", check("perplexity_ratio", most.tier, limit, math.log(most.max), found, "x", "log")
    if rule := rules.kl_mean:
        found = estimate(kl if is_number(kl) else None, "kl_mean_se")
        yield "kl_mean", check("kl_mean", rule.tier, f"at most {rule.max:g}", rule.max, found, "nats", "plain")
    if share := rules.top1_agreement_pct:
        found = estimate(100 - top1 if is_number(top1) else None, "top1_agreement_pct_se")
        limit = f"at least {share.min:g}"
        yield "top1_agreement_pct", check("top1_agreement_pct", share.tier, limit, 100 - share.min, found, "%", "left")


def _answers(doc: Doc, policy: Policy) -> Iterator[tuple[str, Check]]:
    """Lengths and faults of the canary's answers and of every task that generates."""
    sources = {"canary": ("canary", doc.mapping("canary", "lengths"))}
    for name, entry in doc.mapping("tasks").items():
        if isinstance(entry, dict) and isinstance(entry.get("answers"), dict):
            sources[str(name)] = ("tasks", entry["answers"])
    for name, (kind, entry) in sources.items():
        missing = doc.problem or f"{doc.path} has no lengths of the answers of {name}"
        if rule := policy.quality.length_ratio:
            limit = f"{rule.min:g} to {rule.max:g}"
            value, se = _number(entry.get("length_ratio")), _number(entry.get("length_log_ratio_se"))
            test = None
            both, asked = _number(entry.get("both_cut")) or 0, _number(entry.get("answers")) or 0
            if 2 * both > asked:
                why = f"not judged: {both:g} of {asked:g} pairs of answers were cut at the limit"
                yield f"length_ratio {name}", Check(kind, "advisory", value, limit, "x", reason=why)
                continue
            if value and se is not None:
                found = Estimate(math.log(value), se, int(entry["answers"]))
                test = _both_sides(found, math.log(rule.min), math.log(rule.max), policy)
            reason = "" if test else missing
            yield f"length_ratio {name}", Check(kind, rule.tier, value, limit, "x", test, reason=reason, scale="log")
        if broken := policy.quality.broken_answers_pp:
            more = _broken_pp(entry)
            passed = None if more is None else more <= broken.max
            limit = f"at most {broken.max:g} more"
            reason = missing if more is None else "as counted"
            yield f"broken_answers {name}", Check(kind, broken.tier, more, limit, "pp", passed=passed, reason=reason)


def _broken_pp(entry: dict[str, Any]) -> float | None:
    """Return by how many points more answers are empty, repeated or unparsable than in the baseline."""
    before = entry.get("baseline")
    if not isinstance(before, dict) or not entry.get("answers") or not before.get("answers"):
        return None
    keys = ("empty", "repeated", "unparsable")
    shares = [sum(side.get(k, 0) for k in keys) / side["answers"] for side in (entry, before)]
    return float(100 * (shares[0] - shares[1]))


def _both_sides(found: Estimate, low: float, high: float, policy: Policy) -> Comparison | None:
    """Test that a value lies between two limits (two one-sided tests); the nearer side is the one that is shown."""
    above = of_mean(found, high, "answers", policy.alpha, policy.power)
    below = of_mean(found._replace(value=-found.value), -low, "answers", policy.alpha, policy.power)
    if above is None or below is None:
        return None
    worst = above if above.p_pass >= below.p_pass else below
    return replace(worst, p_fail=min(1.0, 2 * min(above.p_fail, below.p_fail)))


def _speed(doc: Doc, floor: Floor, policy: Policy) -> Check:
    limit = f"at least {floor.min:g}" if floor.min else f"at most {floor.max:g}"
    points = [p for p in doc.items("workloads", floor.workload, "points") if isinstance(p, dict)]
    point = Doc(doc.path, next((p for p in points if p.get("concurrency") == floor.concurrency), {}))
    ratio, span = point.raw("ratio", floor.metric), interval(point.raw("ratio_ci95", floor.metric))
    clean = all(
        point.raw(s, "errors") == 0 and point.raw(s, "output_tokens_ok") is True for s in ("candidate", "baseline")
    )
    if not is_number(ratio) or ratio <= 0 or not span or span[0] <= 0:
        reason = doc.problem or f"{doc.path} has no {floor.name} ratio with an interval"
        return Check("speed", floor.tier, None, limit, "x", reason=reason)
    if not clean:
        reason = f"{doc.path}: {floor.name} has request errors or wrong output lengths"
        return Check("speed", floor.tier, None, limit, "x", reason=reason)
    counted = [point.raw("candidate", "steady", "requests"), point.raw("candidate", "requests"), point.raw("requests")]
    requests = next((int(n) for n in map(_number, counted) if n), 2)
    se = (math.log(span[1]) - math.log(span[0])) / (2 * 1.96)
    sign = -1.0 if floor.min else 1.0
    found = Estimate(sign * math.log(ratio), se, requests)
    margin = sign * math.log(floor.min or floor.max or 1.0)
    comparison = of_mean(found, margin, "requests", policy.alpha, policy.power)
    reason = "" if comparison else f"{requests} requests in the steady window, fewer than 8"
    legs = max(1, len(point.items("candidate", "repeats", "output_tok_s")))
    in_legs = _in_legs(comparison, legs) if comparison else None
    return Check(
        "speed", floor.tier, ratio, limit, "x", in_legs, reason=reason, scale="log-min" if floor.min else "log"
    )


def _in_legs(test: Comparison, legs: int) -> Comparison:
    """Count a timing in legs: its spread is one of legs, so more requests in a leg would not narrow it."""

    def scaled(needed: int | None) -> int | None:
        return None if needed is None else max(1, math.ceil(legs * needed / test.items))

    return replace(
        test,
        items=legs,
        item="leg" if legs == 1 else "legs",
        needed=scaled(test.needed),
        needed_as_seen=scaled(test.needed_as_seen),
    )


def _limits(docs: Docs, policy: Policy) -> Iterator[tuple[str, Check]]:
    weights, source = docs.quantize.raw("weight_bytes"), docs.quantize.raw("source_weight_bytes")
    if docs.quantize.problem and is_number(docs.model.raw("weight_bytes")):  # the baseline is the source
        weights = source = docs.model.raw("weight_bytes")
    share = weights / source if is_number(weights) and is_number(source) and source else None
    gb = weights / 1e9 if is_number(weights) else None
    served = docs.evaluation
    memory = _number(served.raw("server", "memory_gib")) or _server_memory_gib(docs.bench)
    values = {
        "weights_over_source": (share, "x", docs.quantize),
        "weight_gb": (gb, "GB", docs.quantize),
        "server_memory_gib": (memory, "GiB", served),
        "kv_cache_tokens": (served.raw("server", "kv_cache_tokens"), "tokens", served),
    }
    for name, (value, unit, doc) in values.items():
        rule = getattr(policy.limits, name)
        if rule is None:
            continue
        low = isinstance(rule, AtLeast)
        limit = f"at least {rule.min:g}" if isinstance(rule, AtLeast) else f"at most {rule.max:g}"
        if not is_number(value):
            yield name, Check("limits", rule.tier, None, limit, unit, reason=doc.problem or f"{doc.path} has no {name}")
            continue
        passed = value >= rule.min if low else value <= rule.max
        yield name, Check("limits", rule.tier, value, limit, unit, passed=passed, reason="as recorded")


def _server_memory_gib(bench: Doc) -> float | None:
    """Return the most memory the candidate's server had while it was timed, from the legs of bench.json."""
    legs = [
        leg for load in bench.mapping("workloads").values() if isinstance(load, dict) for leg in load.get("legs", [])
    ]
    seen = [_number((leg.get("server_rss_mib") or {}).get("max")) for leg in legs if leg.get("side") == "B"]
    return max((mib for mib in seen if mib), default=0.0) / 1024 or None


def judge(found: dict[str, Check], policy: Policy) -> dict[str, dict[str, Any]]:
    """Give each check its verdict; Holm's correction runs over the statistical checks that can fail the gate."""
    blocking = {n: c.comparison.p_fail for n, c in found.items() if c.comparison and c.tier in BLOCKING}
    corrected = holm(blocking)
    judged: dict[str, dict[str, Any]] = {}
    for name, check in found.items():
        row: dict[str, Any] = {"kind": check.kind, "tier": check.tier, "value": check.value, "unit": check.unit}
        row |= {"limit": check.limit, "reason": check.reason}
        if check.comparison:
            p_fail = corrected.get(name, check.comparison.p_fail)
            row["verdict"] = verdict(check.comparison, p_fail, policy.alpha)
            row |= statistics(check, p_fail, row["verdict"])
        elif check.passed is not None:
            row["verdict"] = PASS if check.passed else FAIL
        else:
            row["verdict"] = NOT_MEASURED
        judged[name] = row
    return judged


def statistics(check: Check, p_fail: float, said: str) -> dict[str, Any]:
    """Return the numbers behind a verdict in people's units: pp for accuracy, % for a ratio, else as measured."""
    test = check.comparison
    assert test is not None

    def shown(value: float) -> float:
        if check.scale == "log":
            value = 100 * math.expm1(value)
        elif check.scale == "log-min":  # of a ratio that should be high, the loss: 0.58x is 42% slower, not 72% worse
            value = -100 * math.expm1(-value)
        elif check.scale == "accuracy":
            value = 100 * value
        return value + 0.0  # no -0.0

    unit = {"log": "%", "log-min": "%", "accuracy": "pp", "left": "%"}.get(check.scale, check.unit)
    needed = test.needed
    if said == INCONCLUSIVE:
        needed = None if test.needed_as_seen is None else max(test.needed or 0, test.needed_as_seen)
    return {
        "damage": shown(test.damage),
        "damage_bound": shown(test.bound),
        "margin": shown(test.margin),
        "smallest_damage_seen": shown(test.detectable),
        "fails_from": shown(test.fails_from),
        "damage_unit": unit,
        "items": test.items,
        "item": test.item,
        "items_needed": test.needed,
        "items_needed_as_seen": needed,
        "items_available": check.available,
        "p_pass": test.p_pass,
        "p_fail_holm": p_fail,
    }

"""The recommendation for one model, target and objective: winner, runner-up, Pareto set, what would change it. Pure.

A cell competes when it is served there, passes the quality policy and meets the objective. The baseline passes the
policy by definition when it is sound. Cells of all runtimes of the target compete in one table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.choice.candidates import NO_PRICE, At, Candidate, team_facts
from pipeline.choice.missing import missing
from pipeline.choice.objective import Slo
from pipeline.evidence.verdicts import FAIL, PASS

AIMS = ("throughput", "latency", "cost", "memory")
Row = tuple[Candidate, At]
# What each aim ranks by: value, whether more is better, how it is called, and how a value is said.
RANKS: dict[str, tuple[Callable[[Row], float | None], bool, str, str]] = {
    "throughput": (
        lambda r: r[1].point.tok_s if r[1].point else None, True, "output tokens/s at the operating point",
        "{:,.1f} output tokens/s",
    ),
    "latency": (lambda r: r[1].e2e_ms, False, "median end-to-end ms at the lowest load", "{:,.1f} ms end to end"),
    # On one target the cost is the price over throughput, so without a price the order is the same.
    "cost": (
        lambda r: r[1].point.tok_s if r[1].point else None, True, "USD per million output tokens",
        "{:,.1f} output tokens/s",
    ),
    "memory": (lambda r: r[0].weight_bytes, False, "bytes of weights", "{:,.0f} bytes of weights"),
}  # fmt: skip


def recommend(cells: list[Candidate], slo_name: str, slo: Slo, aim: str) -> dict[str, Any]:
    """Return the recommendation as one JSON-ready dict; `decided` is False where no cell is proven."""
    rows = [(cell, cell.at(slo)) for cell in cells]
    value, more, said, _ = RANKS[aim]
    ranked = sorted((r for r in rows if _proven(r) and value(r) is not None), key=lambda r: _key(value(r), more))
    winner = ranked[0] if ranked else None
    runner = ranked[1] if len(ranked) > 1 else None
    return {
        "model": cells[0].cell.split(".")[0] if cells else None,
        "target": cells[0].target if cells else None,
        "slo": slo_name,
        "objective": slo.words(),
        "objective_source": slo.source,
        "aim": aim,
        "ranked_by": said,
        "decided": winner is not None,
        "winner": winner[0].cell if winner else None,
        "runner_up": runner[0].cell if runner else None,
        "reasons": _reasons(winner, runner, rows, aim),
        "would_change": _would_change(winner, runner, rows, aim, slo),
        "missing": missing(rows, slo),
        "pareto": [r[0].cell for r in pareto(rows)],
        "table": [_row(r, value(r)) for r in [*ranked, *(r for r in rows if r not in ranked)]],
        "team": {c.runtime: team_facts().get(c.runtime, {"source": "unknown"}) for c in cells},
    }


def _key(number: float | None, more: bool) -> float:
    return -(number or 0.0) if more else (number or 0.0)


def _proven(row: Row) -> bool:
    cell, at = row
    return cell.served and cell.quality == PASS and at.point is not None


def pareto(rows: list[Row]) -> list[Row]:
    """Return the rows that no other beats in tokens/s, weights and perplexity at once; failed and untimed ones aside.

    A row beats another when it is at least as good in all three and better in one.
    """
    known = []
    for row in rows:
        cell, at = row
        numbers = (at.point.tok_s if at.point else None, cell.weight_bytes, cell.perplexity_ratio)
        if cell.served and cell.quality != FAIL and None not in numbers:
            known.append((row, (-(numbers[0] or 0.0), numbers[1] or 0.0, numbers[2] or 0.0)))
    return [
        row
        for row, mine in known
        if not any(all(a <= b for a, b in zip(o, mine, strict=True)) and o != mine for _, o in known)
    ]


def _said(row: Row, aim: str) -> str:
    """Return a row's value in the words of an aim; for cost the cost, and the throughput it comes from."""
    value, _, _, form = RANKS[aim]
    number = value(row)
    text = "not measured" if number is None else form.format(number)
    return f"{row[1].cost} at {text}" if aim == "cost" else text


def _reasons(winner: Row | None, runner: Row | None, rows: list[Row], aim: str) -> list[str]:
    if winner is None:
        served = sum(c.served for c, _ in rows)
        return [f"of {len(rows)} cells {served} can be served here; none both passes the quality policy and is shown "
                "to meet the objective"]  # fmt: skip
    cell, at = winner
    found = [_said(winner, aim)]
    if at.point:
        found[0] += f" under {at.workload} at {at.point.name} ({at.why})"
        found += [f"mark: {m}" for m in at.point.marks]
    if cell.is_baseline:
        found.append("this is the baseline: no quantized cell is both proven and better by this aim")
    if runner is not None:
        found.append(
            f"runner-up {runner[0].recipe} on {runner[0].runtime}, {_said(runner, aim)}; {_apart(winner, runner)}"
        )
    if cell.startup_s is not None:
        found.append(f"its server was ready {cell.startup_s:.0f} s after its start")
    return found


def _apart(a: Row, b: Row) -> str:
    one, two = a[1].point, b[1].point
    same = one and two and (one.workload, one.name) == (two.workload, two.name) and a[0].runtime == b[0].runtime
    if not one or not two or not same or not one.band or not two.band:
        return "no common load with intervals, so the distance is not judged"
    if one.band[0] > two.band[1] or two.band[0] > one.band[1]:
        return "their intervals over the same baseline do not overlap"
    return "their intervals over the same baseline overlap: the order of the two is not settled"


def _would_change(winner: Row | None, runner: Row | None, rows: list[Row], aim: str, slo: Slo) -> list[str]:
    """Facts that would turn the answer: cells that lead but are not proven or failed, an unsettled order, a load."""
    value, more, *_ = RANKS[aim]
    found: list[str] = []
    best = value(winner) if winner else None
    for row in sorted(rows, key=lambda r: _key(value(r), more)):
        cell, at = row
        mine = value(row)
        leads = mine is not None and (best is None or _key(mine, more) < _key(best, more))
        if row is winner or _proven(row) or not cell.served or not leads:
            continue
        # Without a winner all of them are ahead of nothing: only the best leads.
        verb = "has" if winner is None and found else "leads with"
        lead = f"{cell.recipe} on {cell.runtime} {verb} {_said(row, aim)}"
        if cell.quality == "NOT MEASURED":
            why = "; ".join(cell.quality_why) or "no evaluation"
            found.append(f"{lead}; quality not measured ({why})")
        elif cell.quality != PASS:
            found.append(f"{lead} but is {cell.quality}: {'; '.join(cell.quality_why) or 'quality not measured'}")
        else:
            found.append(f"{lead} but does not meet it: {at.why}")
    if winner and runner and "not settled" in _apart(winner, runner):
        found.append("a longer run in A B B A order may put the runner-up first")
    if winner and winner[1].point and winner[1].point.loop == "closed" and slo.limits:
        found.append("an open-loop (Poisson) run shows queueing that the closed loop hides; it can lower the load")
    return found


def _row(row: Row, value: float | None) -> dict[str, Any]:
    cell, at = row
    point = at.point
    return {
        "cell": cell.cell,
        "recipe": cell.recipe,
        "runtime": cell.runtime,
        "is_baseline": cell.is_baseline,
        "served": cell.served,
        "why_not_served": None if cell.served else cell.why_not_served,
        "quality": cell.quality,
        "quality_why": cell.quality_why,
        "meets_objective": at.met,
        "objective_why": at.why,
        "workload": at.workload,
        "operating_point": point.name if point else None,
        "output_tok_s": point.tok_s if point else None,
        "marks": point.marks if point else [],
        "speedup": point.ratio if point else None,
        "speedup_ci95": point.band if point else None,
        "goodput_s": at.goodput_s,
        "knee": at.knee,
        "stops_being_faster": at.stops_being_faster,
        "usd_per_m_output_tokens": at.usd_per_m_tokens,
        "cost": at.cost if at.workload else NO_PRICE if cell.device.price_usd_per_h is None else at.why,
        "weight_bytes": cell.weight_bytes,
        "perplexity_ratio": cell.perplexity_ratio,
        "startup_s": cell.startup_s,
        "measured": cell.has_eval or bool(cell.points),
        "ranked_value": value,
    }

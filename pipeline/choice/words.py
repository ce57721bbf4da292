"""A recommendation as text for a terminal."""

from __future__ import annotations

from typing import Any

from pipeline.shapes import SPEED_ONLY

VERDICTS = {None: "open", True: "yes", False: "no"}


def text(answer: dict[str, Any]) -> str:
    """Return one recommendation in full: reasons, what is missing, the table, the Pareto set and the team's facts."""
    lines = [f"{answer['model']} on {answer['target']}, {answer['slo']} ({answer['objective']}), for {answer['aim']}"]
    lines.append(f"objective from: {answer['objective_source']}")
    lines.append(f"recommendation: {answer['winner'] or 'no cell is proven yet'}")
    lines.append(f"runner-up: {answer['runner_up'] or 'none is proven'}")
    lines += [f"because: {reason}" for reason in answer["reasons"]]
    lines += [f"would change it: {change}" for change in answer["would_change"]]
    lines += [f"not measured: {m['what']}\n  to decide: {m['command']}" for m in answer["missing"]]
    lines.append(
        f"Pareto set (tokens/s, weights, perplexity): {', '.join(answer['pareto']) or 'no cell has all three'}"
    )
    lines += ["", *_table(answer["table"]), ""]
    for runtime, facts in answer["team"].items():
        lines.append(f"{runtime}:")
        lines += [f"  {key.replace('_', ' ')}: {value}" for key, value in facts.items()]
    return "\n".join(lines)


def overview(answers: list[dict[str, Any]]) -> str:
    """Return all recommendations, one line an objective under each target, then what would decide the open ones."""
    lines: list[str] = []
    for model, target in dict.fromkeys((a["model"], a["target"]) for a in answers):
        mine = [a for a in answers if (a["model"], a["target"]) == (model, target)]
        lines += ["", f"{model} on {target}, for {mine[0]['aim']}"]
        width = max(len(a["slo"]) for a in mine)
        for answer in mine:
            lead = answer["winner"] or "no cell is proven yet"
            why = answer["would_change"] if not answer["winner"] else answer["reasons"][:1]
            lines.append(f"  {answer['slo']:{width}}  {lead}" + (f" ({why[0]})" if why else ""))
        wanted: dict[str, list[str]] = {}
        for answer in mine:
            for item in answer["missing"]:
                wanted.setdefault(f"{item['what']}\n      {item['command']}", []).append(answer["slo"])
        if wanted:
            lines.append("  to decide:")
        for what, slos in wanted.items():
            named = "all objectives" if len(slos) == len(mine) else ", ".join(slos)
            lines.append(f"    [{named}] {what}")
    return "\n".join(lines).strip()


def _table(rows: list[dict[str, Any]]) -> list[str]:
    head = ("recipe", "runtime", "quality", "meets", "load", "tok/s", "speedup", "goodput/s", "MB", "ppl ratio", "cost")
    cells = [head, *(_line(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    return ["  " + "  ".join(text.ljust(w) for text, w in zip(line, widths, strict=True)).rstrip() for line in cells]


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    if not row["served"]:
        return (row["recipe"], row["runtime"], "not served", *[""] * 8)
    speed = "-" if row["speedup"] is None else f"{row['speedup']:.2f}x"
    if row["speedup"] is not None and row["speedup_ci95"]:
        speed += f" [{row['speedup_ci95'][0]:.2f}, {row['speedup_ci95'][1]:.2f}]"
    return (
        row["recipe"], row["runtime"], row["quality"], VERDICTS[row["meets_objective"]], row["operating_point"] or "-",
        _number(row["output_tok_s"], ",.1f"), speed, _number(row["goodput_s"], ",.2f"),
        _number(row["weight_bytes"], ",.0f", 1e-6), _perplexity(row), row["cost"],
    )  # fmt: skip


def _number(value: float | None, spec: str, factor: float = 1.0) -> str:
    return "-" if value is None else format(value * factor, spec)


def _perplexity(row: dict[str, Any]) -> str:
    """Return the ratio; the baseline is what it is taken over, and random weights are never judged."""
    if SPEED_ONLY in row["quality_why"]:
        return "not judged (random weights)"
    return "reference" if row["is_baseline"] else _number(row["perplexity_ratio"], ".3f")

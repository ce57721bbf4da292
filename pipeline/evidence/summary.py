"""The gate's verdict as Markdown for a pull-request comment."""

from __future__ import annotations

from typing import Any

from pipeline.evidence.verdicts import FAIL, INCONCLUSIVE, PASS

MARKS = {PASS: "✅", FAIL: "❌", INCONCLUSIVE: "❔"}
SAID = {
    PASS: "Every check that the policy calls critical is shown to hold.",
    FAIL: "Damage beyond the policy is shown.",
    INCONCLUSIVE: "Neither damage nor its absence is shown. This is not a pass.",
}


def cell_text(value: Any) -> str:
    """Return text that cannot end a table cell or start markup."""
    text = " ".join(str(value).split())
    for char, safe in (("\\", "\\\\"), ("|", "\\|"), ("`", "\\`"), ("<", "&lt;"), ("@", "&#64;")):
        text = text.replace(char, safe)
    return text


def amount(value: float | None, unit: str, sign: bool = False) -> str:
    """Return a number with its unit in three digits: '+1.25 pp', '0.021 nats', 'n/a'."""
    if value is None:
        return "n/a"
    shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    text = f"+{shown}" if sign and value > 0 else shown
    return f"{text}{unit}" if unit in ("%", "x") else f"{text} {unit}".rstrip()


def evidence(check: dict[str, Any]) -> tuple[str, str, str]:
    """Return a check's damage and bound, the smallest damage its sample sees, and the items it has and needs."""
    if "damage" not in check:
        return check["reason"], "", ""
    unit = check["damage_unit"]
    sample = f"{check['items']:,} {check['item']}"
    if check["verdict"] != PASS:
        sample += f", {needs(check, 'needs {:,}', 'no number is enough')}"
    return (
        f"{amount(check['damage'], unit, True)}, bound {amount(check['damage_bound'], unit, True)}",
        amount(check["smallest_damage_seen"], unit),
        sample,
    )


def needs(check: dict[str, Any], some: str, none: str) -> str:
    """Say how many items would settle a check, and where there are not so many; `some` has a place for the number."""
    needed, available = check["items_needed_as_seen"], check.get("items_available")
    if not needed:
        return none
    all_there_is = f" ({available:,} {check['item']} is all there is)" if available and needed > available else ""
    return some.format(needed) + all_there_is


def markdown(record: dict[str, Any]) -> str:
    """Return the whole comment: the verdict first, the deciding cells' checks, the other cells in one line each."""
    verdict = record["verdict"]
    lines = [f"## {MARKS[verdict]} quantpress gate: {verdict}", "", SAID[verdict], ""]
    for name in record["decided_by"]:
        lines += _cell(name, record["cells"][name])
    others = [(n, c) for n, c in record["cells"].items() if n not in record["decided_by"]]
    if others:
        lines += ["<details><summary>Other cells (they do not decide)</summary>", "", "| cell | verdict | why |"]
        lines += ["|---|---|---|"]
        for name, cell in others:
            why = cell_text("; ".join(cell["reasons"][:2]) or ("the baseline" if cell["is_baseline"] else ""))
            lines.append(f"| {name} | {MARKS[cell['verdict']]} {cell['verdict']} | {why} |")
        lines += ["", "</details>", ""]
    lines.append(
        f"One-sided level {record['alpha']:.0%}, power {record['power']:.0%}, "
        f"policy {record['policy_sha256'][:12]}. PASS and FAIL are shown by a bound, never by want of a difference."
    )
    return "\n".join(lines) + "\n"


def _cell(name: str, cell: dict[str, Any]) -> list[str]:
    lines = [f"### {MARKS[cell['verdict']]} {name}: {cell['verdict']}", ""]
    lines += [f"- {cell_text(reason)}" for reason in cell["reasons"]]
    lines += [f"- note: {cell_text(note)}" for note in cell.get("notes", [])]
    if not cell["checks"]:
        return [*lines, ""]
    lines += ["", "| check | tier | verdict | value | limit | damage and its bound | sees from | sample |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for check_name, check in cell["checks"].items():
        damage, seen, items = map(cell_text, evidence(check))
        value = amount(check["value"], check["unit"])
        mark = MARKS.get(check["verdict"], "❔")
        lines.append(
            f"| {check_name} | {check['tier']} | {mark} {check['verdict']} | {value} | {check['limit']} "
            f"| {damage} | {seen} | {items} |"
        )
    return [*lines, ""]

"""The gate's verdict on each cell, as the report shows it: the word first, the evidence for who asks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.evidence.summary import amount, evidence
from pipeline.evidence.verdicts import FAIL, INCONCLUSIVE, PASS
from pipeline.report.sources import Doc, is_number, plain, read_doc
from pipeline.report.text import and_list

GATE = "artifacts/gate.json"
NOT_MEASURED = "required and not measured: "
WORDS = {PASS: "good", FAIL: "bad", INCONCLUSIVE: "dim"}


def cell_verdict(root: Path, cell: str, evaluation: Doc) -> dict[str, Any]:
    """Return what artifacts/gate.json says of a cell, as text.

    Keys: verdict (None where not judged), state, style, ships, sees (the smallest damage that its most telling critical
    check could have seen), open (what is only not measured), why, notes, checks (rows of text), numbers (quality
    numbers beside the verdicts).
    """
    gate = read_doc(root, GATE, "quantpress.gate/1")
    entry = gate.mapping("cells", cell)
    verdict = entry.get("verdict")
    if verdict not in WORDS:
        reason = gate.problem or f"{GATE} does not judge this cell"
        return {"verdict": None, "state": f"not judged ({reason})", "style": "none why", "ships": False, "sees": "",
                "open": "", "why": [], "notes": [], "checks": [], "numbers": _numbers(evaluation)}  # fmt: skip
    return {
        "verdict": verdict,
        "state": verdict,
        "style": WORDS[verdict],
        "ships": entry.get("ship") is True,
        "sees": _sees(entry),
        "open": _open(verdict, [plain(x) for x in entry.get("reasons", [])]),
        "why": [plain(x) for x in entry.get("reasons", [])],
        "notes": [plain(x) for x in entry.get("notes", [])],
        "checks": [_row(str(name), check) for name, check in entry.get("checks", {}).items()],
        "numbers": _numbers(evaluation),
    }


def _row(name: str, check: dict[str, Any]) -> dict[str, str]:
    damage, seen, sample = evidence(check)
    verdict = str(check["verdict"])
    value = amount(check["value"], check["unit"]) if is_number(check["value"]) else ""
    return {
        "name": name, "tier": plain(check["tier"]), "verdict": verdict.lower() if verdict not in WORDS else verdict,
        "style": WORDS.get(verdict, "none"), "value": value, "limit": plain(check["limit"]),
        "damage": plain(damage), "seen": seen, "sample": sample,
    }  # fmt: skip


def _sees(entry: dict[str, Any]) -> str:
    """Return the smallest damage that the widest critical task could have seen, e.g. 'sees 3.0 pp of facts'."""
    rows = [
        (check["smallest_damage_seen"], name)
        for name, check in entry.get("checks", {}).items()
        if check.get("kind") == "tasks" and check["tier"] == "critical" and is_number(check.get("smallest_damage_seen"))
    ]
    return f"sees {max(rows)[0]:.1f} pp of {max(rows)[1]}" if rows else ""


def _open(verdict: str, why: list[str]) -> str:
    """Return what is missing of a cell that is INCONCLUSIVE for nothing else; empty where something is not settled."""
    if verdict != INCONCLUSIVE or not why or not all(line.startswith(NOT_MEASURED) for line in why):
        return ""
    return f"passes all that was measured; not measured: {and_list([x.removeprefix(NOT_MEASURED) for x in why])}"


def _numbers(evaluation: Doc) -> list[tuple[str, str]]:
    """Return the quality numbers that the tables leave out, those that there are."""
    found = []
    for name, task in evaluation.mapping("tasks").items():
        if not isinstance(task, dict):
            continue
        for key, label, unit in (
            ("recovery_pct", "recovery", "%"),
            ("mcnemar_mid_p", "McNemar mid-p", ""),
            ("flips_pct", "flips", "%"),
            ("truncated_prompts", "prompts cut to fit", ""),
        ):
            if is_number(task.get(key)):
                found.append((f"{name}, {label}", amount(task[key], unit)))
        if isinstance(task.get("answers"), dict):
            found += _answers(str(name), task["answers"])
    for key, label in (("kl_median", "KL median"), ("kl_p99", "KL p99"), ("kl_max", "KL max")):
        value = evaluation.raw("fidelity", key)
        if is_number(value):
            found.append((label, amount(value, "nats")))
    return found + _answers("canary", evaluation.mapping("canary", "lengths"))


def _answers(name: str, entry: dict[str, Any]) -> list[tuple[str, str]]:
    if not entry.get("answers"):
        return []
    counts = ", ".join(f"{entry[k]} {w}" for k, w in (("empty", "empty"), ("repeated", "repeated"),
                       ("unparsable", "unparsable"), ("cut", "cut at the limit")) if k in entry)  # fmt: skip
    rows = [(f"{name}, {entry['answers']} answers", counts)]
    ratio, span = entry.get("length_ratio"), entry.get("length_ratio_ci95")
    if is_number(ratio) and isinstance(span, list):
        text = f"{ratio:.2f}x [{span[0]:.2f}, {span[1]:.2f}], {entry.get('both_cut', 0)} cut on both sides"
        rows.append((f"{name}, length over the baseline's", text))
    return rows


def floor_lines(root: Path, baseline: str | None) -> list[str]:
    """Return what the baseline answered against itself gave, and whether the baseline is sound."""
    gate = read_doc(root, GATE, "quantpress.gate/1")
    entry = gate.mapping("cells", str(baseline))
    if not entry:
        return []
    sound = entry.get("baseline_health") or {}
    bad = [f"{n}: {c['reason']}" for n, c in sound.get("checks", {}).items() if c["verdict"] != PASS]
    state = {PASS: "is sound", FAIL: "is BROKEN, so no fault below is the quantization's alone"}
    text = f"The baseline {state.get(str(sound.get('verdict')), 'could not be judged')}"
    lines = [f"{text} ({'; '.join(map(plain, bad))})." if bad else f"{text}."]
    floor = entry.get("noise_floor")
    if not isinstance(floor, dict):
        return [*lines, "Noise floor of quality: not measured (evaluation.noise_floor is off, or an older evaluation)."]
    parts = [
        f"{t['flips_right_to_wrong'] + t['flips_wrong_to_right']} of {t['n']} {plain(name)} items flipped"
        for name, t in floor.get("tasks", {}).items()
    ]
    if isinstance(floor.get("fidelity"), dict) and is_number(floor["fidelity"].get("kl_mean")):
        parts.append(f"KL mean {amount(floor['fidelity']['kl_mean'], 'nats')}")
    if isinstance(floor.get("canary"), dict):
        canary = floor["canary"]
        parts.append(f"{canary.get('answers_changed')} of {canary.get('prompts')} canary answers changed")
    return [*lines, f"The baseline answered twice (noise floor of quality): {'; '.join(parts)}."]


def verdict_line(group: dict[str, Any]) -> list[dict[str, str]]:
    """Return the answer box's line on the policy; none where no cell was judged."""
    judged = [c for c in group["cells"] if c["gate"]["verdict"] and not c["is_baseline"]]
    if not judged:
        return []
    parts = []
    for word in (PASS, INCONCLUSIVE, FAIL):
        names = [c["recipe"] for c in judged if c["gate"]["verdict"] == word]
        if names:
            parts.append(f"{and_list(names)} {word}")
    text = "By policy.yaml; INCONCLUSIVE is not a pass."
    for cell in judged:
        if cell["gate"]["ships"]:
            why = cell["gate"]["why"]
            told = "; ".join(why[:2]) + (f"; and {len(why) - 2} more" if len(why) > 2 else "")
            text += f" {cell['recipe']} decides the gate{': ' + told if told else ''}."
    text += "".join(f" {cell['recipe']} {cell['gate']['open']}." for cell in judged if cell["gate"]["open"])
    return [{"topic": "Verdict", "lead": "; ".join(parts), "text": text}]

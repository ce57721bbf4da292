"""What changed between the results of two revisions; refused, with the field, where the two are not alike.

An upgrade of an engine changes its version and lock on purpose. With `upgrade` these may differ, and the new state is
judged like a new precision: the baseline is the same cell at the old revision, paired item by item.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.choice.alike import Difference, host_differences, speed_differences, version_differences
from pipeline.choice.revisions import RESULTS, Revision
from pipeline.choice.upgrade import judge_upgrade
from pipeline.errors import InputError, unknown
from pipeline.evidence.verdicts import FAIL, INCONCLUSIVE

SPEED = ("output_tok_s", "ttft_ms_p50", "tpot_ms_p50", "e2e_ms_p50", "speedup")
FIDELITY = ("perplexity", "perplexity_ratio", "kl_mean", "top1_agreement_pct")


def compare(root: Path, old: str, new: str | None, upgrade: bool = False, cell: str | None = None) -> dict[str, Any]:
    """Return the comparison of every cell that both revisions hold.

    `exit_code`: 0 compared, 1 an upgrade is judged FAIL, 2 something was refused, 4 an upgrade is INCONCLUSIVE.

    Raises:
        InputError: no such revision or cell, or nothing in common.
    """
    before, after = Revision(root, old), Revision(root, new)
    common = [name for name in before.cells() if name in set(after.cells())]
    if cell is not None and cell not in common:
        raise unknown("cell with results in both revisions", cell, common, f"{before} and {after}")
    if not common:
        raise InputError(f"{before} and {after} have no cell with results in common.")
    rows = [_cell(root, name, before, after, upgrade) for name in common if cell in (None, name)]
    verdicts = [row["upgrade"]["verdict"] for row in rows if row.get("upgrade")]
    refused = any(row["speed_refused"] or row["quality_refused"] for row in rows)
    code = 1 if FAIL in verdicts else 2 if refused else 4 if INCONCLUSIVE in verdicts else 0
    return {
        "schema": "quantpress.compare/1", "old": str(before), "new": str(after), "upgrade": upgrade, "cells": rows,
        "exit_code": code,
    }  # fmt: skip


def _cell(root: Path, name: str, before: Revision, after: Revision, upgrade: bool) -> dict[str, Any]:
    benches = [r.read(f"{RESULTS}/{name}/bench.json") for r in (before, after)]
    evals = [r.read(f"{RESULTS}/{name}/eval.json") for r in (before, after)]
    row: dict[str, Any] = {"cell": name, "speed": None, "quality": None, "speed_refused": [], "quality_refused": []}
    allowed = ("version",) if upgrade else ()
    changed: list[Difference] = []
    if benches[0] and benches[1]:
        differ = speed_differences(benches[0], benches[1])
        changed += [d for d in differ if d.kind in allowed]
        row["speed_refused"] = [d._asdict() for d in differ if d.kind not in allowed]
        if not row["speed_refused"]:
            row["speed"] = _numbers(_speed(benches[0]), _speed(benches[1]))
    if evals[0] and evals[1]:
        differ = eval_differences(evals[0], evals[1])
        changed += [d for d in differ if d.kind in allowed]
        row["quality_refused"] = [d._asdict() for d in differ if d.kind not in allowed]
        if not row["quality_refused"]:
            row["quality"] = _numbers(_quality(evals[0]), _quality(evals[1]))
    digests = [(e or b or {}).get("package_digest") for e, b in zip(evals, benches, strict=True)]
    row["weights_changed"] = None if None in digests else digests[0] != digests[1]
    row["changed"] = [d._asdict() for d in dict.fromkeys(changed)]
    if upgrade and not row["quality_refused"] and evals[0] and evals[1]:
        row["upgrade"] = judge_upgrade(root, name, before, after)
    return row


def eval_differences(old: dict[str, Any], new: dict[str, Any]) -> list[Difference]:
    """Return every field for which two eval.json must not be compared: what was asked, of how many, on which engine."""
    found = version_differences(old, new) + [
        d for d in host_differences(old, new) if d.field in ("host.cpu", "host.gpus")
    ]
    if old.get("schema") != new.get("schema"):
        found.append(Difference("definition", "schema", old.get("schema"), new.get("schema")))
    fields = [("fidelity", key) for key in ("top_k", "tokens", "windows")]
    fields += [("tasks", name) for name in sorted(set(old.get("tasks", {})) & set(new.get("tasks", {})))]
    for section, key in fields:
        one, two = ((doc.get(section) or {}).get(key) for doc in (old, new))
        if section == "tasks":
            one, two = ((value or {}).get("n") for value in (one, two))
            key += ".n"
        if one != two:
            found.append(Difference("workload", f"{section}.{key}", one, two))
    one, two = ((doc.get("versions") or {}).get("lm-eval") for doc in (old, new))
    return found if one == two else [*found, Difference("version", "versions.lm-eval", one, two)]


def _speed(bench: dict[str, Any]) -> dict[str, float]:
    return {
        f"{workload} {point} {key}": values[key]
        for workload, points in (bench.get("summary") or {}).items()
        for point, values in points.items()
        for key in SPEED
        if key in values
    }


def _quality(evaluation: dict[str, Any]) -> dict[str, float]:
    fidelity = evaluation.get("fidelity") or {}
    found = {f"fidelity {key}": fidelity[key] for key in FIDELITY if fidelity.get(key) is not None}
    for name, task in (evaluation.get("tasks") or {}).items():
        if task.get("accuracy") is not None:
            found[f"{name} accuracy"] = task["accuracy"]
    return found


def _numbers(old: dict[str, float], new: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {"what": key, "old": old[key], "new": new[key], "ratio": new[key] / old[key] if old[key] else None}
        for key in old
        if key in new
    ]


def text(found: dict[str, Any]) -> str:
    """Return a comparison for a terminal."""
    lines = [f"{found['old']} -> {found['new']}"]
    for row in found["cells"]:
        lines += ["", row["cell"] + (" (other weights)" if row["weights_changed"] else "")]
        lines += [f"  changed: {Difference(**d).words()}" for d in row["changed"]]
        for what in ("quality", "speed"):
            refused = [Difference(**d) for d in row[f"{what}_refused"]]
            lines += [f"  {what} is not compared: {d.words()}" for d in refused]
            if refused and all(d.kind == "version" for d in refused):
                lines.append("  to judge the other version like a new precision: add --upgrade")
            if not row[what] and not refused:
                lines.append(f"  {what}: not measured in both revisions")
            lines += [f"  {_words(number)}" for number in row[what] or []]
        if row.get("upgrade"):
            lines.append(f"  upgrade: {row['upgrade']['verdict']}")
            lines += [f"    {reason}" for reason in row["upgrade"]["reasons"]]
    if any(row["speed"] for row in found["cells"]):
        lines += ["", "Speeds of two revisions are of two runs: drift between them is not in the numbers. `speedup` is",
                  "over each revision's own baseline, timed beside it in the same run."]  # fmt: skip
    return "\n".join(lines)


def _words(number: dict[str, Any]) -> str:
    change = "" if number["ratio"] is None else f"  ({100 * (number['ratio'] - 1):+.1f}%)"
    return f"{number['what']}: {number['old']:.5g} -> {number['new']:.5g}{change}"

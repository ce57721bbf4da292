"""The report's first section: what to ship per target and objective; and the trend over tagged releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.choice.alike import speed_differences
from pipeline.choice.answers import answers, scaling
from pipeline.choice.candidates import NOT_TIMED
from pipeline.choice.compare import eval_differences
from pipeline.choice.revisions import RESULTS, Revision, tags
from pipeline.errors import QuantpressError
from pipeline.evidence.verdicts import FAIL, INCONCLUSIVE, PASS
from pipeline.params import load_params, load_yaml
from pipeline.report.text import and_list


def choice_section(root: Path) -> dict[str, Any]:
    """Return {problem, targets, scaling, trend}; `targets` are groups of answers, those with measurements first.

    Of a group, `idle`: the objectives none of whose workloads was timed there, of which there is nothing to show;
    `outcomes`: the others, those with the same evidence together; `leads`: what would settle the open ones, each once;
    `quality`: which recipes pass and what is open.

    A repository that cannot be read for a recommendation gets the reason as `problem`: the report is still made.
    """
    try:
        found = answers(root)
        params, plan = load_params(root / "params.yaml"), load_yaml(root / "pipeline/plan.yaml", "the plan")
        rows = scaling(root, params, plan)
    except QuantpressError as error:
        return {"problem": str(error).replace(f"{root.resolve()}/", ""), "targets": [], "scaling": [], "trend": []}
    groups = []
    for model, target in dict.fromkeys((a["model"], a["target"]) for a in found):
        mine = [a for a in found if (a["model"], a["target"]) == (model, target)]
        measured = any(row["measured"] for a in mine for row in a["table"])
        groups.append({"model": model, "target": target, "measured": measured, "answers": mine, "decide": decide(mine),
                       "idle": [a["slo"] for a in mine if not _judged(a)], "quality": quality_line(mine),
                       "outcomes": same_outcome([a for a in mine if _judged(a)]),
                       "leads": _leads([a for a in mine if _judged(a) and not a["winner"]])})  # fmt: skip
    groups.sort(key=lambda g: not g["measured"])
    return {"problem": None, "targets": groups, "scaling": rows, "trend": trend(root)}


def _judged(answer: dict[str, Any]) -> bool:
    return any(row["served"] and row["objective_why"] and row["objective_why"] != NOT_TIMED for row in answer["table"])


def quality_line(mine: list[dict[str, Any]]) -> str:
    """Say which cells pass the policy's quality checks, which are open and which fail, and whether speed is open."""
    rows = [row for row in mine[0]["table"] if row["served"] and not row["is_baseline"]]
    parts = []
    for verdict, words in ((PASS, "passed by"), (INCONCLUSIVE, "not settled for"), (FAIL, "failed by")):
        if names := list(dict.fromkeys(row["recipe"] for row in rows if row["quality"] == verdict)):
            parts.append(f"{words} {and_list(names)}")
    if parts and not any(_judged(answer) for answer in mine):
        parts.append("open: speed (nothing was timed here)")
    return "; ".join(parts)


def same_outcome(judged: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Put objectives whose evidence is the same in every row together, in order of the first of them."""
    found: dict[str, list[dict[str, Any]]] = {}
    for answer in judged:
        key = json.dumps([answer[k] for k in ("table", "reasons", "would_change", "pareto")], default=str)
        found.setdefault(key, []).append(answer)
    return list(found.values())


def _leads(unsettled: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return {slos, text}: the first thing that would change the answer to each open objective, each text once."""
    found: dict[str, list[str]] = {}
    for answer in unsettled:
        if answer["would_change"]:
            found.setdefault(answer["would_change"][0], []).append(answer["slo"])
    return [{"slos": slos, "text": text} for text, slos in found.items()]


def objective_lines(choice: dict[str, Any], group: dict[str, Any]) -> list[dict[str, str]]:
    """Return the answer box's line on the objectives whose cells differ: which meet them, and which miss them where.

    An objective without limits is met by every cell, and is left out.
    """
    mine = [g for g in choice["targets"] if (g["model"], g["target"]) == (group["model"], group["target"])]
    parts = []
    for answer in (a for g in mine for a in g["answers"]):
        rows = [r for r in answer["table"] if r["served"] and r["runtime"] == group["runtime"]]
        met = [
            f"{r['recipe']} up to {r['operating_point']}" for r in rows if r["meets_objective"] and r["operating_point"]
        ]
        missed = [f"{r['recipe']} ({r['objective_why']})" for r in rows if r["meets_objective"] is False]
        if missed:
            yes = f"met by {and_list(met)}" if met else "met by none"
            parts.append(f"{answer['slo']} ({answer['objective']}): {yes}; {'; '.join(missed)}.")
    lead = "where cells differ, or none meets it" if parts else ""
    return [{"topic": "Objectives", "lead": lead, "text": " ".join(parts)}] if parts else []


def decide(mine: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return {what, command, slos} of what would decide a target's open answers, each once."""
    found: dict[tuple[str, str], list[str]] = {}
    for answer in mine:
        for item in answer["missing"]:
            found.setdefault((item["what"], item["command"]), []).append(answer["slo"])
    return [{"what": what, "command": command, "slos": slos} for (what, command), slos in found.items()]


def trend(root: Path) -> list[dict[str, Any]]:
    """Return for each cell its numbers at every tag that holds results, oldest first; empty without tags.

    Numbers of a tag that is not alike its predecessor (definitions, host, workload, ...) carry `break`: the field.
    """
    names = tags(root)
    if not names:
        return []
    states = [(name, Revision(root, name)) for name in names] + [("now", Revision(root, None))]
    cells = dict.fromkeys(cell for _, state in states for cell in state.cells())
    found = []
    for cell in cells:
        points: list[dict[str, Any]] = []
        before: tuple[dict[str, Any], dict[str, Any]] | None = None
        for name, state in states:
            bench, evaluation = (state.read(f"{RESULTS}/{cell}/{file}.json") or {} for file in ("bench", "eval"))
            if not bench and not evaluation:
                continue
            points.append(_numbers(name, bench, evaluation) | {"break": _break(before, (bench, evaluation))})
            before = (bench, evaluation)
        if len(points) > 1:
            found.append({"cell": cell, "points": points})
    return found


def _break(before: tuple[dict[str, Any], ...] | None, now: tuple[dict[str, Any], ...]) -> str | None:
    if before is None:
        return None
    differ = speed_differences(before[0], now[0]) if before[0] and now[0] else []
    differ += eval_differences(before[1], now[1]) if before[1] and now[1] else []
    return "; ".join(dict.fromkeys(d.words() for d in differ)) or None


def _numbers(name: str, bench: dict[str, Any], evaluation: dict[str, Any]) -> dict[str, Any]:
    loads = [(w, p, v) for w, points in (bench.get("summary") or {}).items() for p, v in points.items()]
    last = loads[-1] if loads else None
    server = (bench.get("server") or {}).get("candidate") or evaluation.get("server") or {}
    return {
        "at": name,
        "engine": f"{server.get('runtime')} {server.get('version')}",
        "load": f"{last[0]} {last[1]}" if last else None,
        "speedup": last[2].get("speedup") if last else None,
        "output_tok_s": last[2].get("output_tok_s") if last else None,
        "perplexity_ratio": (evaluation.get("fidelity") or {}).get("perplexity_ratio"),
    }

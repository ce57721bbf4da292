"""The report's first section: what to ship per target and objective; and the trend over tagged releases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.choice.alike import speed_differences
from pipeline.choice.answers import answers, scaling
from pipeline.choice.compare import eval_differences
from pipeline.choice.revisions import RESULTS, Revision, tags
from pipeline.errors import QuantpressError
from pipeline.params import load_params, load_yaml


def choice_section(root: Path) -> dict[str, Any]:
    """Return {problem, targets, scaling, trend}; `targets` are groups of answers, those with measurements first.

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
        groups.append({"model": model, "target": target, "measured": measured, "answers": mine, "decide": decide(mine)})
    groups.sort(key=lambda g: not g["measured"])
    return {"problem": None, "targets": groups, "scaling": rows, "trend": trend(root)}


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

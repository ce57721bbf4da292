"""What is still to measure on a target before its answers are settled, each with what to type. Pure."""

from __future__ import annotations

from typing import Any

from pipeline.cells import repro_on
from pipeline.report.sources import Doc

PUBLIC = "a public task: quality rests on this project's own tasks"


def todo(params: Doc, choice: dict[str, Any], group: dict[str, Any]) -> list[dict[str, str]]:
    """Return {what, command} for a group: what would decide its objectives, the A/A run, a price, a public task.

    Args:
        params: params.yaml, for the tasks that are public (`hub`).
        choice: see choice.choice_section.
        group: one group of measured cells (see collect.collect).
    """
    found = [
        {"what": item["what"], "command": item["command"]}
        for one in choice["targets"]
        if (one["model"], one["target"]) == (group["model"], group["target"])
        for item in one["decide"]
    ]
    return [*found, *_against_itself(group), *_price(group), *_public(params, group)]


def _on(group: dict[str, Any], stages: str) -> str:
    return repro_on(group["target"], stages)


def _against_itself(group: dict[str, Any]) -> list[dict[str, str]]:
    """Without speed of the baseline it is asked for already, and its own benchmark is the run against itself."""
    timed = [c for c in group["cells"] if c["is_baseline"] and not c["speed"]["problem"]]
    if not timed or any(c["speed"]["is_noise_floor"] for c in group["cells"]):
        return []
    command = _on(group, f"benchmark@{group['baseline']}")
    return [{"what": "the baseline timed against itself (A/A)", "command": command}]


def _price(group: dict[str, Any]) -> list[dict[str, str]]:
    if group["device"].get("price_usd_per_h") is not None:
        return []
    command = f"targets.{group['target']}.price_usd_per_h in params.yaml; nothing runs again"
    return [{"what": "cost: no price is given", "command": command}]


def _public(params: Doc, group: dict[str, Any]) -> list[dict[str, str]]:
    public = [name for name, task in params.mapping("tasks").items() if isinstance(task, dict) and task.get("hub")]
    run = {n for c in group["cells"] for n, t in c["quality"]["tasks"].items() if t["accuracy"]["value"] is not None}
    if group["mark"] or not public or run & set(public):
        return []
    names = f"{', '.join(public[:-1])} or {public[-1]}" if len(public) > 1 else public[0]
    stages = f"evaluate@{group['model']}.*.{group['runtime']}.{group['target']}"
    return [{"what": PUBLIC, "command": f"{names} in evaluation.tasks of params.yaml, then {_on(group, stages)}"}]

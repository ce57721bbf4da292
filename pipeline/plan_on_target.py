"""The part of the plan that a plain `dvc repro` leaves alone: cells that are made and measured on their own target.

A matrix row with `measure: on-target` is expanded as any other, once per target, and then every name gets the target's
id at its end, so that `dvc repro --glob '*@*.<target>'` finds the stages and a checkpoint that a GPU made never stands
where the laptop's stands. stages/vllm_cuda/dvc.yaml loops over it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pipeline.shapes import is_random
from pipeline.specs import Params

GROUPS = ("kind", "fetch", "calibrate", "quantize", "lint", "package", "evaluate", "benchmark", "tune", "scaling")
# A stage of dvc.yaml has a fixed number of dependencies: what a tuning run does not need of other recipes' packages is
# filled with files that it depends on as well.
FILLERS = ("pipeline/tuning/check.py", "pipeline/tuning/rank.py", "pipeline/tuning/spec.py")
Expand = Callable[[Params], dict[str, Any]]


def on_target(params: Params, common: dict[str, Any], expand: Expand) -> dict[str, Any]:
    """Return the groups of every `on-target` row; `expand` makes the plan of params, `common` is the ordinary one.

    What the ordinary plan fetches and calibrates already stays there: DVC finds it across files.
    """
    plan: dict[str, Any] = {group: {} for group in GROUPS}
    for number, row in enumerate(params.matrix):
        if row.measure != "on-target":
            continue
        for target in row.targets:
            rows = [row.model_copy(update={"measure": True, "targets": [target]})]
            _add(plan, params, expand(params.model_copy(update={"matrix": rows})), target, number)
    for group in ("fetch", "calibrate"):
        plan[group] = {key: item for key, item in plan[group].items() if key not in common[group]}
    return plan


def _add(plan: dict[str, Any], params: Params, made: dict[str, Any], target: str, row: int) -> None:
    """Add one target's groups; what is made there is named `<id>.<target>`; `row` is the row's place in the matrix."""
    plan["kind"][target] = {"target": target}
    plan["fetch"] |= made["fetch"]
    plan["calibrate"] |= made["calibrate"]
    for key, item in made["quantize"].items():
        plan["quantize"][f"{key}.{target}"] = item | {"target": target}
    for key, item in made["lint"].items():
        plan["lint"][f"{key}.{target}"] = item | {"checkpoint": made_on(item["checkpoint"], target), "target": target}
    for cell, item in made["package"].items():
        lint = f"artifacts/checkpoints/{item['lint'].split('/')[-2]}.{target}.lint.json"
        plan["package"][cell] = item | {"checkpoint": made_on(item["checkpoint"], target), "lint": lint}
    for cell, item in made["measure"].items():
        plan["benchmark"].setdefault(cell, item | {"row": row})
        if not is_random(params.models[item["model"]].source):
            plan["evaluate"].setdefault(cell, item | {"row": row})
        if cell in params.tuning:
            plan["tune"].setdefault(cell, item | {"row": row} | tuning_inputs(params, cell))
        if cell == item["baseline"] and params.targets[target].count > 1:
            plan["scaling"].setdefault(cell, item | {"row": row})


def tuning_inputs(params: Params, cell: str) -> dict[str, str]:
    """Return what a tuning run depends on beside its own cell: the packages of the recipes that its variants name."""
    model, _, runtime, target = cell.split(".")
    recipes = dict.fromkeys(v.recipe for v in params.tuning[cell].variants.values() if v.recipe)
    packages = [f"artifacts/packages/{model}.{r}.{runtime}.{target}/deploy/manifest.json" for r in recipes]
    return dict(zip(("other", "another", "third"), [*packages, *FILLERS], strict=False))


def made_on(checkpoint: str, target: str) -> str:
    """Return where a checkpoint is that `target` made; a model as it was fetched is the same everywhere."""
    return checkpoint if checkpoint.startswith("artifacts/models/") else f"{checkpoint}.{target}"


def is_on_target(params: Params, model: str, recipe: str, target: str) -> bool:
    """Say whether a cell's checkpoint is made on its target."""
    return any(
        row.measure == "on-target" and model in row.models and recipe in row.recipes and target in row.targets
        for row in params.matrix
    )

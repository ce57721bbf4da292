"""Recommendations of a whole repository: every model, target and objective; and scaling over several GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.choice.candidates import Candidate, read_candidates
from pipeline.choice.objective import Slo
from pipeline.choice.recommend import recommend
from pipeline.errors import InputError, unknown
from pipeline.evidence.policy import PATH, Policy, load_policy
from pipeline.params import load_params, load_yaml
from pipeline.specs import Params


def answers(
    root: Path, target: str | None = None, slo: str | None = None, aim: str = "throughput", model: str | None = None
) -> list[dict[str, Any]]:
    """Return one recommendation for each model, target and objective; all of them, or those that are named.

    Raises:
        InputError: a name that does not exist (nearest given), or params.yaml, the plan or policy.yaml are wrong.
    """
    params = load_params(root / "params.yaml")
    plan = load_yaml(root / "pipeline/plan.yaml", "the plan")
    for kind, name, table in (("target", target, params.targets), ("objective", slo, params.slos),
                              ("model", model, params.models)):  # fmt: skip
        if name is not None and name not in table:
            raise unknown(kind, name, table, "params.yaml")
    if not params.slos:
        raise InputError("params.yaml has no slos: an objective is what a recommendation is made for.")
    policy = read_policy(root, params, plan)
    cells = plan.get("cells") or []
    pairs = dict.fromkeys((c["model"], c["target"]) for c in cells)
    found = []
    for one_model, one_target in pairs:
        if target not in (None, one_target) or model not in (None, one_model):
            continue
        candidates = read_candidates(root, one_model, one_target, params, plan, policy)
        for name, objective in params.slos.items():
            if slo in (None, name):
                found.append(recommend(candidates, name, objective, aim))
    if not found:
        raise InputError(f"The plan has no cells of target {target}; add it to the matrix of params.yaml.")
    return found


def read_policy(root: Path, params: Params, plan: dict[str, Any]) -> Policy | None:
    """Return policy.yaml, or None where there is none: quality is then not judged."""
    if not (root / PATH).is_file():
        return None
    return load_policy(root / PATH, params, [c["cell"] for c in plan.get("cells") or []])


def scaling(root: Path, params: Params, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Return how throughput grows with GPUs: each multi-GPU target against the one-GPU target of the same kind.

    Efficiency is tokens/s of N GPUs over N times that of one, at the same cell, workload and load.
    """
    found = []
    for name, target in params.targets.items():
        if target.count < 2:
            continue
        single = [n for n, t in params.targets.items() if t.count == 1 and (t.gpu, t.sm) == (target.gpu, target.sm)]
        if not single:
            found.append({"target": name, "gpus": target.count, "efficiency": None,
                          "not_measured": f"params.yaml has no target of one {target.gpu}"})  # fmt: skip
            continue
        for model in dict.fromkeys(c["model"] for c in plan.get("cells") or [] if c["target"] == name):
            many = read_candidates(root, model, name, params, plan, None)
            one = {c.recipe + c.runtime: c for c in read_candidates(root, model, single[0], params, plan, None)}
            for cell in many:
                found += _scaled(cell, one.get(cell.recipe + cell.runtime), target.count, single[0])
    return found


def _scaled(many: Candidate, one: Candidate | None, gpus: int, single: str) -> list[dict[str, Any]]:
    base = {(p.workload, p.name): p.tok_s for p in one.points if p.tok_s} if one else {}
    rows: list[dict[str, Any]] = []
    for point in many.points:
        alone = base.get((point.workload, point.name))
        if alone and point.tok_s:
            rows.append({"target": many.target, "cell": many.cell, "workload": point.workload, "load": point.name,
                         "gpus": gpus, "efficiency": point.tok_s / (gpus * alone)})  # fmt: skip
    if rows:
        return rows
    return [{"target": many.target, "cell": many.cell, "gpus": gpus, "efficiency": None,
             "not_measured": f"{many.cell} and its cell on {single} were not timed at a common load"}]  # fmt: skip


def objectives(params: Params) -> dict[str, Slo]:
    """Return the objectives of params.yaml."""
    return dict(params.slos)

"""The cells that compete on one target: their quality verdict, speed at an objective, size, and what the team pays."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.choice.objective import Slo
from pipeline.choice.timed import TimedPoint, knee, operating_point, read_points, stops_being_faster, usd_per_million
from pipeline.evidence.gate import judge_cell, read_eval
from pipeline.evidence.policy import Policy
from pipeline.evidence.summary import needs
from pipeline.evidence.verdicts import FAIL, INCONCLUSIVE, PASS
from pipeline.report.sources import is_number, read_doc
from pipeline.report.text import and_list
from pipeline.shapes import SPEED_ONLY, is_random
from pipeline.specs import Params, Target

QUALITY_KINDS = ("lint", "canary", "tasks", "fidelity")
NOT_TIMED = "none of the objective's workloads was timed"
NO_PRICE = "not computed (no price given)"


@dataclass
class Candidate:
    """One cell. `quality` is PASS, FAIL, INCONCLUSIVE or NOT MEASURED; `baseline` cells pass by definition."""

    cell: str
    recipe: str
    runtime: str
    target: str
    is_baseline: bool
    quality: str
    quality_why: list[str]
    served: bool
    why_not_served: str
    points: list[TimedPoint]
    bench_problem: str | None
    has_eval: bool
    weight_bytes: float | None
    perplexity_ratio: float | None
    startup_s: float | None
    device: Target
    planned: bool
    on_target: bool = False
    speed_only: bool = False

    def at(self, slo: Slo) -> At:
        """Return the cell's numbers at an objective: where it was judged first, without limits where it is fastest."""
        timed = {w: [p for p in self.points if p.workload == w] for w in slo.workloads}
        timed = {workload: points for workload, points in timed.items() if points}
        if timed and slo.limits:
            workload, points = next(iter(timed.items()))
            return At.of(self, points, slo, workload)
        if timed:
            workload = max(timed, key=lambda w: max(p.tok_s or 0.0 for p in timed[w]))
            found = At.of(self, timed[workload], slo, workload)
            named = f"most output tokens/s of all loads of {and_list(list(timed))}"
            return replace(found, why=named) if found.point else found
        return At(None, None, NOT_TIMED, None, None, None, None, NO_PRICE)


@dataclass
class At:
    """A cell at an objective: the workload that decides, the operating point, goodput, knee, crossover, cost."""

    workload: str | None
    point: TimedPoint | None
    why: str
    goodput_s: float | None
    knee: str | None
    stops_being_faster: str | None
    usd_per_m_tokens: float | None
    cost: str
    met: bool | None = None
    e2e_ms: float | None = None

    @staticmethod
    def of(cell: Candidate, points: list[TimedPoint], slo: Slo, workload: str) -> At:
        """Judge the points of one workload."""
        best, why = operating_point(points, slo)
        if best is not None and best.loop == "closed" and slo.limits:
            why += "; judged on a closed loop, which hides queueing"
        at_knee, knee_why = knee(points, slo)
        price = cell.device.price_usd_per_h
        usd = usd_per_million(price, cell.device.count, best.tok_s if best else None)
        no_cost = NO_PRICE if price is None else "not computed (no operating point)"
        met = True if best else False if why.startswith("missed") else None
        lowest = min(points, key=lambda p: p.load)
        return At(
            workload, best, why, best.goodput_s(slo) if best else None,
            f"{at_knee.name}: {knee_why}" if at_knee else f"not known ({knee_why})",
            "this is the baseline" if cell.is_baseline else stops_being_faster(points),
            usd, f"{usd:.3f} USD/M output tokens" if usd is not None else no_cost, met, lowest.latency.get("e2e_ms"),
        )  # fmt: skip


def read_candidates(root: Path, model: str, target: str, params: Params, plan: dict[str, Any], policy: Policy | None,
                    ) -> list[Candidate]:  # fmt: skip
    """Return every cell of one model and target, of every runtime, in the plan's order."""
    entries = [c for c in plan.get("cells") or [] if (c["model"], c["target"]) == (model, target)]
    return [_candidate(root, entry, params, plan, policy) for entry in entries]


def _candidate(
    root: Path, entry: dict[str, Any], params: Params, plan: dict[str, Any], policy: Policy | None
) -> Candidate:
    name, is_baseline = entry["cell"], entry["recipe"] == params.baseline
    quality, why = quality_of(root, entry, params, policy)
    points, bench = read_points(root, name)
    results = f"artifacts/results/{entry.get('checkpoint') or entry['model'] + '.' + entry['recipe']}"
    quantize = read_doc(root, f"{results}/quantize.json", None)
    weights = quantize.raw("weight_bytes")
    if is_baseline and not is_number(weights):
        weights = read_doc(root, f"artifacts/results/{entry['model']}/model.json", None).raw("weight_bytes")
    evaluation = read_doc(root, f"artifacts/results/{name}/eval.json", None)
    speed_only = _is_random(params, entry["model"])
    ratio = evaluation.raw("fidelity", "perplexity_ratio") if speed_only or not is_baseline else 1.0
    startup = bench.raw("server", "candidate", "startup_s")
    return Candidate(
        cell=name, recipe=entry["recipe"], runtime=entry["runtime"], target=entry["target"], is_baseline=is_baseline,
        quality=quality, quality_why=why,
        served=entry["verdict"] in ("native", "fallback"), why_not_served=str(entry.get("reason") or ""),
        points=points, bench_problem=bench.problem, has_eval=evaluation.data is not None,
        weight_bytes=weights if is_number(weights) else None,
        perplexity_ratio=ratio if is_number(ratio) else None,
        startup_s=startup if is_number(startup) else None,
        device=params.targets[entry["target"]],
        planned=name in plan.get("measure", {}),
        on_target=name in (plan.get("on_target") or {}).get("benchmark", {}),
        speed_only=speed_only,
    )  # fmt: skip


def quality_of(root: Path, entry: dict[str, Any], params: Params, policy: Policy | None) -> tuple[str, list[str]]:
    """Return a cell's quality verdict by the policy (lint, canary, tasks, fidelity) and its reasons.

    Speed floors and size limits of the policy are the gate's business: here speed is what cells are ranked by.
    """
    if _is_random(params, entry["model"]):
        return "NOT MEASURED", [SPEED_ONLY]
    if policy is None:
        return "NOT MEASURED", ["there is no policy.yaml to judge by"]
    judged = judge_cell(root, entry, params, policy)
    if judged["is_baseline"]:
        there = read_eval(root, entry["cell"]).data is not None
        return (judged["verdict"], judged.get("reasons", [])) if there else ("NOT MEASURED", ["no evaluation"])
    checks = {n: c for n, c in judged["checks"].items() if c["kind"] in QUALITY_KINDS}
    blocking = {n: c for n, c in checks.items() if c["tier"] != "advisory"}
    bad = [n for n, c in blocking.items() if c["verdict"] == FAIL]
    critical = {n: c for n, c in blocking.items() if c["tier"] == "critical"}
    open_ = [n for n, c in critical.items() if c["verdict"] not in (PASS, FAIL)]
    if all(c["verdict"] == "NOT MEASURED" for n, c in checks.items() if n != "lint"):
        return "NOT MEASURED", ["no evaluation"]
    said = [f"{n}: {_short(checks[n])}" for n in bad + open_]
    return (FAIL if bad else INCONCLUSIVE if open_ else PASS), said


def _is_random(params: Params, model: str) -> bool:
    return model in params.models and is_random(params.models[model].source)


def _short(check: dict[str, Any]) -> str:
    if "damage" not in check:
        return f"{check['verdict'].lower()} ({check['reason']})"
    unit = check["damage_unit"]
    text = f"damage {check['damage']:.3g} {unit} of at most {check['margin']:.3g}"
    if check["verdict"] == INCONCLUSIVE:
        text += f", not shown with {check['items']} {check['item']}; {needs(check, 'about {:,} would', 'too near')}"
    return text


@lru_cache(maxsize=1)
def team_facts() -> dict[str, dict[str, str]]:
    """Return what each runtime asks of the team, with sources."""
    text = (Path(__file__).parent / "team.yaml").read_text(encoding="utf-8")
    return {str(k): {a: " ".join(str(b).split()) for a, b in v.items()} for k, v in yaml.safe_load(text).items()}

"""The gate: judge every measured cell by policy.yaml. Pure but for reading the results.

A cell is PASS when every critical check is PASS, no supporting one is FAIL and everything that the policy requires was
measured on the real engine; FAIL when a critical or supporting check is FAIL; INCONCLUSIVE otherwise. The gate's own
verdict is the worst of the cells that are shipped.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from pipeline.errors import InputError
from pipeline.evidence.checks import NOT_MEASURED, Docs, checks, judge
from pipeline.evidence.health import BROKEN, health, reasons
from pipeline.evidence.policy import PATH, Policy, holds, load_policy, shipped
from pipeline.evidence.repeat import read_bench
from pipeline.evidence.summary import needs
from pipeline.evidence.verdicts import FAIL, INCONCLUSIVE, PASS
from pipeline.params import load_params, load_yaml
from pipeline.report.sources import Doc, is_number, read_doc
from pipeline.specs import Params

SCHEMA = "quantpress.gate/1"
EXIT_CODES = {PASS: 0, FAIL: 1, INCONCLUSIVE: 4}
# eval/1 has no errors of the fidelity numbers: what needs them is "not measured" there.
EVAL_SCHEMAS = ("quantpress.eval/2", "quantpress.eval/1")
# Which kind of check shows that a piece of required evidence is there.
REQUIRED = {"lint": "lint", "canary": "canary", "fidelity": "fidelity", "tasks": "tasks", "speed": "speed"}


def gate(root: Path) -> dict[str, Any]:
    """Judge the results below `root` and return the record that artifacts/gate.json holds.

    Raises:
        InputError: policy.yaml, params.yaml or the plan is missing or wrong.
    """
    params = load_params(root / "params.yaml")
    plan = load_yaml(root / "pipeline/plan.yaml", "the plan")
    entries = {cell["cell"]: cell for cell in plan.get("cells") or []}
    if not entries:
        raise InputError("pipeline/plan.yaml has no cells. Run `uv run python -m pipeline plan`.")
    policy = load_policy(root / PATH, params, list(entries))
    judged = {}
    for name, entry in entries.items():
        has_results = (root / "artifacts/results" / name / "eval.json").exists()
        if entry.get("measured_here") or has_results or shipped(policy, name):
            judged[name] = judge_cell(root, entry, params, policy)
    decides = [name for name in judged if judged[name]["ship"]]
    verdicts = [judged[name]["verdict"] for name in decides]
    worst = FAIL if FAIL in verdicts else INCONCLUSIVE if INCONCLUSIVE in verdicts else PASS
    return {
        "schema": SCHEMA,
        "verdict": worst,
        "exit_code": EXIT_CODES[worst],
        "policy_sha256": hashlib.sha256((root / PATH).read_bytes()).hexdigest(),
        "alpha": policy.alpha,
        "power": policy.power,
        "decided_by": decides,
        "cells": judged,
    }


def judge_cell(root: Path, entry: dict[str, Any], params: Params, policy: Policy) -> dict[str, Any]:
    """Judge one cell of the plan."""
    name = entry["cell"]
    docs = read_docs(root, entry)
    is_baseline = entry["recipe"] == params.baseline
    row: dict[str, Any] = {"verdict": INCONCLUSIVE, "ship": shipped(policy, name), "is_baseline": is_baseline}
    base_name = ".".join((entry["model"], params.baseline, entry["runtime"], entry["target"]))
    base = docs.evaluation if is_baseline else read_eval(root, base_name)
    sound = health(base, policy)
    row |= {"baseline": base_name, "baseline_health": sound, "noise_floor": base.raw("noise_floor")}
    if is_baseline:
        return row | {"verdict": sound["verdict"], "reasons": _health_reasons(sound), "checks": {}}
    floors = [floor for floor in policy.speed if holds(floor, entry["target"], params)]
    found = judge(checks(docs, policy, floors), policy)
    problems = _engine(docs, entry, params)
    timed = bool(floors) or _timed(docs.bench)
    missing: list[str] = [w for w in policy.required if not (w == "speed" and timed and not floors)
                          and not _measured(w, found, problems)]  # fmt: skip
    verdict, why = decide(found, missing, sound)
    notes = [f"task {t} has no margin in {PATH}" for t in docs.evaluation.mapping("tasks") if t not in policy.tasks]
    return row | {"verdict": verdict, "reasons": why + problems, "notes": notes, "missing": missing, "checks": found}


def decide(found: dict[str, dict[str, Any]], missing: list[str], sound: dict[str, Any]) -> tuple[str, list[str]]:
    """Return a cell's verdict and the reasons for anything but PASS."""
    failed = [n for n, c in found.items() if c["verdict"] == FAIL and c["tier"] != "advisory"]
    open_ = [n for n, c in found.items() if c["verdict"] in (INCONCLUSIVE, NOT_MEASURED) and c["tier"] == "critical"]
    why = [f"{name}: {_words(found[name])}" for name in failed + open_]
    why += [f"required and not measured: {what}" for what in missing]
    why = _health_reasons(sound) + why
    if failed or sound["verdict"] == FAIL:
        return FAIL, why
    return (INCONCLUSIVE if open_ or missing or sound["verdict"] != PASS else PASS), why


def _words(check: dict[str, Any]) -> str:
    if "damage" not in check:
        return f"{check['verdict'].lower()} ({check['reason']})"
    unit, item = check["damage_unit"], check["item"]
    said = (
        f"damage {check['damage']:.3g} {unit} as seen, bound {check['damage_bound']:.3g}, margin {check['margin']:.3g}"
    )
    if check["verdict"] == INCONCLUSIVE:
        said += f"; {check['items']} {item}, " + needs(check, "a firm answer needs about {:,}", "too near")
    return said


def _timed(bench: Doc) -> bool:
    """Tell whether some load was timed cleanly: what `required: speed` asks of a target without a floor."""
    loads = [load for load in bench.mapping("workloads").values() if isinstance(load, dict)]
    for entry in (p for load in loads for p in load.get("points") or [] if isinstance(p, dict)):
        point = Doc(bench.path, entry)
        sides = ("candidate", "baseline")
        clean = all(point.raw(s, "errors") == 0 and point.raw(s, "output_tokens_ok") is True for s in sides)
        if clean and is_number(point.raw("ratio", "output_tok_s")):
            return True
    return False


def _health_reasons(sound: dict[str, Any]) -> list[str]:
    if sound["verdict"] == PASS:
        return []
    said = reasons(sound)
    return [f"{BROKEN}: {said}" if sound["verdict"] == FAIL else f"the baseline's health is not known: {said}"]


def _measured(what: str, found: dict[str, dict[str, Any]], problems: list[str]) -> bool:
    """Tell whether required evidence is there: some check of its kind has a number, from the real engine."""
    kind = REQUIRED[what]
    rows = [c for c in found.values() if c["kind"] == kind]
    there = any(c["verdict"] != NOT_MEASURED for c in rows)
    return there and not (problems and kind != "lint")


def _engine(docs: Docs, entry: dict[str, Any], params: Params) -> list[str]:
    """Return why results were not measured on the engine and machine that will serve the cell; none if they were."""
    target = params.targets[entry["target"]]
    problems = []
    for doc, keys in ((docs.evaluation, ("server",)), (docs.bench, ("server", "candidate"))):
        if doc.problem:
            continue
        runtime, version = doc.raw(*keys, "runtime"), doc.raw(*keys, "version")
        if runtime != entry["runtime"] or not version:
            problems.append(f"{doc.path} does not name {entry['runtime']} and its version as the engine")
        names = [str(g.get("name", g)) if isinstance(g, dict) else str(g) for g in doc.items("host", "gpus")]
        if target.gpu and not any(target.gpu in name for name in names):
            problems.append(f"{doc.path} was measured on {', '.join(names) or 'no GPU'}, not on {target.gpu}")
    return problems


def read_eval(root: Path, cell: str) -> Doc:
    """Read a cell's eval.json of any schema that is understood."""
    return read_doc(root, f"artifacts/results/{cell}/eval.json", *EVAL_SCHEMAS)


def read_docs(root: Path, entry: dict[str, Any]) -> Docs:
    """Read what a cell is judged by; results of other weights than the package holds now count as not measured."""
    name = entry["cell"]
    checkpoint = entry.get("checkpoint") or f"{entry['model']}.{entry['recipe']}"
    results = "artifacts/results"
    served = [read_eval(root, name), read_bench(root, name)]
    now = read_doc(root, f"artifacts/packages/{name}/deploy/manifest.json", None).raw("checkpoint", "digest")
    for i, doc in enumerate(served):
        then = doc.raw("package_digest")
        if now and then and now != then:
            stale = f"{doc.path} is stale: measured on checkpoint {str(then)[:12]}, the package has {str(now)[:12]}"
            served[i] = Doc(doc.path, None, stale)
    return Docs(
        evaluation=served[0],
        bench=served[1],
        quantize=read_doc(root, f"{results}/{checkpoint}/quantize.json", "quantpress.quantize/1"),
        lint=read_doc(root, f"{results}/{checkpoint}/lint.json", "quantpress.lint/1"),
        model=read_doc(root, f"{results}/{entry['model']}/model.json", "quantpress.model/1"),
    )

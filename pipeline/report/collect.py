"""Joins params, plan and every result into one report dict, `quantpress.report/1`.

Nothing is dropped in silence: a file that is missing or broken is named where its numbers would stand, and
once more in the list of what was not measured.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.memory.cells import CellIds
from pipeline.report.agreement import agreement_rows
from pipeline.report.answer import RULES, answer, noise_floor, reference_point
from pipeline.report.cells import NOT_QUANTIZED, build_cell
from pipeline.report.choice import choice_section, objective_lines
from pipeline.report.engine import engine_line
from pipeline.report.paying import known_params, paying_rows
from pipeline.report.sizes import sizes_section
from pipeline.report.sources import Doc, plain, read_doc, read_yaml
from pipeline.report.todo import todo
from pipeline.report.tuning import problems as tuning_problems
from pipeline.report.tuning import tuning_section
from pipeline.report.verdicts import floor_lines
from pipeline.report.warned import HAS_RESULTS, warnings
from pipeline.shapes import SPEED_ONLY, is_random
from pipeline.whole_gpu import kept_small

SCHEMA = "quantpress.report/1"
CELL_KEYS = ("model", "recipe", "runtime", "target")


def collect(root: Path) -> dict[str, Any]:
    """Read everything below `root` that the data contract names and return the report.

    Keys of the report: schema, models, targets (groups with measurements: one per target, runtime and
    model), planned (cells of targets this run did not include), refusals, not_measured, calibration,
    warnings, sizes (predicted memory and speed), choice (see choice.py), tuning (see tuning.py), agreement
    (see agreement.py), rules, method. Numbers are facts (see sources.py), those of `sizes`, `choice`, `tuning` and
    `agreement` aside. The same files give the same report.
    """
    params, plan = read_yaml(root, "params.yaml"), read_yaml(root, "pipeline/plan.yaml")
    entries, problems = _entries(root, plan)
    cells: dict[str, dict[str, Any]] = {}
    docs: dict[str, list[Doc]] = {}
    for entry in entries:
        cells[entry["cell"]], docs[entry["cell"]] = build_cell(root, entry, params)
    groups, planned = _groups(list(cells.values()), params)
    for group in groups:
        group["quality_floor"] = floor_lines(root, group["baseline"])
        group["paying"] = paying_rows(root, params, group)
    for cell in cells.values():
        cell["kept_small"] = _kept_small(root, params, cell)
    choice = choice_section(root)
    for group in groups:
        group["answer"] += objective_lines(choice, group)
        group["todo"] = todo(params, choice, group)
    tuning = tuning_section(root, params, list(cells.values()))
    models = {m: _model(root, m, params) for m in dict.fromkeys(e["model"] for e in entries)}
    problems += [{"what": d.path, "reason": d.problem} for d in (params, plan) if d.problem]
    problems += [{"what": m["path"], "reason": m["problem"]} for m in models.values() if m["problem"]]
    problems += tuning_problems(tuning)
    calibration = _calibration(root, list(cells.values()))
    report = {
        "schema": SCHEMA,
        "models": models,
        "targets": groups,
        "planned": planned,
        "refusals": _refusals(plan, groups, planned),
        "not_measured": _by_reason(problems + _not_measured(groups, docs)),
        "calibration": calibration,
        "warnings": warnings(root, groups, calibration, set(cells)),
        "sizes": sizes_section(root, params, groups, planned),
        "choice": choice,
        "tuning": tuning,
        "agreement": agreement_rows(root),
        "rules": RULES,
        "method": _method(groups, models),
    }
    return report


def _kept_small(root: Path, params: Doc, cell: dict[str, Any]) -> str | None:
    """Say which options keep a packaged vLLM server small, None where none does."""
    if cell["runtime"] != "vllm" or not cell["package"]["exists"]:
        return None
    known, config = known_params(root, params, cell["model"])
    ids = CellIds(*(cell[key] for key in CELL_KEYS))
    if known is None or not config or ids.target not in known.targets or ids.recipe not in known.recipes:
        return None
    found = kept_small(known, ids, config)
    return found and found.text


def _entries(root: Path, plan: Doc) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Plan entries with every key present, and what was wrong with the others.

    Without a plan the folders of results are the plan: what was measured is still shown.
    """
    raw, entries, problems = plan.items("cells"), [], []
    if not raw:
        names = sorted(p.name for p in (root / "artifacts/results").glob("*.*.*.*") if p.is_dir())
        raw = [{"cell": name, "measured_here": True, "reason": "pipeline/plan.yaml has no cells"} for name in names]
    for item in raw:
        cell = item.get("cell") if isinstance(item, dict) else None
        parts = str(cell).split(".")
        if len(parts) != len(CELL_KEYS) or "/" in str(cell):
            problems.append({"what": plan.path, "reason": f"not a cell: {plain(item, 120)}"})
            continue
        entry: dict[str, Any] = {"cell": str(cell), **dict(zip(CELL_KEYS, parts, strict=True))}
        entry["verdict"] = plain(item.get("verdict") or "unknown")
        entry |= {key: plain(item.get(key) or "") for key in ("reason", "source", "checkpoint")}
        entries.append(entry | {"measured_here": item.get("measured_here") is True})
    return entries, problems


def _groups(cells: list[dict[str, Any]], params: Doc) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split cells into groups that share a baseline, and cells of groups that were not to be measured."""
    table: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        table.setdefault((cell["target"], cell["runtime"], cell["model"]), []).append(cell)
    groups, planned = [], []
    preferred = [str(w) for w in params.items("benchmark")]
    for (target, runtime, model), members in table.items():
        if not any(c["measured_here"] or c["status"] in HAS_RESULTS for c in members):
            keys = ("cell", *CELL_KEYS, "verdict", "reason", "source", "status", "package")
            planned += [c if c["package"]["exists"] else {key: c[key] for key in keys} for c in members]
            continue
        device = params.mapping("targets", target)
        own = device.get("workloads") or (params.items("benchmark_gpu") if device.get("device") == "cuda" else [])
        reference = reference_point(members, [str(w) for w in own] if isinstance(own, list) and own else preferred)
        group: dict[str, Any] = {"target": target, "runtime": runtime, "model": model, "reference": reference}
        group["device"] = device
        random = is_random(str(params.mapping("models", model).get("source")))
        group["mark"] = SPEED_ONLY if random else None
        group["baseline"] = next((c["cell"] for c in members if c["is_baseline"]), None)
        group["noise_floor"] = noise_floor(members, reference)
        group["cells"] = members
        group["engine"] = engine_line(members)
        group["answer"] = answer(group)
        groups.append(group)
    # Those with results first: they have the colours that are easiest to tell apart.
    shown = [c for group in groups for c in group["cells"] if not c["is_baseline"]]
    shown.sort(key=lambda c: c["status"] not in HAS_RESULTS)
    recipes = list(dict.fromkeys(c["recipe"] for c in shown))
    return [group | {"recipes": recipes} for group in groups], planned


def _model(root: Path, model: str, params: Doc) -> dict[str, Any]:
    doc = read_doc(root, f"artifacts/results/{model}/model.json", "quantpress.model/1")
    asked = params.mapping("models", model)
    known = {k: doc.raw(k) for k in ("source", "revision", "license", "note", "architecture", "sanity")}
    known["source"] = known["source"] or asked.get("source")
    return known | {
        "path": doc.path,
        "problem": doc.problem,
        "weight_bytes": doc.fact("weight_bytes"),
        "parameters": doc.fact("parameters"),
        "trust_remote_code": doc.raw("trust_remote_code"),
    }


def _refusals(plan: Doc, groups: list[dict[str, Any]], planned: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells a runtime cannot serve and recipes that cannot be made; `here`: on a target that was measured."""
    measured = [c for g in groups for c in g["cells"]]
    rows: list[dict[str, Any]] = []
    for cells, here in ((measured, True), (planned, False)):
        for cell in cells:
            if cell["verdict"] == "refused":
                reason = f"not served on {cell['target']} ({cell['reason']})"
                rows.append({"what": cell["cell"], "reason": reason, "source": cell["source"], "here": here})
    for item in plan.items("refusals"):
        if isinstance(item, dict):
            reason = f"cannot be made ({plain(item.get('reason', 'no reason given'))})"
            source = plain(item.get("source", ""))
            rows.append({"what": plain(item.get("what", "?")), "reason": reason, "source": source, "here": True})
    return rows


def _not_measured(groups: list[dict[str, Any]], docs: dict[str, list[Doc]]) -> list[dict[str, Any]]:
    """What the measured groups lack: files, tasks and single numbers, each with its reason."""
    rows: list[dict[str, Any]] = []
    for cell in (c for group in groups for c in group["cells"]):
        problems = {d.problem for d in docs[cell["cell"]] if d.problem}
        for doc in docs[cell["cell"]]:
            if doc.problem and doc.problem != NOT_QUANTIZED:
                rows.append({"what": doc.path, "reason": doc.problem})
        for where, reason in _absent_facts(cell, ()):
            if reason not in problems and not reason.startswith("this is the baseline"):
                rows.append({"what": where, "cell": cell["cell"], "reason": reason})
    return rows


def _by_reason(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put what shares a reason into one row: [{what: [names], reason}], in order of first appearance."""
    merged: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        cells = merged.setdefault(row["reason"], {}).setdefault(row["what"], [])
        if "cell" in row and row["cell"] not in cells:
            cells.append(row["cell"])
    return [
        {
            "what": [f"{what}: {', '.join(cells)}" if cells else what for what, cells in names.items()],
            "reason": reason,
        }
        for reason, names in merged.items()
    ]


def _absent_facts(node: Any, path: tuple[str, ...]) -> list[tuple[str, str]]:
    """Walk a cell; return (readable name, reason) of each absent number, one line for a whole task."""
    if isinstance(node, dict) and node.keys() == {"value", "ci95", "not_measured"}:
        if node["value"] is not None:
            return []
        if node["not_measured"].startswith("n too small"):
            return [(f"{path[-1]} of latencies", "fewer samples than this percentile needs")]
        return [(" ".join(path).replace("_", " "), node["not_measured"])]
    if path[:2] == ("quality", "tasks") and len(path) == 3 and node["accuracy"]["value"] is None:
        return [(f"task {path[2]}", node["accuracy"]["not_measured"])]
    pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [found for key, child in pairs for found in _absent_facts(child, (*path, str(key)))]


def _calibration(root: Path, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Calibration sets that the artifacts used, as quantize recorded them, each with its card if found."""
    sets: dict[str, dict[str, Any]] = {}
    for cell in cells:
        calib = cell["made"]["calib"]
        if isinstance(calib, dict):
            key = json.dumps([calib.get(k) for k in ("set", "samples", "digest")], default=str)
            entry = sets.setdefault(key, {**calib, "recipes": []})
            if cell["recipe"] not in entry["recipes"]:
                entry["recipes"].append(cell["recipe"])
    folder = root / "calib_data"
    for path in sorted({*folder.glob("**/card.json"), *folder.glob("**/*.card.json")}):
        card = read_doc(root, path.relative_to(root).as_posix(), None)
        for entry in sets.values():
            digest = entry.get("digest")
            if card.data and digest and digest in (card.raw("digest"), card.raw("sha256")):
                entry["card"], entry["card_path"] = card.data, card.path
    return list(sets.values())


def _method(groups: list[dict[str, Any]], models: dict[str, Any]) -> dict[str, Any]:
    """Hosts, versions, commits, clients and times, each distinct value once with the recipes it holds for."""
    distinct: dict[str, dict[str, dict[str, Any]]] = {}
    times: set[str] = set()
    for group in groups:
        for cell in group["cells"]:
            server = cell["server"]
            times |= {str(t) for t in server["measured_at"].values() if t}
            values = [(k, v) for k in ("host", "versions", "git_commit") for v in server[k].values()]
            values += [("runtime", server["runtime"]), ("client", cell["speed"]["client"])]
            values += [("order", cell["speed"]["order"]), ("attention_backend", server["attention_backend"])]
            for key, value in values:
                if value is None:
                    continue
                text = json.dumps(value, sort_keys=True)
                entry = distinct.setdefault(key, {}).setdefault(text, {"value": value, "cells": []})
                if cell["cell"] not in entry["cells"]:
                    entry["cells"].append(cell["cell"])
    remote = {name: model["trust_remote_code"] for name, model in models.items()}
    return {
        "distinct": {key: list(entries.values()) for key, entries in distinct.items()},
        "measured_from": min(times, default=None),
        "measured_until": max(times, default=None),
        "remote_code": remote,
    }

"""The report's warnings: of calibration sets, of cells, and of results that do not belong together."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.calibration import FEW_SAMPLES
from pipeline.report.engine import engine_warnings
from pipeline.report.sources import plain
from pipeline.report.text import and_list
from pipeline.shapes import SPEED_ONLY

GROUP_KEYS = ("target", "runtime", "model")
HAS_RESULTS = ("measured", "partly measured", f"measured ({SPEED_ONLY})")


def warnings(root: Path, groups: list[dict[str, Any]], calib: list[Any], known: set[str]) -> list[dict[str, Any]]:
    """Return {target, runtime, model, text} of every warning; `target` None for what is of no group alone.

    Args:
        root: the repository.
        groups: the groups of measured cells (see collect.collect).
        calib: the calibration sets that artifacts used.
        known: the cells of the plan; results of another cell are a warning.
    """
    found = [{"target": None, "text": text} for entry in calib for text in _calib_warnings(entry)]
    for group in groups:
        texts = [text for cell in group["cells"] for text in _cell_warnings(cell)] + _mixed(group)
        texts += mark_warnings(group["cells"])
        texts += engine_warnings(group["cells"])
        found += [{key: group[key] for key in GROUP_KEYS} | {"text": text} for text in dict.fromkeys(texts)]
    for path in sorted((root / "artifacts/results").glob("*.*.*.*")):
        if path.is_dir() and path.name not in known:
            found.append({"target": None, "text": f"{path.name} has results but is not in the plan: not shown."})
    return found


def _calib_warnings(entry: dict[str, Any]) -> list[str]:
    name, who = plain(entry.get("set")), ", ".join(entry["recipes"])
    samples, given = entry.get("samples"), entry.get("warnings")
    texts = [f"Calibration set {name}: {plain(w)}" for w in given] if isinstance(given, list) else []
    if isinstance(samples, int) and samples < FEW_SAMPLES:
        texts.append(f"Calibration set {name} ({who}) has {samples} samples, fewer than {FEW_SAMPLES}.")
    return texts


def _cell_warnings(cell: dict[str, Any]) -> list[str]:
    name, canary, lint = cell["recipe"], cell["canary"], cell["lint"]
    texts = []
    if canary["passed"] is False:
        shown = "; ".join(f"{f['id']}: {f['reason']}" for f in canary["failures"][:3])
        texts.append(f"{name} failed the coherence canary ({shown or 'no failure recorded'}).")
    for severity in dict.fromkeys(f["severity"] for f in lint["findings"]):
        found = [f for f in lint["findings"] if f["severity"] == severity]
        said = [f"{f['subject']}: {str(f['message']).rstrip('.')}" for f in found]
        texts.append(f"{name}, {len(said)} lint {severity}{'s' * (len(said) > 1)}: {'; '.join(said)}.")
    for load in cell["speed"]["workloads"]:
        bad = [str(p["concurrency"]) for p in load["points"] if not p["clean"]]
        if bad:
            texts.append(
                f"{name}, {load['workload']}: request errors, or output lengths not confirmed, at "
                f"concurrency {', '.join(bad)}; these timings are not used for the answer."
            )
    if cell["verdict"] == "refused" and cell["status"] in HAS_RESULTS:
        texts.append(f"{name} has results although the plan refuses it: {cell['reason']}")
    if cell["package"]["exists"] and cell["package"]["problem"]:
        texts.append(f"{name}: the package is not complete: {cell['package']['problem']}.")
    return texts


def mark_warnings(cells: list[dict[str, Any]]) -> list[str]:
    """Return each mark of the timings once, with the recipes, workloads and loads that carry it."""
    found: dict[str, dict[str, list[str]]] = {}
    for cell in cells:
        for load in cell["speed"]["workloads"]:
            marked = [(mark, load["workload"]) for mark in load["marks"]]
            marked += [(m, f"{load['workload']} at {p['load']}") for p in load["points"] for m in p["marks"]]
            for mark, where in marked:
                found.setdefault(mark, {}).setdefault(where, []).append(cell["recipe"])
    return [
        f"{mark[0].upper()}{mark[1:]}: {'; '.join(f'{and_list(who)} under {where}' for where, who in places.items())}."
        for mark, places in found.items()
    ]


def _short(value: Any) -> Any:
    """Return a host's fact for a sentence: GPUs as their count, name and driver."""
    if not (isinstance(value, list) and value and all(isinstance(gpu, dict) for gpu in value)):
        return value
    kinds = Counter(f"{gpu.get('name')}, driver {gpu.get('driver')}" for gpu in value)
    return "; ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _mixed(group: dict[str, Any]) -> list[str]:
    """Say when the cells of one target were measured from different commits or on different hosts."""
    commits: list[tuple[str, Any]] = []
    hosts: dict[str, list[tuple[str, Any]]] = {}
    for cell in group["cells"]:
        commits += [(cell["recipe"], value) for value in cell["server"]["git_commit"].values()]
        facts = [h for h in cell["server"]["host"].values() if isinstance(h, dict)]
        for key in dict.fromkeys(key for host in facts for key in host):
            hosts.setdefault(key, []).extend((cell["recipe"], _short(host.get(key))) for host in facts)
    checks = [("git commits", commits), *((f"hosts ({key})", values) for key, values in hosts.items())]
    texts = []
    for what, values in checks:
        seen: dict[str, list[str]] = {}
        for recipe, value in values:
            names = seen.setdefault(json.dumps(value, sort_keys=True).strip('"'), [])
            if recipe not in names:
                names.append(recipe)
        if len(seen) > 1:
            parts = "; ".join(f"{plain(value, 80)} for {', '.join(names)}" for value, names in seen.items())
            texts.append(f"Results on {group['target']} come from {len(seen)} different {what}: {parts}.")
    return texts

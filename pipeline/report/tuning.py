"""The report's sections of tuning and scaling runs: what was tried, what is proposed, how a cell scales over GPUs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.report.sources import Doc, plain, read_doc
from pipeline.shapes import SPEED_ONLY, is_random
from pipeline.speed.definitions import BUSY_PCT
from pipeline.tuning import scaling
from pipeline.tuning.propose import NOTHING, command, read_tune, said, tuned, what_changes
from pipeline.tuning.rank import judge, margins
from pipeline.tuning.spec import OWN

CELL_KEYS = ("model", "recipe", "runtime", "target")
MARKS = {
    "within noise": "within noise", "too little": "under 2%, too little", "noise not known": "noise not known",
    "failed requests": "requests failed, so it does not count",
}  # fmt: skip


def tuning_section(root: Path, params: Doc, cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Return {tuned: [...], scaled: [...]}, a cell each, from tune.json and scaling.json of the plan's cells.

    Both hold cell, its four ids, mark (random weights), path, problem (why nothing is shown), run (host, commit,
    commands, ...); `tuned` also measured, loads, variants, failed, offers, nothing; `scaled` gpus, workload, loads.
    A cell that params.yaml tunes and that has no tune.json yet is there with that as its problem.
    """
    found: dict[str, Any] = {"tuned": [], "scaled": []}
    for cell in cells:
        base = {"cell": cell["cell"], **{key: cell[key] for key in CELL_KEYS}}
        source = str(params.mapping("models", cell["model"]).get("source"))
        base["mark"] = SPEED_ONLY if is_random(source) else None
        tune = read_tune(root, cell["cell"])
        if tune:
            found["tuned"].append(base | {"missing": False} | _tuned(tune, cell["cell"]))
        elif cell["cell"] in params.mapping("tuning"):
            path = f"artifacts/results/{cell['cell']}/tune.json"
            problem = f"{path} is missing; {command(cell['cell'])}"
            found["tuned"].append(base | {"missing": True, "path": path, "problem": problem, "run": None})
        if scaled := _scaling_doc(root, cell["cell"]):
            found["scaled"].append(base | _scaled(scaled))
    found["tuned"].sort(key=lambda row: row["missing"])
    return found


def problems(section: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what is wrong with the section's files, as rows of what was not measured."""
    rows = [*(row for row in section["tuned"] if not row["missing"]), *section["scaled"]]
    return [{"what": row["path"], "reason": row["problem"]} for row in rows if row["problem"]]


def _tuned(doc: Doc, cell: str) -> dict[str, Any]:
    offered = tuned(doc, cell)
    shown: dict[str, Any] = {"path": doc.path, "problem": doc.problem, "run": None}
    if doc.data is None:
        return shown
    record = doc.data
    variants = [_variant(record, OWN, "the cell as it is", False)]
    for name, variant in record["variants"].items():
        if name not in record["failed"]:
            variants.append(_variant(record, name, what_changes(variant), variant["changes_answers"]))
    chance = margins(record)
    return shown | {
        "measured": offered.measured,
        "loads": [
            {
                "name": p["name"],
                "margin": chance[p["name"]],
                "client_bound": p["name"] in record["client_bound"],
            }
            for p in record["points"]
        ],
        "variants": variants,
        "failed": [
            {
                "variant": name,
                "what": what_changes(record["variants"][name]) if name in record["variants"] else "",
                "reason": plain(why),
            }
            for name, why in record["failed"].items()
        ],
        "offers": [offer._asdict() for offer in offered.offers],
        "nothing": None if offered.offers else NOTHING,
        "run": _run(record, lambda name: f"tuning, {name}"),
    }


def _variant(record: dict[str, Any], name: str, what: str, changes_answers: bool) -> dict[str, Any]:
    """Return one row: the variant, what its server said of itself, and its numbers at each load, None where absent."""
    server = record["server"].get(name, {})
    loads: list[dict[str, Any] | None] = []
    chance = margins(record)
    busy = record.get("front_end_pct", {}).get(name, {})
    for point in record["points"]:
        side = point["sides"].get(name)
        if side is None:
            loads.append(None)
            continue
        ratio = side["ratio"]
        verdict = "own" if name == OWN else judge(ratio["output_tok_s"], chance[point["name"]], side["errors"])
        loads.append({
            "output_tok_s": side["output_tok_s"], "ratio": ratio["output_tok_s"], "tpot_ratio": ratio["tpot_ms"],
            "ttft_ratio": ratio["ttft_ms"], "errors": side["errors"], "verdict": verdict, "mark": MARKS.get(verdict),
            "apart_pct": None if point["noise"] is None else 100 * point["noise"],
            "front_end_pct": busy.get(point["name"]), "front_end_full": (busy.get(point["name"]) or 0) >= BUSY_PCT,
        })  # fmt: skip
    return {
        "variant": name, "what": what, "changes_answers": changes_answers,
        "kernels": [plain(kernel) for kernel in server.get("kernels") or []],
        "startup_s": server.get("startup_s"), "loads": loads,
    }  # fmt: skip


def _scaling_doc(root: Path, cell: str) -> Doc | None:
    from pipeline.tuning.records import fault

    path = f"artifacts/results/{cell}/scaling.json"
    if not (root / path).exists():
        return None
    doc = read_doc(root, path, scaling.SCHEMA)
    if doc.data is not None and (wrong := fault(doc.data, cell)):
        return Doc(path, None, f"{path} cannot be read: {plain(wrong, 300)}")
    return doc


def _scaled(doc: Doc) -> dict[str, Any]:
    shown: dict[str, Any] = {"path": doc.path, "problem": doc.problem, "run": None}
    if doc.data is None:
        return shown
    record = doc.data
    loads = [
        {
            "name": p["name"], "alone_tok_s": p["alone"]["output_tok_s"],
            "together_tok_s": p["together"]["output_tok_s"], "each_tok_s": p["together"]["each_tok_s"],
            "tensor_parallel_tok_s": p["tensor_parallel"]["output_tok_s"],
            "efficiency": {key: p["efficiency"][key] for key in ("cells", "tensor_parallel")},
            "speedup": p["speedup"]["tensor_parallel"]["output_tok_s"],
            "tpot_ratio": p["speedup"]["tensor_parallel"]["tpot_ms"],
            "errors": p["alone"]["errors"] + p["together"].get("errors", 0) + p["tensor_parallel"]["errors"],
        }
        for p in record["points"]
    ]  # fmt: skip
    names = {"all": "scaling, one server over all GPUs"}
    run = _run(record, lambda name: names.get(name, f"scaling, GPU {name}"))
    failed = [{"what": plain(name), "reason": plain(why)} for name, why in (record.get("failed") or {}).items()]
    return shown | {
        "gpus": record["gpus"],
        "workload": plain(record["workload"]),
        "loads": loads,
        "run": run,
        "failed": failed,
    }


def _run(record: dict[str, Any], label: Callable[[str], str]) -> dict[str, Any]:
    """Return how a run was made: what `How it was measured` prints of it."""
    servers = record["server"]
    commands = {label(name): s["command"] for name, s in servers.items() if isinstance(s.get("command"), str)}
    shared = said(record.get("common_options") or {})
    facts = {
        "server": f"{record['runtime']} " + ", ".join(sorted({str(s.get("version")) for s in servers.values()})),
        "workload": record["workload"], "order": record.get("order"), "options of every server": shared or None,
        "client": record.get("client"), "git commit": record.get("git_commit"),
        "finished": record.get("finished_at"), "took, s": record.get("wall_s"),
    }  # fmt: skip
    return {"facts": facts, "host": record["host"], "commands": commands}

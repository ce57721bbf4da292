"""Memory and predicted speed of every cell, beside what was measured: two kinds of number that are never mixed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.errors import QuantpressError
from pipeline.report.sources import Doc, plain, read_doc
from pipeline.shapes import config_of

Cells = list[dict[str, Any]]


def sizes_section(root: Path, params: Doc, groups: Cells, planned: Cells) -> dict[str, Any]:
    """Return {problem, measured: [table], planned: [table]}, a table for each target and model.

    A table is {target, runtime, model, facts (of the target), serving (where all rows have the same), rows}; a row
    holds the cell's prediction (see memory.cells.sizes) or a problem, its recipe, the weights and cache that were
    found, and its loads with measured over predicted: those that were measured, else two that stand for all.
    """
    from pydantic import ValidationError

    from pipeline.specs import Params

    section: dict[str, Any] = {"problem": None, "measured": [], "planned": []}
    try:
        known = Params.model_validate(params.data)
    except ValidationError:
        problem = params.problem or f"{params.path} is not whole; `python -m pipeline check` says what is wrong"
        return section | {"problem": f"not predicted ({problem})"}
    for group in groups:
        section["measured"].append(_table(root, known, params, group["cells"]))
    for members in _by_target(planned):
        section["planned"].append(_table(root, known, params, members))
    return section


def _by_target(cells: Iterable[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for cell in cells:
        groups.setdefault((cell["target"], cell["runtime"], cell["model"]), []).append(cell)
    return list(groups.values())


def _table(root: Path, known: Any, params: Doc, cells: list[dict[str, Any]]) -> dict[str, Any]:
    first = cells[0]
    keys = ("usable_gib", "memory_gib", "bandwidth_gb_s", "peaks_tflops", "source")
    facts = params.mapping("targets", first["target"])
    rows = [_row(root, known, cell) for cell in cells]
    loads = _shown(rows)
    for row in rows:
        row["loads"] = [load for load in row["loads"] if (load["workload"], load["concurrency"]) in loads]
        if row["sizes"]:
            del row["sizes"]["predicted"]  # every load is in `python -m pipeline serving --cell`
    served = [row["sizes"]["serving"] for row in rows if row["sizes"]]
    return {
        "serving": served[0] if served and all(_values(one) == _values(served[0]) for one in served) else None,
        "target": first["target"], "runtime": first["runtime"], "model": first["model"],
        "facts": {key: facts.get(key) for key in keys}, "rows": rows,
        "loads": [{"workload": workload, "concurrency": concurrency} for workload, concurrency in loads],
    }  # fmt: skip


def _shown(rows: Cells) -> list[tuple[str, int]]:
    """Return the loads to show: those that were measured, else the smallest and the largest of the first workload."""
    all_loads: Cells = next((row["loads"] for row in rows if row["loads"]), [])
    named = [(load["workload"], load["concurrency"]) for load in all_loads]
    found = {(d["workload"], d["concurrency"]) for row in rows for d in row["loads"] if d["measured_tok_s"] is not None}
    if found:
        return [load for load in named if load in found]
    first = sorted((load for load in named if load[0] == named[0][0]), key=lambda load: load[1])
    return list(dict.fromkeys((*first[:1], *first[-1:])))


def _values(serving: Cells) -> list[tuple[str, Any]]:
    return [(item["name"], item["value"]) for item in serving]


def _row(root: Path, known: Any, cell: dict[str, Any]) -> dict[str, Any]:
    from pipeline.memory.cells import CellIds, sizes

    row: dict[str, Any] = {"cell": cell["cell"], "recipe": cell["recipe"], "problem": None, "loads": [], "sizes": None}
    config = read_doc(root, f"artifacts/results/{cell['model']}/model.json", "quantpress.model/1").mapping("config")
    model = known.models.get(cell["model"]) if known else None
    config = config or (config_of(model.source) if model else None) or {}
    if cell["verdict"] not in ("native", "fallback"):
        return row | {"problem": f"not served on {cell['target']}"}
    if not config:
        return row | {"problem": "not predicted (the model's config.json is not known)"}
    try:
        found = sizes(known, CellIds(*(cell[key] for key in CellIds._fields)), config, cell["verdict"])
    except (QuantpressError, KeyError) as error:
        return row | {"problem": f"not predicted ({plain(error, 200)})"}
    return row | {"sizes": found, "loads": [_load(cell, load) for load in found["predicted"]]} | _found(cell)


def _found(cell: dict[str, Any]) -> dict[str, Any]:
    """Return what was measured of the same things: the artifact's bytes, and the cache that the server logged."""
    if "size" not in cell:
        return {"weight_bytes": None, "kv_cache_tokens": None}
    return {
        "weight_bytes": cell["size"]["weight_bytes"]["value"],
        "kv_cache_tokens": cell["server"]["kv_cache_tokens"]["value"],
    }


def _load(cell: dict[str, Any], predicted: dict[str, Any]) -> dict[str, Any]:
    """Return one load: predicted tokens a second or why not, measured ones, and measured over predicted."""
    measured = None
    for load in cell.get("speed", {}).get("workloads", []):
        for point in load["points"]:
            if (load["workload"], point["concurrency"]) == (predicted["workload"], predicted["concurrency"]):
                measured = point["candidate"]["output_tok_s"]["value"]
    bound = predicted["output_tok_s"]
    return {
        "workload": predicted["workload"], "concurrency": predicted["concurrency"], "predicted_tok_s": bound,
        "not_predicted": predicted["decode_reason"], "measured_tok_s": measured,
        "measured_over_predicted": measured / bound if measured and bound else None,
    }  # fmt: skip

"""Per target and workload: where each precision stops paying, and what bytes alone would allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.choice.paying import Load, pays
from pipeline.errors import QuantpressError
from pipeline.report.sources import Doc, Fact, absent, measured, plain, read_doc
from pipeline.shapes import config_of


def paying_rows(root: Path, params: Doc, group: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each cell and workload of a group that was timed on closed loads; the baseline has none.

    A row: cell, recipe, workload, text (see choice.paying.pays), loads [{concurrency, state, ratio, allowed}];
    `ratio` is measured, `allowed` is what bytes alone allow, predicted; both are facts. The first is the lowest load.
    """
    known, config = known_params(root, params, group["model"])
    rows = []
    for cell in group["cells"]:
        if cell["is_baseline"]:
            continue
        for load in cell["speed"]["workloads"]:
            points = [p for p in load["points"] if p["rate"] is None and p["concurrency"]]
            usable = [p for p in points if p["clean"] and p["ratio"]["output_tok_s"]["value"] is not None]
            if not points:
                continue
            found = [_load(point) for point in usable]
            rows.append({
                "cell": cell["cell"], "recipe": cell["recipe"], "workload": load["workload"], "text": pays(found),
                "loads": [
                    {"concurrency": p["concurrency"], "state": f.state, "ratio": p["ratio"]["output_tok_s"],
                     "allowed": _allowed(known, config, cell, load["workload"], p["concurrency"])}
                    for f, p in sorted(zip(found, usable, strict=True), key=lambda pair: pair[0].concurrency)
                ],
            })  # fmt: skip
    return rows


def _load(point: dict[str, Any]) -> Load:
    ratio = point["ratio"]["output_tok_s"]
    return Load(int(point["concurrency"]), ratio["value"], ratio["ci95"])


def _allowed(params: Any, config: dict[str, Any], cell: dict[str, Any], workload: str, concurrency: Any) -> Fact:
    from pipeline.memory.cells import CellIds
    from pipeline.memory.moved import bytes_ratio

    if params is None:
        return absent("not predicted: params.yaml is not whole")
    if not config:
        return absent("not predicted: the model's config.json is not known")
    try:
        ids = CellIds(*(cell[key] for key in CellIds._fields))
        value, why = bytes_ratio(params, ids, config, workload, int(concurrency))
    except (QuantpressError, KeyError) as error:
        return absent(f"not predicted: {plain(error, 200)}")
    return absent(f"not predicted: {why}") if value is None else measured(value)


def known_params(root: Path, params: Doc, model: str) -> tuple[Any, dict[str, Any]]:
    """Return the checked params, None where they are not whole, and the model's config.json, empty where unknown."""
    from pydantic import ValidationError

    from pipeline.specs import Params

    config = read_doc(root, f"artifacts/results/{model}/model.json", "quantpress.model/1").mapping("config")
    try:
        known = Params.model_validate(params.data)
    except ValidationError:
        return None, config
    source = known.models[model].source if model in known.models else ""
    return known, config or config_of(source) or {}

"""Where the report finds what belongs to a cell. The results are synthetic, as in test_report.py."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import yaml
from report_results import MODEL, build_results

from pipeline.choice.candidates import NOT_TIMED
from pipeline.report.choice import objective_lines, quality_line, same_outcome
from pipeline.report.collect import collect
from pipeline.report.figures import PALETTE, colours
from pipeline.report.warned import mark_warnings


def test_a_checkpoint_made_on_its_target_is_read_where_it_stands(tmp_path: Path) -> None:
    project = build_results(tmp_path)
    plan_file = project / "pipeline/plan.yaml"
    plan = yaml.safe_load(plan_file.read_text(encoding="utf-8"))
    (cell,) = [c for c in plan["cells"] if c["recipe"] == "int8" and c["target"] == "cpu"]
    cell["checkpoint"] = f"{MODEL}.int8.cpu"
    plan_file.write_text(yaml.safe_dump(plan), encoding="utf-8")
    results = project / "artifacts/results"
    (results / f"{MODEL}.int8").rename(results / f"{MODEL}.int8.cpu")
    cells = {c["cell"]: c for group in collect(project)["targets"] for c in group["cells"]}
    assert cells[cell["cell"]]["checkpoint"] == f"{MODEL}.int8.cpu"
    assert cells[cell["cell"]]["size"]["weight_bytes"]["value"] > 0


def test_a_recipe_has_one_colour_in_every_section() -> None:
    def cell(recipe: str) -> dict[str, Any]:
        return {"recipe": recipe, "is_baseline": recipe == "bf16"}

    recipes = ["int8", "fp8", "awq"]
    one = colours({"recipes": recipes, "cells": [cell("bf16"), cell("int8"), cell("awq")]})
    other = colours({"recipes": recipes, "cells": [cell("bf16"), cell("fp8"), cell("awq")]})
    assert one["awq"] == other["awq"] and one["bf16"] == other["bf16"]
    assert len({*one.values(), *other.values()}) == 4
    assert len(set(PALETTE)) == len(PALETTE) >= 16


def test_an_objective_that_some_cells_miss_is_in_the_answer() -> None:
    def row(recipe: str, meets: bool | None, at: str | None = None) -> dict[str, Any]:
        return {"recipe": recipe, "runtime": "vllm", "served": True, "is_baseline": recipe == "bf16", "quality": "PASS",
                "meets_objective": meets, "operating_point": at, "objective_why": "missed at c64: 9 of 10"}  # fmt: skip

    answer = {"slo": "chat", "objective": "TTFT <= 200 ms", "table": [row("bf16", False), row("fp8", True, "c64")]}
    idle = {"slo": "rag", "objective": "x", "table": [row("bf16", None), row("fp8", None)]}
    choice = {"targets": [{"model": "m", "target": "g", "answers": [answer, idle]}]}
    (line,) = objective_lines(choice, {"model": "m", "target": "g", "runtime": "vllm"})
    assert line["text"] == "chat (TTFT <= 200 ms): met by fp8 up to c64; bf16 (missed at c64: 9 of 10)."
    assert objective_lines(choice, {"model": "m", "target": "h", "runtime": "vllm"}) == []


def test_results_of_other_weights_name_the_command_that_finds_the_cell_on_any_host(tmp_path: Path) -> None:
    """A plain `dvc repro` leaves cells of another target alone."""
    project = build_results(tmp_path)
    cell = f"{MODEL}.int8.vllm.cpu"
    manifest = project / f"artifacts/packages/{cell}/deploy/manifest.json"
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text('{"schema": "quantpress.package/1", "checkpoint": {"digest": "other"}}', encoding="utf-8")
    bench = project / f"artifacts/results/{cell}/bench.json"
    bench.write_text(json.dumps(json.loads(bench.read_text(encoding="utf-8")) | {"package_digest": "then"}))
    cells = {c["cell"]: c for group in collect(project)["targets"] for c in group["cells"]}
    command = re.findall(r"`(.*?)`", cells[cell]["speed"]["problem"])[0]
    assert shlex.split(command) == ["uv", "run", "dvc", "repro", "--glob", f"*@{cell}"]
    assert "'" in command


def test_a_mark_that_many_timings_share_is_one_warning() -> None:
    def cell(recipe: str, load: int) -> dict[str, Any]:
        point = {"load": str(load), "marks": ["the client limited the load"]}
        timed = {"workload": "w", "marks": ["held back"], "points": [point]}
        return {"recipe": recipe, "speed": {"workloads": [timed]}}

    assert mark_warnings([cell("bf16", 1), cell("fp8", 1), cell("int4", 4)]) == [
        "Held back: bf16, fp8 and int4 under w.",
        "The client limited the load: bf16 and fp8 under w at 1; int4 under w at 4.",
    ]


def test_objectives_with_one_outcome_are_one_entry() -> None:
    def answer(slo: str, tok_s: float) -> dict[str, Any]:
        row = {"recipe": "fp8", "output_tok_s": tok_s}
        return {"slo": slo, "table": [row], "reasons": [], "would_change": ["fp8 leads"], "pareto": [], "winner": None}

    merged = same_outcome([answer("agent", 1.0), answer("chat", 2.0), answer("code", 1.0)])
    assert [[a["slo"] for a in answers] for answers in merged] == [["agent", "code"], ["chat"]]


def test_the_first_line_of_a_target_says_what_is_open() -> None:
    def row(recipe: str, quality: str, why: str) -> dict[str, Any]:
        return {"recipe": recipe, "served": True, "is_baseline": False, "quality": quality, "objective_why": why}

    untimed = {"slo": "chat", "table": [row("int8", "PASS", NOT_TIMED), row("fp8", "FAIL", NOT_TIMED)]}
    assert quality_line([untimed]) == "passed by int8; failed by fp8; open: speed (nothing was timed here)"
    timed = {"slo": "chat", "table": [row("int8", "INCONCLUSIVE", "missed at c4")]}
    assert quality_line([timed]) == "not settled for int8"

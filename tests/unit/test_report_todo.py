"""What is still to measure on a target, each with its command. The results are synthetic, as in test_report.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from report_results import build_results

from pipeline.report.collect import collect
from pipeline.report.html import code, page
from pipeline.report.sources import Doc
from pipeline.report.todo import todo

PARAMS = Doc("params.yaml", {"tasks": {"facts": {}, "mmlu": {"hub": True}, "arc": {"hub": True}}})
SPEED = {"what": "speed of int8", "command": "`uv run dvc repro benchmark@m.int8.vllm.g`", "slos": ["chat"]}


def group(**changes: Any) -> dict[str, Any]:
    """A target g on which the baseline was only timed beside another, without a price and with own tasks alone."""
    tasks = {"facts": {"accuracy": {"value": 0.5}}, "mmlu": {"accuracy": {"value": None}}}
    bf16 = {"cell": "m.bf16.vllm.g", "recipe": "bf16", "is_baseline": True, "measured_here": True,
            "speed": {"is_noise_floor": False, "problem": None}, "quality": {"tasks": tasks}}  # fmt: skip
    found = {"target": "g", "runtime": "vllm", "model": "m", "mark": None, "device": {"device": "cuda"}}
    return found | {"baseline": bf16["cell"], "cells": [bf16]} | changes


def choice(*items: dict[str, Any]) -> dict[str, Any]:
    return {"targets": [{"model": "m", "target": "g", "decide": list(items)}]}


def test_what_is_missing_has_a_command_each() -> None:
    found = {item["what"]: item["command"] for item in todo(PARAMS, choice(SPEED), group())}
    assert found["speed of int8"] == SPEED["command"]
    assert "`uv run dvc repro --glob 'benchmark@m.bf16.vllm.g'`" in found["the baseline timed against itself (A/A)"]
    assert "targets.g.price_usd_per_h in params.yaml" in found["cost: no price is given"]
    (public,) = [what for what in found if what.startswith("a public task")]
    assert "mmlu or arc" in found[public] and "`uv run dvc repro --glob 'evaluate@m.*.vllm.g'`" in found[public]


def test_what_is_there_is_not_asked_for() -> None:
    cell = group()["cells"][0]
    cell |= {"speed": {"is_noise_floor": True, "problem": None}}
    cell["quality"]["tasks"]["mmlu"]["accuracy"]["value"] = 0.4
    assert todo(PARAMS, choice(), group(cells=[cell], device={"device": "cuda", "price_usd_per_h": 2.0})) == []


@pytest.mark.parametrize("change", [{"mark": "random weights: speed only"}, {"device": {"device": "cpu"}}])
def test_what_has_no_meaning_on_a_target_is_not_asked_for(change: dict[str, Any]) -> None:
    """Random weights have no quality, and a CPU is not rented by the hour for this."""
    words = " ".join(item["what"] for item in todo(PARAMS, choice(), group(**change)))
    assert ("a public task" in words) == ("mark" not in change)


def test_a_baseline_whose_speed_is_asked_for_is_not_asked_for_twice() -> None:
    untimed = group()["cells"][0] | {"speed": {"is_noise_floor": False, "problem": "bench.json is missing"}}
    assert not any("A/A" in item["what"] for item in todo(PARAMS, choice(SPEED), group(cells=[untimed])))


def test_the_list_stands_at_the_head_of_a_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {"quality_speed": None, "left_out": [], "speed": [], "size": None}
    monkeypatch.setattr("pipeline.report.figures.figures", lambda group: drawn)
    html = page(collect(build_results(tmp_path)))
    head = html.split("<h2>On cpu")[1].split("<h3>At a glance")[0]
    assert "To decide here, still to measure" in head
    assert re.search(r"Cost: no price is given.*?targets\.cpu\.price_usd_per_h in params\.yaml", head, re.DOTALL)


def test_commands_are_shown_as_code_and_nothing_comes_through_unescaped() -> None:
    assert code("run `a < b` on `c`, d & e") == "run <code>a &lt; b</code> on <code>c</code>, d &amp; e"
    assert code("`<b>` and one ` more") == "`&lt;b&gt;` and one ` more"

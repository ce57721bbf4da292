"""What the pictures draw: single legs behind their mean, hollow marks for flagged timings, and the baseline's 1."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.report.cells import leg_ratios
from pipeline.report.figures import figures
from pipeline.report.sources import Doc


def cell(recipe: str, ratio: float, marks: list[str], legs: list[float], load_marks: list[str]) -> dict[str, Any]:
    """A cell that was timed at one load."""
    point = {"concurrency": 4, "ratio": {"output_tok_s": {"value": ratio, "ci95": None}}, "marks": marks}
    timed = {"workload": "w", "marks": load_marks, "points": [point | {"leg_ratios": legs}]}
    kept = {"perplexity_kept_pct": {"value": 98.0, "ci95": None, "not_measured": ""}}
    return {
        "recipe": recipe, "is_baseline": False, "verdict": "native", "canary": {"passed": True},
        "quality": {"fidelity": kept}, "speed": {"workloads": [timed], "is_noise_floor": False, "problem": None},
        "size": {"weight_bytes": {"value": 1e8}, "effective_bits_per_weight": {"value": 8.0}},
    }  # fmt: skip


def drawn(**changes: Any) -> tuple[str, str]:
    """Return the picture of quality against speed, and the one by concurrency, of one cell at 1.3x."""
    given = {"ratio": 1.3, "marks": [], "legs": [], "load_marks": []} | changes
    cells = [cell("bf16", 1.0, [], [], []) | {"is_baseline": True}, cell("fp8", **given)]
    group = {"target": "g", "runtime": "vllm", "model": "m", "recipes": ["fp8"], "noise_floor": None,
             "reference": {"workload": "w", "concurrency": 4}, "cells": cells}  # fmt: skip
    found = figures(group)
    return found["quality_speed"]["wide"], found["speed"][0]


def test_legs_are_ratios_over_the_mean_of_the_baseline() -> None:
    point = {"candidate": {"repeats": {"output_tok_s": [90.0, 130.0]}}, "baseline": {"output_tok_s": 100.0}}
    assert leg_ratios(Doc("x", point)) == [0.9, 1.3]
    assert leg_ratios(Doc("x", point | {"baseline": {}})) == []


def test_single_legs_stand_behind_their_mean() -> None:
    assert all("-leg" in svg for svg in drawn(legs=[1.2, 1.4]))
    # One leg is the mean itself, and says nothing.
    assert not any("-leg" in svg for svg in drawn(legs=[1.3]))


@pytest.mark.parametrize("change", [{"marks": ["the client limited the load"]}, {"load_marks": ["held back"]}])
def test_a_flagged_timing_is_hollow(change: dict[str, Any]) -> None:
    assert all("-flagged" in svg for svg in drawn(**change))
    assert not any("-flagged" in svg for svg in drawn())

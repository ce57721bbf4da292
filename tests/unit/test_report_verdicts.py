"""The report shows the gate's verdicts: the word, what the sample could have seen, and the evidence on demand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_results import MODEL, build_results

from pipeline.evidence.checks import Check, judge
from pipeline.evidence.policy import Policy
from pipeline.evidence.verdicts import of_items
from pipeline.report.card import card_text
from pipeline.report.collect import collect
from pipeline.report.html import page

CELL, BASE = f"{MODEL}.int8.vllm.cpu", f"{MODEL}.bf16.vllm.cpu"


def gate_json(verdict: str, worse: int = 12, why: str = "qp-facts: too few items") -> dict[str, object]:
    """A gate's record of one judged cell and its baseline."""
    policy = Policy(ship=[CELL], required=[])
    task = Check("tasks", "critical", -0.5, "at most 3 lost", "pp", of_items(400, worse, 8, 0.03), scale="accuracy")
    sound = {"verdict": "PASS", "checks": {"canary": {"verdict": "PASS", "reason": "passed"}}}
    floor = {"tasks": {"qp-facts": {"n": 100, "flips_right_to_wrong": 1, "flips_wrong_to_right": 0}},
             "fidelity": {"kl_mean": 0.0002}, "canary": {"prompts": 24, "answers_changed": 2}}  # fmt: skip
    cell = {"verdict": verdict, "ship": True, "is_baseline": False, "reasons": [why], "notes": [],
            "baseline_health": sound, "checks": judge({"qp-facts": task}, policy)}  # fmt: skip
    base = {"verdict": "PASS", "ship": False, "is_baseline": True, "reasons": [], "checks": {},
            "baseline_health": sound, "noise_floor": floor}  # fmt: skip
    return {"schema": "quantpress.gate/1", "cells": {CELL: cell, BASE: base}}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project without pictures: only words are tested."""
    drawn = {"quality_speed": None, "left_out": [], "speed": [], "size": None}
    monkeypatch.setattr("pipeline.report.figures.figures", lambda group: drawn)
    return build_results(tmp_path)


def put(root: Path, record: dict[str, object]) -> None:
    """Write the gate's record."""
    (root / "artifacts/gate.json").write_text(json.dumps(record), encoding="utf-8")


def test_the_verdict_stands_first_with_what_the_sample_could_have_seen(project: Path) -> None:
    put(project, gate_json("INCONCLUSIVE"))
    report = collect(project)
    first = report["targets"][0]["answer"][0]
    assert first["topic"] == "Verdict"
    assert first["lead"] == "int8 INCONCLUSIVE"
    assert "int8 decides the gate: qp-facts: too few items." in first["text"]
    html = page(report)
    assert "sees 2.8 pp of qp-facts" in html
    assert "1 of 100 qp-facts items flipped; KL mean 0.0002 nats; 2 of 24 canary answers changed" in html
    assert "The baseline is sound." in html
    cell = next(c for c in report["targets"][0]["cells"] if c["cell"] == CELL)
    assert cell["gate"]["checks"][0]["sample"] == "400 items"
    assert "**Verdict by policy.yaml: INCONCLUSIVE (sees 2.8 pp of qp-facts).** This is not a pass." in card_text(
        report, cell, report["targets"][0]
    )


def test_without_a_gate_nothing_is_judged_and_the_page_says_so(project: Path) -> None:
    report = collect(project)
    assert all(line["topic"] != "Verdict" for line in report["targets"][0]["answer"])
    assert "not judged (artifacts/gate.json is missing)" in page(report)


def test_what_failed_the_policy_is_never_named_as_best(project: Path) -> None:
    before = {line["topic"]: line["lead"] for line in collect(project)["targets"][0]["answer"]}
    assert before["Closest to the baseline"].startswith("int8")
    put(project, gate_json("FAIL", worse=60))
    after = {line["topic"]: line["lead"] for line in collect(project)["targets"][0]["answer"]}
    assert after["Verdict"] == "int8 FAIL"
    assert not after["Closest to the baseline"].startswith("int8")


def test_text_of_the_gate_is_escaped(project: Path) -> None:
    put(project, gate_json("FAIL", why="<script>alert(1)</script>"))
    assert "<script>alert" not in page(collect(project))


def test_a_gate_of_an_unknown_schema_is_named(project: Path) -> None:
    put(project, gate_json("PASS") | {"schema": "quantpress.gate/9"})
    assert "its schema is &#39;quantpress.gate/9&#39;" in page(collect(project))


def test_what_is_only_not_measured_is_told_apart_from_what_is_not_settled(project: Path) -> None:
    """One word in one place and another elsewhere reads as a contradiction: the word comes with what is open."""
    put(project, gate_json("INCONCLUSIVE", why="required and not measured: speed"))
    (cell,) = [c for g in collect(project)["targets"] for c in g["cells"] if c["recipe"] == "int8"]
    assert cell["gate"]["open"] == "passes all that was measured; not measured: speed"
    glance = page(collect(project)).split("<h3>At a glance")[1].split("</table>")[0]
    assert "passes all that was measured; not measured: speed" in glance
    put(project, gate_json("INCONCLUSIVE"))
    (cell,) = [c for g in collect(project)["targets"] for c in g["cells"] if c["recipe"] == "int8"]
    assert cell["gate"]["open"] == ""

"""The gate: what passes, what fails, what is inconclusive, and a policy that is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from gate_results import BF16, INT8, ROOT, bench_json, build, change, edit_policy, put, task

from pipeline.errors import InputError
from pipeline.evidence.gate import gate
from pipeline.evidence.summary import cell_text, markdown

Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose gate is PASS."""
    return build(tmp_path)


def of(root: Path, cell: str, name: str = "eval") -> Path:
    """The path of a cell's result."""
    return root / f"artifacts/results/{cell}/{name}.json"


def verdict(root: Path) -> tuple[str, str]:
    """The gate's verdict and the reasons of the deciding cell."""
    found = gate(root)
    assert found["exit_code"] == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 4}[found["verdict"]]
    return found["verdict"], " / ".join(found["cells"][INT8]["reasons"])


def test_a_sound_cell_with_enough_items_passes(project: Path) -> None:
    assert verdict(project) == ("PASS", "")
    found = gate(project)
    assert found["decided_by"] == [INT8]
    assert found["cells"][BF16]["verdict"] == "PASS"
    facts = found["cells"][INT8]["checks"]["facts"]
    assert 0 < facts["smallest_damage_seen"] < 3
    assert facts["damage_unit"] == "pp"


@pytest.mark.parametrize(("edit", "expected", "said"), [
    (lambda e: e["tasks"].update(facts=task(200, 20)), "FAIL", "facts: damage 9 pp"),
    (lambda e: e["tasks"].update(facts=task(20, 20, 200)), "INCONCLUSIVE", "200 items, a firm answer needs about"),
    (lambda e: e["tasks"].clear(), "INCONCLUSIVE", "required and not measured: tasks"),
    (lambda e: e["canary"].update(passed=False), "FAIL", "canary: fail (failed)"),
    (lambda e: e["fidelity"].update(perplexity_ratio=1.09), "FAIL", "perplexity_ratio: damage 9 %"),
    (lambda e: e["fidelity"].update(log_perplexity_ratio_se=0.05), "INCONCLUSIVE", "perplexity_ratio"),
    (lambda e: e["fidelity"].update(perplexity_ratio=None), "INCONCLUSIVE", "not measured"),
    (lambda e: e["fidelity"].update(kl_mean=0.3), "FAIL", "kl_mean"),
    (lambda e: e["fidelity"].update(kl_mean=0.0999), "PASS", ""),
    (lambda e: e["fidelity"].update(kl_mean=None), "PASS", ""),
    (lambda e: e.update(fidelity={}), "INCONCLUSIVE", "required and not measured: fidelity"),
    (lambda e: e["canary"]["lengths"].update(length_ratio=1.6), "PASS", ""),
    (lambda e: e["canary"]["lengths"].update(repeated=9), "FAIL", "broken_answers canary"),
    (lambda e: e["server"].update(version=None), "INCONCLUSIVE", "does not name vllm and its version"),
    (lambda e: e.update(package_digest="d0"), "INCONCLUSIVE", "is stale"),
    (lambda e: e.update(schema="quantpress.eval/9"), "INCONCLUSIVE", "its schema is 'quantpress.eval/9'"),
])  # fmt: skip
def test_what_the_evaluation_shows_decides(project: Path, edit: Edit, expected: str, said: str) -> None:
    change(of(project, INT8), edit)
    found, reasons = verdict(project)
    assert found == expected, reasons
    assert said in reasons + json.dumps(gate(project))


def test_inconclusive_is_never_pass_however_good_it_looks(project: Path) -> None:
    """Nothing flipped, in too few items: no damage seen, and nothing shown."""
    change(of(project, INT8), lambda e: e["tasks"].update(facts=task(0, 0, 60)))
    assert verdict(project)[0] == "INCONCLUSIVE"


@pytest.mark.parametrize("name", ["eval", "bench"])
def test_a_missing_result_that_is_required_does_not_pass(project: Path, name: str) -> None:
    of(project, INT8, name).unlink()
    found, reasons = verdict(project)
    assert found == "INCONCLUSIVE"
    assert "required and not measured: " in reasons


def test_a_result_of_another_kind_of_machine_is_not_evidence(project: Path) -> None:
    cell = "smollm2-135m.int8.vllm.h100"
    edit_policy(project, lambda p: p.update(ship=[cell]))
    assert gate(project)["verdict"] == "INCONCLUSIVE"
    for source, name in ((INT8, "eval"), (INT8, "bench")):
        put(of(project, cell, name), json.loads(of(project, source, name).read_text(encoding="utf-8")))
    edit_policy(project, lambda p: p.update(ship=[INT8]))
    assert cell in gate(project)["cells"], "what has results is judged, whoever measured it"
    edit_policy(project, lambda p: p.update(ship=[cell]))
    put(of(project, BF16.replace("cpu", "h100")), json.loads(of(project, BF16).read_text(encoding="utf-8")))
    found = gate(project)
    assert found["verdict"] == "INCONCLUSIVE"
    assert any("not on NVIDIA H100 SXM" in r for r in found["cells"][cell]["reasons"])
    for name in ("eval", "bench"):
        change(of(project, cell, name), lambda e: e["host"].update(gpus=[{"name": "NVIDIA H100 SXM 80GB"}]))
    assert gate(project)["verdict"] == "PASS"


@pytest.mark.parametrize(("edit", "said"), [
    (lambda e: e["canary"].update(passed=False, failures=[{"reason": "empty"}]), "canary: failed (empty)"),
    (lambda e: e["fidelity"].update(perplexity=40_000.0), "perplexity: 40000.0"),
    (lambda e: e["fidelity"].update(perplexity="nan"), "not a finite number"),
    (lambda e: e["tasks"]["facts"].update(accuracy=0.26), "not above chance"),
])  # fmt: skip
def test_a_broken_base_model_is_named_as_the_cause(project: Path, edit: Edit, said: str) -> None:
    change(of(project, BF16), edit)
    found, reasons = verdict(project)
    assert found == "FAIL"
    assert reasons.startswith("the base model is broken, not the quantization: ")
    assert said in reasons


def test_a_baseline_that_was_not_measured_is_no_pass(project: Path) -> None:
    of(project, BF16).unlink()
    found, reasons = verdict(project)
    assert found == "INCONCLUSIVE"
    assert "the baseline's health is not known" in reasons


@pytest.mark.parametrize(("ratio", "tier", "expected"), [
    (0.8, "supporting", "FAIL"), (0.99, "supporting", "PASS"), (0.99, "critical", "INCONCLUSIVE"),
    (0.8, "advisory", "PASS"),
])  # fmt: skip
def test_speed_floors_and_tiers(project: Path, ratio: float, tier: str, expected: str) -> None:
    put(of(project, INT8, "bench"), bench_json(ratio))
    edit_policy(project, lambda p: p["speed"][0].update(tier=tier))
    assert verdict(project)[0] == expected


def test_a_floor_of_another_target_is_not_judged(project: Path) -> None:
    found = gate(project)["cells"][INT8]["checks"]
    assert not [name for name in found if "brief-128-128" in name]
    assert "output_tok_s smoke-64-16 c4" in found


def test_required_speed_without_a_floor_asks_that_something_was_timed(project: Path) -> None:
    edit_policy(project, lambda p: p.update(speed=[]))
    assert verdict(project) == ("PASS", "")
    point = bench_json()
    point["workloads"]["smoke-64-16"]["points"][0]["candidate"]["output_tokens_ok"] = False
    put(of(project, INT8, "bench"), point)
    assert verdict(project) == ("INCONCLUSIVE", "required and not measured: speed")
    of(project, INT8, "bench").unlink()
    assert verdict(project) == ("INCONCLUSIVE", "required and not measured: speed")


def test_a_floor_of_a_target_that_is_not_measured_is_only_not_judged(project: Path) -> None:
    """Who trims the matrix to one target keeps the policy."""
    path = project / "params.yaml"
    params = yaml.safe_load(path.read_text(encoding="utf-8"))
    params["matrix"] = [row for row in params["matrix"] if row.get("measure") is True]
    params["tuning"] = {}
    path.write_text(yaml.safe_dump(params), encoding="utf-8")
    assert verdict(project) == ("PASS", "")


def test_a_slow_cell_is_slower_by_what_it_lacks_and_counted_in_legs(project: Path) -> None:
    put(of(project, INT8, "bench"), bench_json(0.58))
    check = gate(project)["cells"][INT8]["checks"]["output_tok_s smoke-64-16 c4"]
    assert check["damage"] == pytest.approx(42.0)
    assert (check["items"], check["item"]) == (2, "legs")
    assert str(check["margin"]) == "0.0"


def test_lengths_of_answers_that_were_mostly_cut_are_not_judged(project: Path) -> None:
    change(of(project, INT8), lambda e: e["canary"]["lengths"].update(both_cut=e["canary"]["lengths"]["answers"] - 1))
    check = gate(project)["cells"][INT8]["checks"]["length_ratio canary"]
    assert check["verdict"] == "NOT MEASURED"
    assert "pairs of answers were cut at the limit" in check["reason"]


def test_a_task_that_has_too_few_items_is_said_to(project: Path) -> None:
    change(
        of(project, INT8), lambda e: e["tasks"].update(facts=task(20, 20, 200) | {"chosen": {"items": 200, "of": 200}})
    )
    found, reasons = verdict(project)
    assert found == "INCONCLUSIVE"
    assert "(200 items is all there is)" in reasons
    assert "is all there is" in markdown(gate(project))


def test_a_timing_with_errors_is_not_used(project: Path) -> None:
    def spoil(bench: dict[str, Any]) -> None:
        for point in bench["workloads"]["smoke-64-16"]["points"]:
            point["candidate"] = {"errors": 3, "output_tokens_ok": True}

    change(of(project, INT8, "bench"), spoil)
    assert "required and not measured: speed" in verdict(project)[1]


def test_size_limits(project: Path) -> None:
    edit_policy(project, lambda p: p["limits"].update(weights_over_source={"tier": "critical", "max": 0.5}))
    assert verdict(project)[0] == "FAIL"
    edit_policy(project, lambda p: p["limits"].update(weights_over_source={"tier": "critical", "max": 0.7}))
    edit_policy(project, lambda p: p["limits"].update(server_memory_gib={"tier": "critical", "max": 8}))
    assert verdict(project)[0] == "INCONCLUSIVE"
    change(of(project, INT8), lambda e: e["server"].update(memory_gib=3.5))
    assert verdict(project)[0] == "PASS"


def test_a_generating_task_is_judged_by_its_answers_too(project: Path) -> None:
    answers = {"answers": 500, "empty": 0, "repeated": 0, "unparsable": 100, "length_ratio": 1.5,
               "length_log_ratio_se": 0.01, "baseline": {"answers": 500}}  # fmt: skip
    change(of(project, INT8), lambda e: e["tasks"].update(gsm8k=task(5, 5) | {"answers": answers}))
    found = gate(project)["cells"][INT8]["checks"]
    assert found["length_ratio gsm8k"]["verdict"] == "FAIL"
    assert found["broken_answers gsm8k"]["value"] == pytest.approx(20)


def test_repeated_answers_are_judged_by_their_error(project: Path) -> None:
    entry = {"n": 30, "binary": False, "delta_pp": -1.0, "delta_pp_se": 1.0, "answers": None}
    change(of(project, INT8), lambda e: e["tasks"].update(aime25=entry))
    assert gate(project)["cells"][INT8]["checks"]["aime25"]["verdict"] == "PASS"


def test_a_task_without_a_margin_is_named(project: Path) -> None:
    edit_policy(project, lambda p: p["tasks"].pop("facts"))
    found = gate(project)["cells"][INT8]
    assert found["notes"] == ["task facts has no margin in policy.yaml"]
    assert "tasks" in found["missing"]


@pytest.mark.parametrize(("edit", "message"), [
    (lambda p: p.update(tsks={}), "Did you mean 'tasks'"),
    (lambda p: p["quality"].update(perplexity_rato={"tier": "critical", "max": 2}), "Did you mean 'perplexity_ratio'"),
    (lambda p: p["quality"]["length_ratio"].update(mn=1), "Did you mean 'min'"),
    (lambda p: p["tasks"].update(fact={"tier": "critical", "margin_pp": 1}), "Did you mean 'facts'"),
    (lambda p: p["tasks"]["facts"].update(margin=1), "Did you mean 'margin_pp'"),
    (lambda p: p["tasks"]["facts"].update(tier="critcal"), "Did you mean 'critical'"),
    (lambda p: p["tasks"]["facts"].update(margin_pp=0), "greater than 0"),
    (lambda p: p["tasks"]["facts"].update(margin_pp="wide"), "tasks.facts.margin_pp"),
    (lambda p: p.update(required=["fidelty"]), "Did you mean 'fidelity'"),
    (lambda p: p.update(ship=["smollm2-135m.int9.vllm.cpu"]), "matches no cell of the plan. Did you mean"),
    (lambda p: p.update(ship=[]), "ship"),
    (lambda p: p["speed"][0].update(workload="smoke"), "no workload 'smoke'"),
    (lambda p: p["speed"][0].update(concurrency=5), "no concurrency 5; it has 1, 4"),
    (lambda p: p["speed"][0].update(max=2), "give one of min and max"),
    (lambda p: p["speed"][0].update(targets=["h20"]), "'h20' of floor output_tok_s smoke-64-16 c4 matches no target."),
    (lambda p: p["speed"][0].update(targets=["h20"]), "Did you mean 'h200'"),
    (lambda p: p["speed"][0].update(targets=["h200"]), "They time h200: brief-128-128, brief-2048-512."),
    (lambda p: p["speed"][0].update(targets=[]), "speed.0.targets"),
    (lambda p: p["speed"][0].update(targets=["*"], workload="closed-128-128"), "They time cpu: smoke-64-16; h200: "),
    (lambda p: p["speed"][0].update(metric="output_tok"), "Did you mean 'output_tok_s'"),
    (lambda p: p.update(alpha=0.7), "alpha"),
    (lambda p: p["limits"].update(weights=1), "unknown key 'limits.weights'"),
    (lambda p: p["quality"]["length_ratio"].update(min=2), "min 2 is not below max 1.1"),
    (lambda p: p.pop("ship"), "'ship' is missing"),
])  # fmt: skip
def test_a_wrong_policy_is_one_sentence_with_the_nearest_name(project: Path, edit: Edit, message: str) -> None:
    edit_policy(project, edit)
    with pytest.raises(InputError) as caught:
        gate(project)
    assert message in str(caught.value)
    assert str(caught.value).count("\n") == 0


def _check(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pipeline", "gate", *arguments]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


def test_the_command_ends_with_the_verdicts_code_and_a_comment(project: Path) -> None:
    done = _check(project, "--check")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("## ✅ quantpress gate: PASS\n")
    assert not (project / "artifacts/gate.json").exists()
    change(of(project, INT8), lambda e: e["tasks"].update(facts=task(20, 20, 200)))
    done = _check(project, "--check")
    assert done.returncode == 4
    assert "This is not a pass." in done.stdout
    change(of(project, INT8), lambda e: e["canary"].update(passed=False))
    assert _check(project, "--check").returncode == 1


def test_the_stage_writes_a_metric_and_never_fails_the_run(project: Path) -> None:
    change(of(project, INT8), lambda e: e["canary"].update(passed=False))
    done = _check(project)
    assert done.returncode == 0
    assert json.loads((project / "artifacts/gate.json").read_text(encoding="utf-8"))["verdict"] == "FAIL"


def test_a_missing_or_broken_policy_is_wrong_input(project: Path) -> None:
    (project / "policy.yaml").write_text("ship: [a\n", encoding="utf-8")
    done = _check(project, "--check")
    assert (done.returncode, "is not valid YAML" in done.stderr) == (2, True)
    (project / "policy.yaml").unlink()
    done = _check(project, "--check")
    assert (done.returncode, "policy.yaml is missing" in done.stderr) == (2, True)


def test_the_comment_is_a_table_that_nothing_can_break(project: Path) -> None:
    evil = "a | b\n<script>alert(1)</script> @all `x`"
    change(of(project, INT8), lambda e: e["tasks"].update({evil: task(1, 1)}))
    text = markdown(gate(project))
    assert "<script>" not in text
    assert "@all" not in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {9, 4}
    assert cell_text("a|b\nc") == "a\\|b c"

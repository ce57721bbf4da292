"""Comparisons between revisions, refusals, and an upgrade judged like a new precision. Every number is invented."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipeline.choice.alike import speed_differences
from pipeline.choice.compare import compare, eval_differences, text
from pipeline.choice.revisions import Revision, tags
from pipeline.errors import InputError, WorkError
from pipeline.speed.definitions import definitions

ROOT = Path(__file__).parents[2]
BENCH: dict[str, Any] = {
    "schema": "quantpress.bench/1", "definitions": definitions(), "package_digest": "d",
    "server": {"candidate": {"runtime": "vllm", "version": "0.32.0", "environment": "vllm_cpu", "threads": 1}},
    "locks": {"client": "c", "vllm_cpu": "v"}, "client": {"tool": "aiperf 0.13.0"},
    "host": {"cpu": "X", "cores": 2, "memory_gib": 8, "os": "Linux", "machine": "a", "gpus": []},
    "workloads": {"w": {"prompt_tokens": 64, "output_tokens": 16, "mix": None, "streaming": True,
                        "against": "baseline", "order": "AB", "points": []}},
    "summary": {"w": {"c4": {"output_tok_s": 100.0, "speedup": 1.2}}},
}  # fmt: skip
EVAL: dict[str, Any] = {
    "schema": "quantpress.eval/2", "package_digest": "d", "versions": {"lm-eval": "0.4.13"},
    "server": {"runtime": "vllm", "version": "0.32.0", "environment": "vllm_cpu", "threads": 2},
    "locks": BENCH["locks"], "host": BENCH["host"], "canary": {"passed": True},
    "fidelity": {"top_k": 20, "tokens": 16, "windows": 4, "perplexity": 20.0, "kl_mean": 0.01},
    "tasks": {"facts": {"n": 400, "accuracy": 0.8}},
}  # fmt: skip
CELL = "m.int8.vllm.cpu"


def changed(base: dict[str, Any], *keys: str, value: Any) -> dict[str, Any]:
    """A deep copy with one value replaced."""
    copy = json.loads(json.dumps(base))
    node = copy
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    return dict(copy)


@pytest.mark.parametrize(("keys", "value", "kind", "field"), [
    (("definitions", "ttft_ms", "id"), "ttft/1", "definition", "definitions.ttft_ms"),
    (("host", "machine"), "b", "host", "host.machine"),
    (("host", "gpus"), [{"name": "NVIDIA H200"}], "host", "host.gpus"),
    (("server", "candidate", "version"), "0.33.0", "version", "server.version"),
    (("locks", "vllm_cpu"), "w", "version", "locks.vllm_cpu"),
    (("client", "tool"), "aiperf 0.14.0", "version", "client.tool"),
    (("server", "candidate", "threads"), 2, "settings", "server.threads"),
    (("workloads", "w", "output_tokens"), 32, "workload", "workloads.w.output_tokens"),
    (("workloads", "w", "order"), "ABBA", "workload", "workloads.w.order"),
    (("workloads",), {"x": {}}, "workload", "workloads"),
])  # fmt: skip
def test_unlike_timings_are_refused_with_the_field(keys: tuple[str, ...], value: Any, kind: str, field: str) -> None:
    assert speed_differences(BENCH, BENCH) == []
    (found,) = speed_differences(BENCH, changed(BENCH, *keys, value=value))
    assert (found.kind, found.field) == (kind, field)
    assert field in found.words()


@pytest.mark.parametrize(("keys", "value", "field"), [
    (("fidelity", "top_k"), 10, "fidelity.top_k"),
    (("tasks", "facts", "n"), 40, "tasks.facts.n"),
    (("versions", "lm-eval"), "0.5", "versions.lm-eval"),
    (("schema",), "quantpress.eval/1", "schema"),
])  # fmt: skip
def test_unlike_evaluations_are_refused_with_the_field(keys: tuple[str, ...], value: Any, field: str) -> None:
    assert eval_differences(EVAL, EVAL) == []
    assert [d.field for d in eval_differences(EVAL, changed(EVAL, *keys, value=value))] == [field]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A git repository with a release v1 and a faster v2 of one cell."""
    folder = tmp_path / "artifacts/results" / CELL
    folder.mkdir(parents=True)

    def git(*arguments: str) -> None:
        command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for tag, tok_s in (("v1", 100.0), ("v2", 110.0)):
        bench = changed(BENCH, "summary", "w", "c4", "output_tok_s", value=tok_s)
        (folder / "bench.json").write_text(json.dumps(bench), encoding="utf-8")
        (folder / "eval.json").write_text(json.dumps(EVAL), encoding="utf-8")
        git("add", "-A")
        git("commit", "-qm", tag)
        git("tag", tag)
    return tmp_path


def test_two_revisions_are_compared_and_a_refusal_says_what_differs(repository: Path) -> None:
    found = compare(repository, "v1", "v2")
    (row,) = found["cells"]
    assert found["exit_code"] == 0
    assert row["speed"][0] == {"what": "w c4 output_tok_s", "old": 100.0, "new": 110.0, "ratio": pytest.approx(1.1)}
    assert "w c4 output_tok_s: 100 -> 110  (+10.0%)" in text(found)
    path = repository / f"artifacts/results/{CELL}/bench.json"
    path.write_text(json.dumps(changed(BENCH, "server", "candidate", "version", value="0.33.0")), encoding="utf-8")
    found = compare(repository, "v2", None)
    assert found["exit_code"] == 2
    assert found["cells"][0]["speed"] is None
    assert "speed is not compared: server.version: 0.32.0 against 0.33.0" in text(found)
    assert "add --upgrade" in text(found)
    assert tags(repository) == ["v1", "v2"]
    with pytest.raises(InputError, match="no revision 'v3'"):
        compare(repository, "v3", None)
    with pytest.raises(InputError, match=r"Did you mean 'm\.int8\.vllm\.cpu'"):
        compare(repository, "v1", "v2", cell="m.int9.vllm.cpu")
    path.write_text("{", encoding="utf-8")
    with pytest.raises(WorkError, match="is not valid JSON"):
        compare(repository, "v1", None)


def test_an_upgrade_without_the_old_answers_is_inconclusive_and_says_why(repository: Path) -> None:
    path = repository / f"artifacts/results/{CELL}/eval.json"
    path.write_text(json.dumps(changed(EVAL, "server", "version", value="0.33.0")), encoding="utf-8")
    found = compare(repository, "v2", None, upgrade=True)
    (row,) = found["cells"]
    assert found["exit_code"] == 4
    assert row["changed"][0]["field"] == "server.version"
    assert row["upgrade"]["verdict"] == "INCONCLUSIVE"
    assert "not in the DVC cache" in row["upgrade"]["reasons"][0]


def test_an_upgrade_is_paired_item_by_item_and_judged_by_the_policy(tmp_path: Path, monkeypatch: Any) -> None:
    """The old engine's answers against the new one's: 30 of 400 items lost is more than the policy's 3 pp."""
    from pipeline.choice import upgrade

    cell = "smollm2-135m.int8.vllm.cpu"
    for name in ("params.yaml", "policy.yaml", "pipeline/plan.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        shutil.copy(ROOT / name, tmp_path / name)
    results = tmp_path / "artifacts/results" / cell
    results.mkdir(parents=True)
    (results / "eval.json").write_text(json.dumps(EVAL), encoding="utf-8")

    def folder(name: str, wrong: int) -> Path:
        path = tmp_path / name
        path.mkdir()
        scores = {str(i): float(i >= wrong) for i in range(400)}
        (path / "scores.facts.json").write_text(json.dumps(scores), encoding="utf-8")
        return path

    folders = {"old": folder("old", 0), "same": folder("same", 0), "worse": folder("worse", 30)}
    found = {}
    for case in ("same", "worse"):
        monkeypatch.setattr(
            upgrade, "reference", lambda root, c, rev, out, case=case: folders[case if rev.name is None else "old"]
        )
        old = Revision.__new__(Revision)
        old.root, old.name, old.commit = tmp_path, "v1", "0" * 40
        found[case] = upgrade.judge_upgrade(tmp_path, cell, old, Revision(tmp_path, None))
    assert found["same"]["checks"]["facts"]["verdict"] == "PASS"
    assert found["worse"]["checks"]["facts"]["verdict"] == "FAIL"
    assert found["worse"]["verdict"] == "FAIL"
    assert found["same"]["verdict"] != "PASS"  # nothing says how the logits moved


def test_the_trend_over_tags_marks_neighbours_that_are_not_alike(repository: Path) -> None:
    from pipeline.report.choice import trend

    path = repository / f"artifacts/results/{CELL}/bench.json"
    path.write_text(json.dumps(changed(BENCH, "host", "machine", value="b")), encoding="utf-8")
    (row,) = trend(repository)
    assert [(p["at"], p["output_tok_s"]) for p in row["points"]] == [("v1", 100.0), ("v2", 110.0), ("now", 100.0)]
    assert [p["break"] for p in row["points"]] == [None, None, "host.machine: a against b"]
    subprocess.run(["git", "tag", "-d", "v1", "v2"], cwd=repository, check=True, capture_output=True)
    assert trend(repository) == []


def test_the_report_leads_with_what_to_ship_and_names_what_it_cannot_read(tmp_path: Path) -> None:
    from pipeline.report.choice import choice_section

    found = choice_section(ROOT)
    assert found["problem"] is None
    assert [g["measured"] for g in found["targets"]] == sorted((g["measured"] for g in found["targets"]), reverse=True)
    assert found["targets"][0]["target"] == "cpu"
    assert all(item["command"] for g in found["targets"] for item in g["decide"])
    assert choice_section(tmp_path)["problem"].endswith("run from the root of the repository.")

"""One whole `dvc repro` on the real model and the real engine, with fewer recipes and a shorter workload."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e
SERVED = ("bf16", "int4")
RECIPES = ("bf16", "int4", "fp8-dynamic")


def _shorter(params: dict) -> None:  # type: ignore[type-arg]
    params["matrix"] = [
        {
            "models": ["smollm2-135m"],
            "recipes": list(RECIPES),
            "runtimes": ["vllm"],
            "targets": ["cpu"],
            "measure": True,
        },
        {"models": ["smollm2-135m"], "recipes": list(RECIPES), "runtimes": ["vllm"], "targets": ["h200"]},
    ]
    params["tasks"]["facts"]["smoke_items"] = 40
    params["calib_sets"]["held-out"]["samples"] = 8
    smoke = params["workloads"]["smoke-64-16"]
    smoke["points"] = [{"concurrency": 2, "requests": 6, "warmup": 2}]
    smoke["output_tokens"] = 8


@pytest.fixture(scope="module")
def ended(workspace):  # type: ignore[no-untyped-def]
    """The workspace after one whole run."""
    workspace.edit(_shorter)
    # The project's own policy asks for what this short run leaves out, and `check` says so before anything runs.
    refused = workspace.run("pipeline", "check", check=False)
    assert refused.returncode == 2
    assert "workload smoke-64-16 has no concurrency 4; it has 2" in refused.stderr
    policy = workspace.path / "policy.yaml"
    text = policy.read_text(encoding="utf-8").replace("concurrency: 4", "concurrency: 2").replace("int8", "int4")
    policy.write_text(text, encoding="utf-8")
    workspace.run("dvc", "repro")
    return workspace


def test_the_gate_judges_and_nothing_of_a_gpu_host_runs(ended) -> None:  # type: ignore[no-untyped-def]
    assert _read(ended, "gate.json")["verdict"] == "FAIL"  # int4, which decides here, fails the canary
    assert not (ended.path / "artifacts/models/llama-8b-random").exists()


def _read(ended, name: str) -> dict:  # type: ignore[no-untyped-def, type-arg]
    return json.loads((ended.path / "artifacts" / name).read_text(encoding="utf-8"))


def test_every_served_cell_is_evaluated_on_its_server(ended) -> None:  # type: ignore[no-untyped-def]
    for recipe in SERVED:
        found = _read(ended, f"results/smollm2-135m.{recipe}.vllm.cpu/eval.json")
        assert found["canary"]["prompts"] == 24
        assert found["tasks"]["facts"]["n"] == 40
        assert 0.25 < found["tasks"]["facts"]["accuracy"] <= 1
        assert found["fidelity"]["tokens"] == 8 * 256
        assert found["server"]["version"] == "0.32.0"
        assert found["server"]["kv_cache_tokens"] > 0
    base = _read(ended, "results/smollm2-135m.bf16.vllm.cpu/eval.json")
    four = _read(ended, "results/smollm2-135m.int4.vllm.cpu/eval.json")
    assert base["canary"]["passed"]
    assert base["fidelity"]["perplexity_ratio"] is None
    assert four["server"]["kernels"] == ["CPUWNA16LinearKernel"]
    assert 1.0 < four["fidelity"]["perplexity_ratio"] < 5.0
    assert 30 < four["fidelity"]["top1_agreement_pct"] < 100
    assert four["fidelity"]["kl_mean"] > 0


def test_every_served_cell_is_timed_beside_its_baseline(ended) -> None:  # type: ignore[no-untyped-def]
    for recipe in SERVED:
        found = _read(ended, f"results/smollm2-135m.{recipe}.vllm.cpu/bench.json")
        (point,) = found["workloads"]["smoke-64-16"]["points"]
        assert found["is_baseline"] == (recipe == "bf16")
        for side in ("candidate", "baseline"):
            assert point[side]["output_tokens_ok"]
            assert 1 <= point[side]["ttft_ms"]["n"] <= 3  # of 6: neither the first burst of 2 nor the drain
            assert point[side]["ttft_ms"]["p90"] is None
            assert point[side]["output_tok_s"] > 0
        assert 0.1 < point["ratio"]["output_tok_s"] < 10


def test_the_report_shows_what_was_measured_and_why_the_rest_was_not(ended) -> None:  # type: ignore[no-untyped-def]
    page = (ended.path / "artifacts/report/index.html").read_text(encoding="utf-8")
    assert "smollm2-135m" in page
    assert "ChannelWiseTorchFP8ScaledMM" in page
    assert "not measured" in page
    assert (ended.path / "artifacts/packages/smollm2-135m.int4.vllm.cpu/CARD.md").is_file()
    ended.run("pipeline", "verify", "artifacts/packages/smollm2-135m.fp8-dynamic.vllm.cpu")


def test_a_second_run_changes_nothing(ended) -> None:  # type: ignore[no-untyped-def]
    done = ended.run("dvc", "repro")
    ran = [line for line in done.stdout.splitlines() if line.startswith("Running stage")]
    assert sorted(ran) == ["Running stage 'check':", "Running stage 'probe':"]


def test_bad_params_stop_a_run_before_anything_is_touched(ended) -> None:  # type: ignore[no-untyped-def]
    path = ended.path / "params.yaml"
    text = path.read_text(encoding="utf-8")
    before = {p: p.stat().st_mtime_ns for p in (ended.path / "artifacts").rglob("*.json")}
    path.write_text(text.replace("group_size: 64", "group_sise: 64", 1), encoding="utf-8")
    try:
        done = ended.run("dvc", "repro", check=False)
    finally:
        path.write_text(text, encoding="utf-8")
    assert done.returncode != 0
    assert "Did you mean 'group_size'" in done.stderr
    assert {p: p.stat().st_mtime_ns for p in (ended.path / "artifacts").rglob("*.json")} == before


def test_a_killed_evaluate_leaves_nothing_running_and_runs_again(ended) -> None:  # type: ignore[no-untyped-def]
    cell = "smollm2-135m.int4.vllm.cpu"
    before = _read(ended, f"results/{cell}/eval.json")
    job = subprocess.Popen(
        [sys.executable, "-m", "pipeline", "run", "client", "evaluate", "--model", "smollm2-135m", "--recipe", "int4",
         "--runtime", "vllm", "--target", "cpu"], cwd=ended.path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    log = ended.path / f".quantpress/scratch/eval.{cell}/server.log"
    started = time.time()
    while not (log.exists() and log.stat().st_mtime > started and b"APIServer" in log.read_bytes()):
        assert time.time() - started < 120
        time.sleep(0.5)
    family = psutil.Process(job.pid).children(recursive=True)
    stage = next(p for p in family if p.cmdline()[1:3] == ["-m", "stages.client.evaluate"])
    servers = [p for p in stage.children(recursive=True)]
    stage.send_signal(signal.SIGKILL)
    assert job.wait(60) != 0
    _, alive = psutil.wait_procs(servers, timeout=40)
    assert alive == []
    assert _read(ended, f"results/{cell}/eval.json") == before
    ended.run("dvc", "repro", "-f", "-s", f"evaluate@{cell}")
    after = _read(ended, f"results/{cell}/eval.json")
    assert after["fidelity"]["perplexity"] == pytest.approx(before["fidelity"]["perplexity"], rel=0.01)
    assert after["package_digest"] == before["package_digest"]


def test_a_damaged_checkpoint_is_refused_by_verify_and_by_the_server(ended) -> None:  # type: ignore[no-untyped-def]
    weights = Path(ended.path / "artifacts/checkpoints/smollm2-135m.int4/model.safetensors")
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    try:
        done = ended.run("pipeline", "verify", "artifacts/packages/smollm2-135m.int4.vllm.cpu", check=False)
    finally:
        weights.write_bytes(data)
    assert done.returncode == 1
    assert "model.safetensors has other bytes" in done.stderr

"""Tuning with the real server on the CPU, and the scaling run's plumbing with stub servers in place of GPUs."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.stages
ROOT = Path(__file__).parents[2]
CELL = "smollm2-135m.bf16.vllm.cpu"
OPTIONS = ["--model", "smollm2-135m", "--recipe", "bf16", "--runtime", "vllm", "--target", "cpu"]
# Runs in the client's environment. Nothing but the server is replaced: two load generators run at once for real.
SCALING = """
import json, os, subprocess, sys, time
from pathlib import Path
sys.path.insert(0, "stages/client")
import scaling
from pipeline.serving import Server, free_port

class StubServer(Server):
    def __enter__(self):
        self.command = json.dumps([self._change.options, self._change.variables])
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self._start = time.monotonic()
        self.process = subprocess.Popen([sys.executable, STUB, str(self.port)])
        return self
    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

STUB = sys.argv.pop(1)
scaling.Server = StubServer
scaling.main()
"""


@pytest.fixture(scope="module")
def packaged(workspace, fetched) -> Any:  # type: ignore[no-untyped-def]
    """The workspace with the baseline's package, a tuning of it, and a made-up CPU target of two sockets."""

    def change(p: dict[str, Any]) -> None:
        p["workloads"]["tiny"] = {"prompt_tokens": 32, "output_tokens": 8,
                                  "points": [{"concurrency": 2, "requests": 12, "warmup": 2}]}  # fmt: skip
        p["targets"]["pair"] = {"device": "cpu", "count": 2, "workloads": ["tiny"]}
        p["tuning"][CELL] = {
            "workload": "tiny",
            "options": {"max-num-seqs": 4},
            "variants": {
                "short-steps": {"options": {"max-num-batched-tokens": 512, "max-model-len": 512}},
                "too-long": {"options": {"max-model-len": 100_000_000}},
            },
        }

    workspace.edit(change)
    workspace.run("dvc", "repro", f"package@{CELL}")
    return workspace


def test_variants_are_timed_beside_the_cell_and_one_that_fails_says_why(packaged: Any) -> None:
    packaged.run("pipeline", "run", "client", "tune", *OPTIONS)
    found = json.loads((packaged.path / f"artifacts/results/{CELL}/tune.json").read_text())
    assert sorted(found["order"]) == ["own", "own", "own", "own", "short-steps"]
    assert found["order"][0] == found["order"][-1] == "own"
    assert list(found["failed"]) == ["too-long"]
    assert "greater than the derived max_model_len" in found["failed"]["too-long"]
    (point,) = found["points"]
    assert point["sides"]["own"]["ratio"]["output_tok_s"] == 1.0
    assert point["sides"]["short-steps"]["output_tok_s"] > 0
    rates = point["own_tok_s"]
    assert len(rates) == len(found["legs"]["own"]) == 4 and min(rates) > 0
    assert point["noise"] == pytest.approx((max(rates) - min(rates)) / (sum(rates) / 4))
    assert found["served"]["bf16"]["options"]["max-num-seqs"] == 16 and found["served"]["bf16"]["digest"]
    busy = found["front_end_pct"]
    assert all(0 < busy[side][point["name"]] <= 110 for side in ("own", "short-steps"))
    # The log's own numbers show that each server had its own options, and that the package was left alone.
    raw = packaged.path / f"artifacts/raw/{CELL}/tune"
    assert "max-model-len: 512" in (raw / "server.short-steps.serve.yaml").read_text()
    assert "'max_num_seqs': 4" in (raw / "server.own.log").read_text()
    # The last leg is on another start of the same server, up from the beginning.
    assert "'max_num_seqs': 4" in (raw / "server.own-again.log").read_text()
    assert {"own", "own again"} <= found["server"].keys()
    ports = {re.search(r"--port (\d+)", found["server"][side]["command"]).group(1) for side in ("own", "own again")}
    assert len(ports) == 2
    assert "max-num-seqs: 16" in (packaged.path / f"artifacts/packages/{CELL}/deploy/serve.yaml").read_text()


def test_a_cell_without_variants_says_which_have_some(packaged: Any) -> None:
    other = ["int8" if word == "bf16" else word for word in OPTIONS]
    done = packaged.run("pipeline", "run", "client", "tune", *other, check=False)
    assert done.returncode != 0
    assert "has no `tuning` for smollm2-135m.int8.vllm.cpu" in done.stdout + done.stderr
    assert CELL in done.stdout + done.stderr


def test_one_server_a_gpu_all_at_once_and_one_over_all_are_told_apart(packaged: Any) -> None:
    from pipeline.runstage import env_python

    target = ["pair" if word == "cpu" else word for word in OPTIONS]
    packaged.run("pipeline", "package", *target)
    done = subprocess.run(
        [env_python("client"), "-c", SCALING, str(ROOT / "tests/unit/stub_server.py"), *target],
        cwd=packaged.path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((packaged.path / "artifacts/results/smollm2-135m.bf16.vllm.pair/scaling.json").read_text())
    (point,) = found["points"]
    assert set(point["together"]["each_tok_s"]) == {"0", "1"}
    # A stub server's speed does not depend on the load: two of them give twice one, and "all of them" gives one.
    assert point["efficiency"]["cells"] == pytest.approx(1.0, abs=0.35)
    assert point["efficiency"]["tensor_parallel"] == pytest.approx(0.5, abs=0.2)
    assert json.loads(found["server"]["0"]["command"]) == [
        {"tensor-parallel-size": 1}, {"CUDA_VISIBLE_DEVICES": "0"}
    ]  # fmt: skip
    assert json.loads(found["server"]["all"]["command"]) == [
        {"tensor-parallel-size": 2}, {"CUDA_VISIBLE_DEVICES": "0,1"}
    ]  # fmt: skip


def test_scaling_refuses_a_target_of_one_gpu(packaged: Any) -> None:
    done = packaged.run("pipeline", "run", "client", "scaling", *OPTIONS, check=False)
    assert done.returncode != 0
    assert "has one GPU" in done.stdout + done.stderr

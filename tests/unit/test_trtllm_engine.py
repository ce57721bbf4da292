"""Engines: the build's plumbing with a made-up trtllm-build, the sidecar, and what is refused before loading."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_trtllm import ENGINE, L40S, ROOT, FakeHost
from packers import editing_json

from pipeline.cells import Cell
from pipeline.cli import main
from pipeline.errors import HostError, InputError, QuantpressError, WorkError
from pipeline.package import package
from pipeline.serving import Server
from pipeline.trtllm import build as builder
from pipeline.trtllm.checking import check_engine
from pipeline.trtllm.command import read_back
from pipeline.trtllm.sidecar import NAME, read_sidecar

H100 = "NVIDIA H100 80GB HBM3, 9.0, 81559 MiB, 580.65.06"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
    return FakeHost(tmp_path, monkeypatch)


def _built(fake: FakeHost) -> dict[str, Any]:
    params = fake.params()
    package(ENGINE, params)
    return builder.build(ENGINE, params)


def test_a_build_leaves_an_engine_and_a_sidecar_that_says_what_it_is_for(fake: FakeHost) -> None:
    made = _built(fake)
    assert (made["gpu"], made["sm"], made["driver"]) == ("NVIDIA L40S", 89, "580.65.06")
    assert (made["tensorrt_llm"], made["tensorrt"], made["cuda"]) == ("1.2.1", "10.13.3.9", "13.0")
    assert (made["world_size"], made["tp"], made["pp"]) == (1, 1, 1)
    assert made["timing_cache"] == "model.cache"
    assert made["flags"]["max_seq_len"] >= 80
    assert made["genuine"] is False
    assert set(made["files"]) == {"rank0.engine", "config.json", "model.cache"}
    assert read_sidecar(ENGINE.engine) == made
    read_back("build", "1.2.1", made["command"][1:])
    assert not list(Path(".quantpress/scratch").iterdir())


def test_the_same_build_again_keeps_the_engine_and_a_change_builds_anew(fake: FakeHost) -> None:
    first = _built(fake)
    assert builder.build(ENGINE, fake.params())["built_at"] == first["built_at"]
    engine = (ENGINE.engine / "rank0.engine").read_bytes()
    second = builder.build(
        ENGINE, fake.params(trtllm={"trtllm-engine": {"version": "1.2.1", "build": {"log_level": "info"}}})
    )
    assert (ENGINE.engine / "rank0.engine").read_bytes() != engine
    assert "--input_timing_cache" in second["command"]
    (ENGINE.engine / "rank0.engine").write_bytes(b"damaged")
    assert builder.build(ENGINE, fake.params())["files"] != second["files"]


@pytest.mark.parametrize(("mode", "error", "message"), [
    ("fail", WorkError, "ended with exit code 1: RuntimeError: Required but not provided tensors"),
    ("kill", WorkError, r"was killed by SIGKILL \(often the kernel, when memory is short\)"),
    ("disk", WorkError, "ran out of disk. Free some; nothing half-built was kept"),
    ("memory", WorkError, "ran out of memory: torch.cuda.OutOfMemoryError"),
    ("empty", WorkError, "ended well and left no rank0.engine, config.json"),
    ("hang", WorkError, "did not end within 1 s and was stopped.*build_timeout_s"),
])  # fmt: skip
def test_a_build_that_does_not_end_well_loses_nothing_and_can_be_run_again(
    mode: str, error: type[QuantpressError], message: str, fake: FakeHost
) -> None:
    _built(fake)
    before = (ENGINE.engine / "rank0.engine").read_bytes()
    own = {"version": "1.2.1", "build": {"log_level": "info"}, "build_timeout_s": 1 if mode == "hang" else 60}
    params = fake.params(trtllm={"trtllm-engine": own})
    fake.mode(build=mode)
    with pytest.raises(error, match=message) as caught:
        builder.build(ENGINE, params)
    assert "\n" not in str(caught.value)
    assert (ENGINE.engine / "rank0.engine").read_bytes() == before
    assert not list(Path(".quantpress/scratch").iterdir())
    fake.mode()
    assert builder.build(ENGINE, params)["flags"]["log_level"] == "info"


def test_nothing_outlives_a_killed_starter_and_the_rerun_works(fake: FakeHost) -> None:
    fake.mode(build="hang")
    fake.params()
    call = f"main(['trtllm', 'build', {ENGINE.name!r}])"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from pipeline.cli import main; {call}"
    starter = subprocess.Popen([sys.executable, "-c", code])
    log = Path(f".quantpress/logs/trtllm-build.{ENGINE.name}.log")
    deadline = time.monotonic() + 30
    while not (log.is_file() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    tools = [p for p in psutil.Process(starter.pid).children(recursive=True) if "trtllm-build" in " ".join(p.cmdline())]
    assert tools
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    _, alive = psutil.wait_procs(tools, timeout=40)
    assert not alive
    assert not ENGINE.engine.exists()
    fake.mode()
    assert _built(fake)["world_size"] == 1


@pytest.mark.parametrize(("plant", "error", "message"), [
    (lambda f: f.is_here(gpus=""), HostError, "Target l40s is 1 x NVIDIA L40S; this host has no GPU"),
    (lambda f: f.is_here(gpus=H100), HostError, "this host has NVIDIA H100 80GB HBM3"),
    (lambda f: (f.bin / "trtllm-build").unlink(), HostError, "'trtllm-build' is not on PATH.*prefix in params.yaml"),
    (lambda f: f.is_here(tensorrt_llm=None), HostError, "TensorRT-LLM is not installed.*1.2.1 is planned"),
    (lambda f: f.is_here(tensorrt_llm="1.1.0"), HostError, "has TensorRT-LLM 1.1.0 and the plan says 1.2.1"),
    (lambda f: (f.source.parent.parent / "checkpoints/tiny.fp8.modelopt-trtllm/rank0.safetensors").unlink(), InputError,
     "holds no TensorRT-LLM checkpoint. Run `python -m pipeline trtllm export tiny.fp8.trtllm-engine.l40s`"),
])  # fmt: skip
def test_a_build_that_cannot_work_is_refused_before_it_starts(
    plant: Any, error: type[QuantpressError], message: str, fake: FakeHost
) -> None:
    params = fake.params()
    plant(fake)
    with pytest.raises(error, match=message):
        builder.build(ENGINE, params)
    assert not Path(".quantpress/logs").exists()


def test_a_prefix_stands_before_every_command(fake: FakeHost) -> None:
    (fake.bin / "in-container").write_text('#!/bin/sh\nexec "$@"\n')
    (fake.bin / "in-container").chmod(0o755)
    params = fake.params(trtllm={"trtllm-engine": {"version": "1.2.1", "prefix": ["in-container"]}})
    package(ENGINE, params)
    assert builder.build(ENGINE, params)["command"][:2] == ["in-container", "trtllm-build"]
    assert "exec env" in (ENGINE.deploy / "launch.sh").read_text()
    assert "in-container trtllm-serve" in (ENGINE.deploy / "launch.sh").read_text()


@pytest.mark.parametrize(("plant", "field", "message"), [
    ({"gpus": H100}, "SM", "SM: built with 89, running 90"),
    ({"gpus": ""}, "SM", "SM: built with 89, running none"),
    ({"tensorrt": "10.16.0"}, "TensorRT", "TensorRT: built with 10.13.3.9, running 10.16.0"),
    ({"tensorrt_llm": "1.3.0rc2"}, "TensorRT-LLM", "TensorRT-LLM: built with 1.2.1, running 1.3.0rc2"),
    ({"tensorrt_llm": None}, "TensorRT-LLM", "TensorRT-LLM: built with 1.2.1, running none"),
])  # fmt: skip
def test_an_engine_of_another_host_is_refused_field_by_field(
    plant: dict[str, Any], field: str, message: str, fake: FakeHost, capsys: pytest.CaptureFixture[str]
) -> None:
    _built(fake)
    fake.is_here(**plant)
    with pytest.raises(SystemExit) as caught:
        main(["verify", str(ENGINE.deploy.parent)])
    said = capsys.readouterr()
    assert caught.value.code == 3
    assert message in said.err
    assert "Build it here: `python -m pipeline trtllm build tiny.fp8.trtllm-engine.l40s`" in said.err
    row = next(line for line in said.out.splitlines() if line.startswith(f"{field} "))
    assert row.endswith("REFUSED")
    assert "BUILT WITH" in said.out


def test_another_driver_is_shown_and_allowed(fake: FakeHost, capsys: pytest.CaptureFixture[str]) -> None:
    _built(fake)
    fake.is_here(gpus=L40S.replace("580.65.06", "590.1"))
    said = check_engine(ENGINE, fake.params())
    assert "whole and of this host" in said
    assert "NOT built by an installed TensorRT-LLM" in said
    assert "differs, allowed" in capsys.readouterr().out


def test_an_engine_of_more_ranks_than_gpus_is_refused(fake: FakeHost) -> None:
    _built(fake)
    with editing_json(ENGINE.engine / NAME) as sidecar:
        sidecar |= {"world_size": 2, "tp": 2}
    with pytest.raises(WorkError, match=r"rank1.engine is not among its files"):
        check_engine(ENGINE, fake.params())
    (ENGINE.engine / "rank1.engine").write_bytes((ENGINE.engine / "rank0.engine").read_bytes())
    with editing_json(ENGINE.engine / NAME) as sidecar:
        sidecar["files"]["rank1.engine"] = sidecar["files"]["rank0.engine"]
    with pytest.raises(InputError, match="built for tensor parallel 2 x pipeline 1, the plan says 1 x 1"):
        check_engine(ENGINE, fake.params())
    plan = json.loads((ENGINE.deploy / "plan.json").read_text())
    plan["serving"] = [{"name": "tensor_parallel_size", "value": 2, "reason": ""}]
    (ENGINE.deploy / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(HostError, match=r"ranks and GPUs: built with 2 \(tensor 2 x pipeline 1\), running 1"):
        check_engine(ENGINE, fake.params())


@pytest.mark.parametrize(("plant", "error", "message"), [
    (lambda e: (e / NAME).unlink(), InputError, "has no engine.sidecar.json: its build did not end"),
    (lambda e: (e / NAME).write_text("{}"), InputError, "is no engine sidecar"),
    (lambda e: (e / NAME).write_text("{"), InputError, "is not valid JSON"),
    (lambda e: (e / "rank0.engine").write_bytes(b"x"), WorkError, "is not what .*rank0.engine has 1 bytes"),
    (lambda e: (e / "config.json").unlink(), WorkError, "config.json is missing"),
])  # fmt: skip
def test_a_damaged_engine_is_refused(plant: Any, error: type[QuantpressError], message: str, fake: FakeHost) -> None:
    _built(fake)
    plant(ENGINE.engine)
    with pytest.raises(error, match=message):
        check_engine(ENGINE, fake.params())


def test_an_engine_of_another_plan_or_checkpoint_is_refused(fake: FakeHost) -> None:
    _built(fake)
    params = fake.params(serving={"trtllm-engine-cuda": {"max_batch_size": 8}})
    package(ENGINE, params)
    with pytest.raises(WorkError, match="max_batch_size: built with 256, planned 8.*Build it again"):
        check_engine(ENGINE, params)
    builder.build(ENGINE, params)
    check_engine(ENGINE, params)
    with editing_json(Path("artifacts/checkpoints/tiny.fp8.modelopt-trtllm/config.json")) as config:
        config["producer"] = {"name": "another"}
    package(ENGINE, params)
    with pytest.raises(WorkError, match="checkpoint: built from .*, the package has "):
        Server(ENGINE, params, Path("log"), 1, stand_in=True).__enter__()


def test_the_server_checks_the_engine_before_it_loads(fake: FakeHost) -> None:
    _built(fake)
    fake.is_here(tensorrt="10.16.0")
    with pytest.raises(HostError, match="TensorRT: built with 10.13.3.9, running 10.16.0"):
        Server(ENGINE, fake.params(), Path("log"), 1, stand_in=True).__enter__()
    assert not Path("log").exists()


def test_an_engine_of_a_stand_in_is_not_measured(fake: FakeHost) -> None:
    _built(fake)
    with pytest.raises(WorkError, match="was not built by an installed TensorRT-LLM"):
        Server(ENGINE, fake.params(), Path("log"), 1).__enter__()


def test_a_bundle_is_not_built(fake: FakeHost) -> None:
    with pytest.raises(InputError, match="trtllm-bundle is not built"):
        builder.build(Cell("tiny", "bf16", "trtllm-bundle", "l40s"), fake.params())

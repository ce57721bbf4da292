"""Run `trtllm-build` in the user's environment on the target GPU: nothing half-built is ever in an engine's place."""

from __future__ import annotations

import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import host, jsonio, manifest
from pipeline.cells import Cell
from pipeline.errors import HostError, InputError, QuantpressError, WorkError
from pipeline.guard import Guarded
from pipeline.runstage import HEARTBEAT_S, STATE, child_env, last_line, need_disk
from pipeline.specs import Params
from pipeline.trtllm.checkpoint import RankCheckpoint, is_rank_checkpoint
from pipeline.trtllm.command import read_back
from pipeline.trtllm.deployment import Deployment, deployment
from pipeline.trtllm.package import into
from pipeline.trtllm.probe import Environment, need_version, probe
from pipeline.trtllm.settings import settings
from pipeline.trtllm.sidecar import NAME, SCHEMA, compare, read_sidecar

FULL_DISK = ("No space left on device", "Errno 28", "ENOSPC")
OUT_OF_MEMORY = ("CUDA out of memory", "OutOfMemory", "std::bad_alloc", "Cannot allocate memory")


def build(cell: Cell, params: Params) -> dict[str, Any]:
    """Build the engine of a cell, or keep the one that is there and fits; return its sidecar.

    Raises:
        InputError: the checkpoint is missing or does not fit the plan.
        HostError: this host is not the target, or trtllm-build is not there.
        WorkError: the build failed, hung, was killed, or the disk is full; the old engine, if any, is untouched.
    """
    target = cell.check(params)
    if cell.runtime != "trtllm-engine":
        raise InputError(f"{cell.runtime} is not built: `python -m pipeline package` makes all that {cell.name} needs.")
    source = Path("artifacts/models") / cell.model / "config.json"
    plan = deployment(cell, params, jsonio.read_json(source))
    checkpoint = need_checkpoint(plan)
    host.need_target(target, cell.target)
    gpus = host.gpus()
    need_tool(plan)
    here = probe(plan.prefix, gpus)
    need_version(here, plan.version, cell.runtime)
    digest = manifest.digest(manifest.describe(plan.checkpoint))
    if kept := already_built(plan, here, digest):
        print(f"{cell.engine}: built already for this checkpoint, these flags and this host.", flush=True)
        return kept
    scratch = STATE / "scratch" / f"engine.{cell.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    need_disk(int(2.2 * checkpoint.weight_bytes), f"Building {cell.name}")
    cache = STATE / "trtllm" / f"sm{here.sm}.{here.tensorrt}.{here.tensorrt_llm}.cache"
    command = command_of(plan, scratch, cache)
    try:
        seconds = run(command, cell, float(settings(params, cell.runtime).build_timeout_s))
        record = finish(plan, scratch, here, digest, command, seconds, cache)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    replace(scratch, cell.engine)
    return record


def need_checkpoint(plan: Deployment) -> RankCheckpoint:
    """Return the exported checkpoint, whose ranks are the plan's.

    Raises:
        InputError: it is not exported, is damaged, or has another split.
    """
    if not is_rank_checkpoint(plan.checkpoint):
        raise InputError(
            f"{plan.checkpoint} holds no TensorRT-LLM checkpoint. Run `python -m pipeline trtllm export "
            f"{plan.cell.name}` first; "
            "it needs no GPU."
        )
    found = RankCheckpoint.open(plan.checkpoint)
    if found.split != plan.split:
        raise InputError(
            f"{plan.checkpoint} has tensor parallel {found.split.tp} x pipeline {found.split.pp}, the plan "
            f"{plan.split.tp} x "
            f"{plan.split.pp}. Export it again."
        )
    lint = jsonio.read_json(Path("artifacts/results") / plan.checkpoint.name / "lint.json")
    if not lint["passed"]:
        raise InputError(f"{plan.checkpoint} did not pass its proof, see lint.json; it is not built.")
    return found


def need_tool(plan: Deployment) -> None:
    """Check that the command can be started at all.

    Raises:
        HostError: it is not on PATH.
    """
    first = plan.prefix[0] if plan.prefix else "trtllm-build"
    if not shutil.which(first):
        advice = "Activate the environment that has TensorRT-LLM, or set trtllm.trtllm-engine.prefix in params.yaml"
        raise HostError(f"'{first}' is not on PATH. {advice} (for instance to `docker run ... {plan.container}`).")


def already_built(plan: Deployment, here: Environment, digest: str) -> dict[str, Any] | None:
    """Return the sidecar of an engine that was built from this checkpoint with these flags and loads here, or None."""
    try:
        found = read_sidecar(plan.cell.engine)
    except QuantpressError:
        return None
    fits = all(d.same for d in compare(found, here) if d.must) and (found["tp"], found["pp"]) == tuple(plan.split)
    same = found["checkpoint_digest"] == digest and found["flags"] == plan.build_flags
    return found if fits and same and not manifest_differs(plan.cell.engine, found) else None


def manifest_differs(engine: Path, sidecar: Mapping[str, Any]) -> bool:
    """Say whether a file of an engine is missing or changed."""
    return any(not (engine / name).is_file() or manifest.sha256(engine / name) != want["sha256"]
               for name, want in sidecar["files"].items())  # fmt: skip


def command_of(plan: Deployment, scratch: Path, cache: Path) -> list[str]:
    """Return the whole command, checked once more against the flag table; a timing cache of this GPU is reused."""
    made = into(plan.build or [], scratch)
    made += ["--output_timing_cache", (scratch / "model.cache").as_posix()]
    if cache.is_file():
        made += ["--input_timing_cache", cache.as_posix()]
    read_back("build", plan.version, made)
    return [*plan.prefix, "trtllm-build", *made]


def run(command: list[str], cell: Cell, timeout_s: float) -> float:
    """Run the build with a line of progress every 15 seconds; return its seconds.

    Raises:
        WorkError: it failed, hung, was killed or filled the disk; the message names the log.
        HostError: it could not be started.
    """
    log = STATE / "logs" / f"trtllm-build.{cell.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"trtllm-build {cell.name}: log {log}", flush=True)
    start = time.monotonic()
    with log.open("wb") as sink, Guarded(command, child_env(), sink) as job:
        beat = start + HEARTBEAT_S
        while (code := job.process.poll()) is None:
            time.sleep(0.1)
            if time.monotonic() - start > timeout_s:
                job.stop()
                raise WorkError(
                    f"trtllm-build of {cell.name} did not end within {timeout_s:.0f} s and was stopped; its log "
                    f"is {log}. Raise "
                    "trtllm.trtllm-engine.build_timeout_s in params.yaml if it was still at work, and run it again."
                )
            if time.monotonic() >= beat:
                beat += HEARTBEAT_S
                print(f"trtllm-build: {time.monotonic() - start:.0f} s  {last_line(log)}", flush=True)
    if code:
        raise failure(code, cell, log)
    return time.monotonic() - start


def failure(code: int, cell: Cell, log: Path) -> QuantpressError:
    """Return the error that says in one sentence why a build ended."""
    from pipeline.serving import death_reason

    text = log.read_text(encoding="utf-8", errors="replace")
    again = f"Its log is {log}; run `python -m pipeline trtllm build {cell.name}` again when that is mended."
    if any(word in text for word in FULL_DISK):
        return WorkError(
            f"trtllm-build of {cell.name} ran out of disk. Free some; nothing half-built was kept. {again}"
        )
    if code > 128:
        number = code - 128
        name = signal.Signals(number).name if number in [s.value for s in signal.Signals] else f"signal {number}"
        why = " (often the kernel, when memory is short)" if name == "SIGKILL" else ""
        return WorkError(f"trtllm-build of {cell.name} was killed by {name}{why}. {again}")
    if code == 127:
        return HostError(f"trtllm-build could not be started: {death_reason(log)} {again}")
    if any(word in text for word in OUT_OF_MEMORY):
        return WorkError(f"trtllm-build of {cell.name} ran out of memory: {death_reason(log)} {again}")
    return WorkError(f"trtllm-build of {cell.name} ended with exit code {code}: {death_reason(log)} {again}")


def finish(
    plan: Deployment, scratch: Path, here: Environment, digest: str, command: list[str], seconds: float, cache: Path
) -> dict[str, Any]:
    """Check what the build left and write the sidecar, last.

    Raises:
        WorkError: it ended well and an engine is missing.
    """
    missing = [f"rank{r}.engine" for r in range(plan.split.world_size) if not (scratch / f"rank{r}.engine").is_file()]
    missing += [] if (scratch / "config.json").is_file() else ["config.json"]
    if missing:
        raise WorkError(
            f"trtllm-build of {plan.cell.name} ended well and left no {', '.join(missing)}; nothing was kept."
        )
    timing = scratch / "model.cache"
    if timing.is_file():
        cache.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(timing, cache)
    record = {
        "schema": SCHEMA,
        "cell": plan.cell.name,
        "gpu": here.gpu,
        "sm": here.sm,
        "driver": here.driver,
        "cuda": here.cuda,
        "tensorrt": here.tensorrt,
        "tensorrt_llm": here.tensorrt_llm,
        "genuine": here.genuine,
        "world_size": plan.split.world_size,
        "tp": plan.split.tp,
        "pp": plan.split.pp,
        "command": command,
        "flags": plan.build_flags,
        "checkpoint": plan.checkpoint.as_posix(),
        "checkpoint_digest": digest,
        "build_s": round(seconds, 1),
        "timing_cache": timing.name if timing.is_file() else None,
        "built_at": host.now(),
        "python": sys.version.split()[0],
        "files": manifest.describe(scratch),
    }
    jsonio.write_json(scratch / NAME, record)
    return record


def replace(scratch: Path, engine: Path) -> None:
    """Put a finished engine in its place; the old one is removed only after the new one is there."""
    old = engine.with_name("engine.old")
    shutil.rmtree(old, ignore_errors=True)
    engine.parent.mkdir(parents=True, exist_ok=True)
    if engine.exists():
        engine.rename(old)
    shutil.move(scratch, engine)
    shutil.rmtree(old, ignore_errors=True)

"""Run one leg: AIPerf once over every load point of a workload against one server, and read what it recorded."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline import host
from pipeline.errors import WorkError
from pipeline.guard import Guarded
from pipeline.runstage import child_env
from pipeline.serving import Server
from pipeline.speed import load
from pipeline.speed.definitions import DEFINITIONS
from pipeline.speed.steady import Row
from pipeline.speed.watch import Watch
from pipeline.speed.workloads import Point, Workload

NAMES = {name: d.aiperf for name, d in DEFINITIONS.items() if d.aiperf}
ONE_PIECE_SHARE = 0.01
NEEDS_STREAM = ("ttft_ms", "tpot_ms", "inter_chunk_ms")


class Leg(NamedTuple):
    """What one leg recorded: requests of each point, what went on beside it, where its files are."""

    rows: dict[str, list[Row]]
    beside: dict[str, Any]
    folder: Path


class Plan(NamedTuple):
    """One leg to run."""

    workload: Workload
    points: list[Point]
    pool: list[list[int]]
    model: str
    streaming: bool
    seed: str


def run_leg(plan: Plan, server: Server, folder: Path) -> Leg:
    """Run AIPerf against `server`, its files in `folder`.

    Raises:
        WorkError: the server or the client failed or did not end in time.
    """
    folder.mkdir(parents=True)
    requests = load.make_requests(plan.workload, plan.points, plan.pool, plan.seed)
    inputs = json.dumps(load.payloads(requests, plan.model, plan.streaming), separators=(",", ":"))
    (folder / "inputs.json").write_text(inputs, encoding="utf-8")
    cores = host.usable_cores()
    tokenizer = str(Path("artifacts/models") / plan.model)
    config = load.aiperf_config(
        plan.points, server.url, plan.model, folder.as_posix(), plan.streaming, tokenizer, cores
    )
    (folder / "aiperf.yaml").write_text(yaml.safe_dump(config, sort_keys=False), "utf-8")
    extra = load.ENVIRONMENT | {"PYTHONPATH": str(load.PLUGIN.resolve())}
    env = {k: v for k, v in child_env(**extra).items() if k not in load.DROPPED}
    command = [str(Path(sys.executable).with_name("aiperf")), "profile", "--config", str(folder / "aiperf.yaml")]
    log = folder / "aiperf.log"
    limit_s = load.leg_limit_s(plan.workload, plan.points)
    start = time.monotonic()
    with (
        log.open("wb") as sink,
        Guarded(command, env, sink) as job,
        Watch(job.process.pid, server.pid, f"{server.url}/metrics", folder, server.target.device == "cuda") as watch,
    ):
        while (code := job.process.poll()) is None:
            server.check_alive("during the benchmark")
            if time.monotonic() - start > limit_s:
                raise WorkError(
                    f"{server.cell.name} did not finish a leg within {limit_s:.0f} s; logs {server.log}, {log}."
                )
            time.sleep(0.2)
    wall_s = time.monotonic() - start
    export = folder / "profile_export.jsonl"
    if code != 0 or not export.is_file():
        found = "an" if export.is_file() else "no"
        raise WorkError(f"AIPerf ended with exit code {code} and {found} export; log {log}.")
    said = log.read_text(encoding="utf-8", errors="replace")
    need_plugin(said, plan.points, log)
    rows = read_export(export, {r.id: r.output_tokens for r in requests}, plan.streaming)
    spans = {
        name: (min(r["start_ns"] for r in found) / 1e9, max(r["end_ns"] for r in found) / 1e9)
        for name, found in rows.items()
    }
    beside = watch.summary(said, spans)
    busy_s = sum(end - begin for begin, end in spans.values())
    beside |= {"wall_s": round(wall_s, 1), "load_s": round(busy_s, 1)}
    beside["inputs_sha256"] = hashlib.sha256(inputs.encode()).hexdigest()
    # The prompts can be made again from the seed; 8k-token prompts would fill the cache.
    (folder / "inputs.json").unlink()
    return Leg(rows, beside, folder)


def need_plugin(log: str, points: list[Point], path: Path) -> None:
    """Check that AIPerf's closed loops waited for slots: it only warns of a plugin that it could not load.

    Raises:
        WorkError: fewer phases said so than have a closed loop; each point has a warm-up and a counted one.
    """
    wanted = 2 * sum(point.concurrency is not None for point in points)
    if (found := log.count(load.PLUGIN_SAYS)) < wanted:
        raise WorkError(
            f"AIPerf ran {wanted} closed loops and {found} of them with this project's plugin ({load.PLUGIN}), "
            f"without which it uses a core of its own for waiting; log {path}."
        )


def read_export(path: Path, expected_tokens: dict[str, int], streaming: bool) -> dict[str, list[Row]]:
    """Read AIPerf's per-request records of the counted phases, in this project's names and units.

    AIPerf's inter_token_latency is (latency - TTFT) / (output tokens - tokens of the first chunk): our tpot_ms. Its
    inter_chunk_latency is the list of gaps between chunks. All are checked to be milliseconds.

    Args:
        path: profile_export.jsonl.
        expected_tokens: the forced length of each request by its session id.
        streaming: whether first tokens and gaps must be there.

    Raises:
        WorkError: a record has other units than expected, or none of what it must have.
    """
    found: dict[str, list[Row]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        meta, metrics = record["metadata"], record["metrics"]
        if meta["phase_kind"] != "profiling":
            continue
        row: Row = {
            "id": meta["conversation_id"],
            "start_ns": meta["request_start_ns"],
            "end_ns": meta["request_end_ns"],
        }
        row["expected_tokens"] = expected_tokens.get(row["id"])
        row["error"] = record.get("error") or ("cancelled" if meta.get("was_cancelled") else None)
        if not row["error"]:
            row |= _metrics(metrics, path, streaming)
        found.setdefault(meta["phase_name"], []).append(row)
    if streaming:
        need_streams([row for rows in found.values() for row in rows], path)
    return found


def need_streams(rows: list[Row], path: Path) -> None:
    """Refuse a streamed leg in which more than ONE_PIECE_SHARE of the answers came as one chunk.

    Raises:
        WorkError: they did: TTFT and TPOT would be those of a part of the requests.
    """
    good = [row for row in rows if not row["error"]]
    whole = [row for row in good if row["ttft_ms"] is None]
    if len(whole) > ONE_PIECE_SHARE * len(good):
        raise WorkError(f"{len(whole)} of {len(good)} answers in {path} came as one chunk: did the server stream them?")


def _metrics(metrics: dict[str, Any], path: Path, streaming: bool) -> Row:
    row: Row = {}
    # A server may hold back a whole answer, while its text is no whole characters, and send it as one chunk: it has no
    # first token to time. Seen on an H200: 3 of 1,794 answers of a model with random weights.
    in_one_piece = streaming and "inter_chunk_latency" not in metrics
    for ours, theirs in NAMES.items():
        entry = metrics.get(theirs)
        if ours in NEEDS_STREAM and (in_one_piece or (entry is None and not streaming)):
            row[ours] = None
            continue
        if entry is None:
            raise WorkError(f"{path} has a request without {theirs}: did the server stream its answer?")
        if entry["unit"] != "ms":
            raise WorkError(f"AIPerf gives {theirs} in {entry['unit']}, milliseconds were expected.")
        row[ours] = entry["value"]
    lengths = metrics.get("output_sequence_length") or metrics.get("usage_completion_tokens")
    if lengths is None:
        raise WorkError(f"{path} has a request without output_sequence_length: the server gave no token usage.")
    row["output_tokens"] = int(lengths["value"])
    return row

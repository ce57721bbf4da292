"""Time one cell beside its baseline with AIPerf: two servers, one host, one run, every speed a ratio."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from pipeline import host, jsonio
from pipeline.errors import WorkError
from pipeline.guard import Guarded
from pipeline.making import arguments
from pipeline.package import Cell
from pipeline.params import load_params
from pipeline.program import lock_sha256, run_main, versions
from pipeline.runstage import child_env
from pipeline.serving import Server
from pipeline.specs import Workload
from pipeline.timing import DEFINITIONS, compare

# AIPerf fails with HF_HUB_OFFLINE=1 on a tokenizer folder, so the variable is left out of its environment.
AIPERF_DROPS = ("HF_HUB_OFFLINE",)


def main() -> None:
    """Benchmark the cell named by --model --recipe --runtime --target beside its baseline."""
    args = arguments("model", "recipe", "runtime", "target")
    cell = Cell(args.model, args.recipe, args.runtime, args.target)
    params = load_params()
    cell.check(params)
    baseline = Cell(cell.model, params.baseline, cell.runtime, cell.target)
    raw = Path("artifacts/raw") / cell.name / "bench"
    scratch = Path(".quantpress/scratch") / f"bench.{cell.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    start = time.monotonic()
    # One core is left to the client: a server that computes on all of them would be timed while it fights for them.
    threads = max(1, host.usable_cores() - 1)
    servers: dict[str, Server] = {}
    with ExitStack() as stack:
        servers["A"] = stack.enter_context(Server(baseline, params, scratch / "server.baseline.log", threads))
        # The baseline against itself is the noise floor: one server, timed twice as if it were two.
        servers["B"] = servers["A"]
        if cell != baseline:
            servers["B"] = stack.enter_context(Server(cell, params, scratch / "server.candidate.log", threads))
        for server in set(servers.values()):
            server.wait_ready()
        print(f"servers ready after {time.monotonic() - start:.0f} s", flush=True)
        workloads = {}
        for name in params.benchmark:
            workloads[name] = run_workload(name, params.workloads[name], servers, cell, scratch)
        facts = {"baseline": servers["A"].facts(), "candidate": servers["B"].facts()}
    for role, fact in facts.items():
        log = "server.baseline.log" if role == "baseline" or cell == baseline else "server.candidate.log"
        fact["log"] = (raw / log).as_posix()
    record = {
        "schema": "quantpress.bench/1",
        "cell": cell.name,
        **cell._asdict(),
        "baseline": baseline.name,
        "is_baseline": cell == baseline,
        "package_digest": jsonio.read_json(cell.deploy / "manifest.json")["checkpoint"]["digest"],
        "definitions": DEFINITIONS,
        "client": {"tool": f"aiperf {versions('aiperf').get('aiperf')}", "endpoint": "completions, streamed"},
        "prompts": "synthetic, distinct, another seed for every leg; see server.*.prefix_cache_hit_rate",
        "server": facts,
        "host": host.fingerprint(),
        "load_average": host.load_average(),
        "locks": {env: lock_sha256(env) for env in ("client", str(facts["candidate"]["environment"]))},
        "git_commit": host.git_commit(),
        "order": params.workloads[params.benchmark[0]].order,
        "workloads": workloads,
        "finished_at": host.now(),
        "wall_s": round(time.monotonic() - start, 1),
    }
    shutil.rmtree(raw, ignore_errors=True)
    raw.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(scratch, raw)
    jsonio.write_json(Path("artifacts/results") / cell.name / "bench.json", record)
    print(json.dumps({"cell": cell.name, "wall_s": record["wall_s"]}), flush=True)


def run_workload(
    name: str, workload: Workload, servers: dict[str, Server], cell: Cell, scratch: Path
) -> dict[str, Any]:
    """Time every leg of the order (A baseline, B candidate) and compare point by point."""
    requests: dict[str, dict[str, list[list[dict[str, Any]]]]] = {"A": {}, "B": {}}
    legs = []
    for number, side in enumerate(workload.order):
        folder = scratch / f"{name}.{number}{side}"
        found = run_leg(workload, servers[side], cell, folder, seed=1000 * number + 7)
        for point_name, rows in found.items():
            requests[side].setdefault(point_name, []).append(rows)
        means = {p: _mean([r["e2e_ms"] for r in rows if not r["error"]]) for p, rows in found.items()}
        legs.append({"side": side, "e2e_ms_mean": means})
        print(f"{name} leg {number + 1}/{len(workload.order)} ({side}): {means}", flush=True)
    points = []
    for point in workload.points:
        key = f"c{point.concurrency}"
        compared = compare(requests["B"].get(key, []), requests["A"].get(key, []), workload.output_tokens)
        for side in ("candidate", "baseline"):
            _check_point(compared[side], f"{name}, concurrency {point.concurrency}, {side}", workload.output_tokens)
        points.append(point.model_dump() | compared)
    return {
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "order": workload.order,
        "legs": legs,
        "points": points,
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 2) if values else None


def _check_point(found: dict[str, Any], where: str, output_tokens: int) -> None:
    """Fail when requests failed or answers have another length than the forced one.

    Raises:
        WorkError: the numbers would not mean what their name says.
    """
    if found["errors"] or found["ttft_ms"]["n"] == 0:
        raise WorkError(f"{found['errors']} requests failed at {where}; {found['ttft_ms']['n']} succeeded.")
    if not found["output_tokens_ok"]:
        raise WorkError(f"At {where} some answers did not have the forced {output_tokens} tokens.")


def run_leg(workload: Workload, server: Server, cell: Cell, folder: Path, seed: int) -> dict[str, list[dict[str, Any]]]:
    """Run AIPerf once over every point of the workload against one server; return the requests of each point."""
    folder.mkdir(parents=True)
    config = folder / "aiperf.yaml"
    config.write_text(yaml.safe_dump(aiperf_config(workload, server, cell, folder, seed), sort_keys=False), "utf-8")
    env = {k: v for k, v in child_env(HF_HUB_DISABLE_TELEMETRY="1").items() if k not in AIPERF_DROPS}
    tool = Path(sys.executable).with_name("aiperf")
    log = folder / "aiperf.log"
    limit_s = leg_limit_s(workload)
    start = time.monotonic()
    with log.open("wb") as sink, Guarded([str(tool), "profile", "--config", str(config)], env, sink) as job:
        while (code := job.process.poll()) is None:
            server.check_alive("during the benchmark")
            if time.monotonic() - start > limit_s:
                raise WorkError(
                    f"{server.cell.name} did not finish a leg within {limit_s:.0f} s; logs {server.log}, {log}."
                )
            time.sleep(0.5)
    export = folder / "profile_export.jsonl"
    if code != 0 or not export.is_file():
        raise WorkError(
            f"AIPerf ended with exit code {code} and {'an' if export.is_file() else 'no'} export; log {log}."
        )
    return read_export(export)


def leg_limit_s(workload: Workload) -> float:
    """Return how long a leg may take: two minutes, and for every round of requests half a second a token."""
    rounds = sum((p.requests + p.warmup) / p.concurrency for p in workload.points)
    return 120 + rounds * (0.5 * workload.output_tokens + 0.02 * workload.prompt_tokens)


def aiperf_config(workload: Workload, server: Server, cell: Cell, folder: Path, seed: int) -> dict[str, Any]:
    """Return AIPerf's configuration: for each point an uncounted warm-up phase and a counted one, distinct prompts."""
    phases = []
    for point in workload.points:
        load = {"type": "concurrency", "concurrency": point.concurrency}
        name = f"c{point.concurrency}"
        phases.append({"name": f"warm-{name}", "kind": "warmup", **load, "requests": point.warmup})
        phases.append({"name": name, "kind": "profiling", **load, "requests": point.requests})
    total = sum(phase["requests"] for phase in phases)
    return {
        "schemaVersion": "2.0",
        "randomSeed": seed,
        "benchmark": {
            "model": cell.model,
            "endpoint": {
                "url": server.url,
                "type": "completions",
                "streaming": True,
                "useServerTokenCount": True,
                "extra": {"ignore_eos": True, "min_tokens": workload.output_tokens, "temperature": 0},
            },
            "tokenizer": {"name": str(Path("artifacts/models") / cell.model)},
            "dataset": {
                "type": "synthetic",
                "entries": total,
                "isl": {"mean": workload.prompt_tokens, "stddev": 0},
                "osl": {"mean": workload.output_tokens, "stddev": 0},
            },
            "phases": phases,
            "artifacts": {"dir": str(folder)},
            "runtime": {"ui": "none", "workers": 1, "recordProcessors": 1},
        },
    }


def read_export(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Read AIPerf's per-request records of the counted phases, in this project's names and units.

    AIPerf's inter_token_latency is (latency - TTFT) / (output tokens - tokens of the first chunk): our tpot_ms. Its
    inter_chunk_latency is the list of gaps between chunks. Both are checked to be milliseconds.

    Raises:
        WorkError: a record has other units than expected.
    """
    found: dict[str, list[dict[str, Any]]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        meta, metrics = record["metadata"], record["metrics"]
        if meta["phase_kind"] != "profiling":
            continue
        row: dict[str, Any] = {"start_ns": meta["request_start_ns"], "end_ns": meta["request_end_ns"]}
        row["error"] = record.get("error") or ("cancelled" if meta.get("was_cancelled") else None)
        if not row["error"]:
            for ours, theirs in NAMES.items():
                entry = metrics[theirs]
                if entry["unit"] != "ms":
                    raise WorkError(f"AIPerf gives {theirs} in {entry['unit']}, milliseconds were expected.")
                row[ours] = entry["value"]
            row["output_tokens"] = metrics["output_sequence_length"]["value"]
        found.setdefault(meta["phase_name"], []).append(row)
    return found


NAMES = {
    "ttft_ms": "time_to_first_token",
    "tpot_ms": "inter_token_latency",
    "e2e_ms": "request_latency",
    "inter_chunk_ms": "inter_chunk_latency",
}

if __name__ == "__main__":
    os.environ.pop("HF_HUB_OFFLINE", None)
    run_main(main)

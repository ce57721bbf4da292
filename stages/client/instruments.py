"""Read one server's speed with two load generators, ours and `vllm bench serve`, at the same load, in the order
theirs, ours, ours, theirs: `python -m pipeline run client instruments --model M --recipe R --runtime vllm --target T`.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from pipeline import host, jsonio
from pipeline.checkpoint import read_object
from pipeline.errors import InputError, WorkError
from pipeline.guard import Guarded
from pipeline.making import arguments
from pipeline.memory.cells import CellIds, cache_tokens, serving
from pipeline.package import Cell, server_environment
from pipeline.params import load_params
from pipeline.program import run_main
from pipeline.runstage import child_env, env_python
from pipeline.serving import Server
from pipeline.specs import Params
from pipeline.speed import instruments
from pipeline.speed.leg import Plan, run_leg
from pipeline.speed.load import DROPPED
from pipeline.speed.workloads import Point, Workload
from stages.client import runs

LIMIT_S = 600.0


def main() -> None:
    """Compare the load generators on the cell named by --model --recipe --runtime --target."""
    args = arguments("model", "recipe", "runtime", "target", optional=("workload", "concurrency"))
    cell = Cell(args.model, args.recipe, args.runtime, args.target)
    params = load_params()
    target = cell.check(params)
    name = args.workload or params.workloads_of(target)[0]
    workload, point = choose(params, name, args.concurrency)
    scratch = runs.begin(cell, "instruments")
    start = time.monotonic()
    pool = jsonio.read_json(Path("calib_data") / f"{params.evaluation.held_out}.{cell.model}" / "tokens.json")
    legs: dict[str, list[dict[str, float]]] = {"ours": [], "theirs": []}
    with Server(cell, params, scratch / "server.log", max(1, host.usable_cores() - 1)) as server:
        server.wait_ready()
        for number, side in enumerate(("theirs", "ours", "ours", "theirs")):
            folder = scratch / f"{number}.{side}"
            if side == "ours":
                plan = Plan(workload, [point], pool["input_ids"], cell.model, True, f"instruments.{number}")
                found = instruments.ours(run_leg(plan, server, folder).rows[point.name])
            else:
                found = bench_serve(server, workload, point, folder, number)
            legs[side].append(found)
            print(f"leg {number + 1}/4 ({side}): {found['output_tok_s']:.1f} tok/s", flush=True)
        facts = server.facts()
    facts["log"] = (runs.raw_folder(cell, "instruments") / "server.log").as_posix()
    record = {
        "schema": "quantpress.instruments/1",
        "workload": name,
        "concurrency": point.concurrency,
        "requests": point.count,
        "clients": {
            "ours": runs.client(),
            "theirs": f"vllm {facts['version']} bench serve",
        },
        "legs": legs,
        "agreement": instruments.agreement(legs["ours"], legs["theirs"]),
        "kv_cache_tokens": kv_tokens(params, cell, facts),
        "server": facts,
    }
    runs.keep(cell, "instruments", scratch)
    runs.write(cell, "instruments", record, facts["environment"], start)
    print(json.dumps({k: v["ratio"] for k, v in record["agreement"].items()}), flush=True)


def choose(params: Params, name: str, concurrency: str | None) -> tuple[Workload, Point]:
    """Return the workload and its point: the named concurrency, else the one before the largest.

    Raises:
        InputError: no such workload or point, or one that the other client cannot make.
    """
    if name not in params.workloads:
        raise InputError(f"There is no workload '{name}' in params.yaml. Known: {', '.join(params.workloads)}.")
    workload = params.workloads[name]
    points = {p.concurrency: p for p in workload.points if p.concurrency}
    if workload.mix or not points:
        raise InputError(
            f"Workload {name} has mixed lengths or no closed loop; `vllm bench serve` is asked for neither."
        )
    wanted = int(concurrency) if concurrency else sorted(points)[-2:][0]
    if wanted not in points:
        raise InputError(f"Workload {name} has no point of concurrency {wanted}; it has {sorted(points)}.")
    return workload, points[wanted]


def bench_serve(server: Server, workload: Workload, point: Point, folder: Path, seed: int) -> dict[str, float]:
    """Run `vllm bench serve` from the server's own environment and return its numbers.

    Raises:
        WorkError: it failed, did not end in time, or did not get every answer whole.
    """
    folder.mkdir(parents=True)
    model = server.cell.model
    out = folder / "result.json"
    arguments_ = instruments.command(
        server.url, model, str(Path("artifacts/models") / model), workload, point, seed, str(out)
    )
    env = {k: v for k, v in child_env(HF_HUB_DISABLE_TELEMETRY="1").items() if k not in DROPPED}
    log = folder / "bench_serve.log"
    python = env_python(str(server_environment(server.cell, server.target)))
    start = time.monotonic()
    with log.open("wb") as sink, Guarded([python, *arguments_], env, sink) as job:
        while (code := job.process.poll()) is None:
            server.check_alive("during `vllm bench serve`")
            if time.monotonic() - start > LIMIT_S:
                raise WorkError(f"`vllm bench serve` did not end within {LIMIT_S:.0f} s; log {log}.")
            time.sleep(0.2)
    if code != 0 or not out.is_file():
        raise WorkError(f"`vllm bench serve` ended with exit code {code}; log {log}.")
    return instruments.theirs(jsonio.read_json(out), point, workload)


def kv_tokens(params: Params, cell: Cell, facts: dict[str, Any]) -> dict[str, Any]:
    """Return the cache's capacity in tokens as predicted and as the server logged it."""
    config = read_object(Path("artifacts/models") / cell.model / "config.json")
    ids = CellIds(*cell)
    predicted = cache_tokens(params, ids, config, serving(params, ids, config))
    logged = facts["kv_cache_tokens"]
    ratio = round(logged / predicted, 4) if predicted and logged else None
    return {"predicted": predicted, "logged": logged, "ratio": ratio}


if __name__ == "__main__":
    run_main(main)

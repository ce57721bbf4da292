"""Measure how a cell scales over the GPUs of one host, in one run: one server on one GPU alone, one on each GPU at
once, one over all of them: `python -m pipeline run client scaling --model M --recipe R --runtime vllm --target T`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from pipeline import host, jsonio
from pipeline.errors import InputError, unknown
from pipeline.making import arguments
from pipeline.package import Cell
from pipeline.params import load_params
from pipeline.program import lock_hashes, run_main, versions
from pipeline.serving import Change, Server
from pipeline.speed.leg import Leg, Plan, run_leg
from pipeline.speed.load import DROPPED
from pipeline.speed.workloads import Point, Workload
from pipeline.tuning import scaling

SPLIT = "tensor-parallel-size"


def main() -> None:
    """Scale the cell named by --model --recipe --runtime --target over the GPUs that its target counts."""
    args = arguments("model", "recipe", "runtime", "target", optional=("loads",))
    cell = Cell(args.model, args.recipe, args.runtime, args.target)
    params = load_params()
    target = cell.check(params)
    if target.count < 2:
        raise InputError(f"Target {cell.target} has one GPU (count); scaling needs two or more.")
    name = params.workloads_of(target)[0]
    workload = params.workloads[name]
    points = chosen(workload, args.loads)
    folder = Path("calib_data") / f"{params.evaluation.held_out}.{cell.model}"
    pool = jsonio.read_json(folder / "tokens.json")["input_ids"]
    raw = Path("artifacts/raw") / cell.name / "scaling"
    scratch = Path(".quantpress/scratch") / f"scaling.{cell.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    gpus = [str(number) for number in range(target.count)]
    start = time.monotonic()
    with ExitStack() as stack:
        servers = {
            gpu: Server(
                cell, params, scratch / f"server.gpu{gpu}.log", 1,
                change=Change({SPLIT: 1}, {"CUDA_VISIBLE_DEVICES": gpu}),
            )
            for gpu in gpus
        }  # fmt: skip
        every = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        servers["all"] = Server(
            cell, params, scratch / "server.all.log", 1, change=Change({SPLIT: target.count}, every)
        )
        for server in servers.values():
            stack.enter_context(server)
        for server in servers.values():
            server.wait_ready()
        print(f"{len(servers)} servers ready after {time.monotonic() - start:.0f} s", flush=True)

        def leg(server: str, label: str) -> Leg:
            plan = Plan(workload, points, pool, cell.model, True, f"scaling.{label}")
            found = run_leg(plan, servers[server], scratch / label)
            print(f"{label}: {found.beside['wall_s']:.0f} s", flush=True)
            return found

        alone = [leg(gpus[0], "0.alone")]
        with ThreadPoolExecutor(len(gpus)) as pool_of_threads:
            together = dict(
                zip(gpus, pool_of_threads.map(lambda gpu: leg(gpu, f"1.together.gpu{gpu}"), gpus), strict=True)
            )
        parallel = [leg("all", "2.tensor-parallel")]
        alone.append(leg(gpus[0], "3.alone"))
        facts = {server: found.facts() for server, found in servers.items()}
    for fact in facts.values():
        fact["log"] = (raw / Path(fact["log"]).name).as_posix()
    record = {
        "schema": scaling.SCHEMA,
        "cell": cell.name,
        **cell._asdict(),
        "package_digest": jsonio.read_json(cell.deploy / "manifest.json")["checkpoint"]["digest"],
        "gpus": len(gpus),
        "workload": name,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "order": "alone, together, tensor parallel, alone",
        "points": [
            scaling.point(
                p,
                len(gpus),
                [x.rows.get(p.name, []) for x in alone],
                {gpu: x.rows.get(p.name, []) for gpu, x in together.items()},
                [x.rows.get(p.name, []) for x in parallel],
            )
            for p in points
        ],
        "server": facts,
        "client": {"tool": f"aiperf {versions('aiperf').get('aiperf')}", "endpoint": "/v1/completions"},
        "host": host.fingerprint(),
        "locks": lock_hashes("client", facts["all"]["environment"]),
        "git_commit": host.git_commit(),
        "finished_at": host.now(),
        "wall_s": round(time.monotonic() - start, 1),
    }
    shutil.rmtree(raw, ignore_errors=True)
    raw.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(scratch, raw)
    jsonio.write_json(Path("artifacts/results") / cell.name / "scaling.json", record)
    print(json.dumps({p["name"]: p["efficiency"] for p in record["points"]}), flush=True)


def chosen(workload: Workload, loads: str | None) -> list[Point]:
    """Return the loads named by `--loads c64,c256`; all of the workload's without it.

    Raises:
        InputError: one that the workload has not.
    """
    if loads is None:
        return list(workload.points)
    known = {p.name: p for p in workload.points}
    for name in loads.split(","):
        if name not in known:
            raise unknown("load", name, known, "the workload")
    return [known[name] for name in loads.split(",")]


if __name__ == "__main__":
    for variable in DROPPED:
        os.environ.pop(variable, None)
    run_main(main)

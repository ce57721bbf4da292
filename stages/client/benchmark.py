"""Time one cell beside its baseline with AIPerf: two servers, one host, one run, every speed a ratio."""

from __future__ import annotations

import json
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipeline import host, jsonio
from pipeline.errors import InputError
from pipeline.making import arguments
from pipeline.package import Cell, serve_options
from pipeline.params import load_params
from pipeline.program import run_main
from pipeline.serving import Server
from pipeline.specs import Params
from pipeline.speed import results
from pipeline.speed.definitions import definitions
from pipeline.speed.leg import Leg, Plan, run_leg
from pipeline.speed.load import DROPPED
from pipeline.speed.watch import fetch
from pipeline.speed.workloads import Point, Workload, out_of_reach
from stages.client import runs


def main() -> None:
    """Benchmark the cell named by --model --recipe --runtime --target beside its baseline."""
    args = arguments("model", "recipe", "runtime", "target")
    cell = Cell(args.model, args.recipe, args.runtime, args.target)
    params = load_params()
    target = cell.check(params)
    baseline = Cell(cell.model, params.baseline, cell.runtime, cell.target)
    names = params.workloads_of(target)
    pool = prompt_pool(params, cell.model)
    scratch = runs.begin(cell, "bench")
    start = time.monotonic()
    load_before = host.load_average()
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
        facts = {role: server_facts(servers[side]) for role, side in (("baseline", "A"), ("candidate", "B"))}
        timed = results.Timed()
        for name in names:
            points = in_reach(name, params.workloads[name], facts, cell, params, timed)
            run_workload(name, params.workloads[name], points, servers, cell, scratch, pool, timed)
    for role, fact in facts.items():
        log = "server.baseline.log" if role == "baseline" or cell == baseline else "server.candidate.log"
        fact["log"] = (runs.raw_folder(cell, "bench") / log).as_posix()
    record = {
        "schema": "quantpress.bench/1",
        "baseline": baseline.name,
        "is_baseline": cell == baseline,
        "definitions": definitions(),
        "prompts": "token ids cut from the held-out text, no two with the same start, other ones in every leg",
        "server": facts,
        "load_average": load_before,
        "order": ", ".join(dict.fromkeys(params.workloads[n].sides for n in names)),
        "workloads": timed.workloads,
        "summary": results.summary(timed.workloads),
    }
    runs.keep(cell, "bench", scratch)
    out = Path("artifacts/results") / cell.name
    jsonio.write_text(out / "requests.csv", results.requests_csv(timed))
    jsonio.write_text(out / "speed.csv", results.speed_csv(timed.workloads))
    whole = runs.write(cell, "bench", record, facts["candidate"]["environment"], start)
    print(json.dumps({"cell": cell.name, "wall_s": whole["wall_s"]}), flush=True)


def server_facts(server: Server) -> dict[str, Any]:
    """Return what is known of a running server, its longest context included."""
    page = fetch(f"{server.url}/v1/models")
    entries = json.loads(page).get("data") if page else None
    return server.facts() | {"max_model_len": entries[0].get("max_model_len") if entries else None}


def prompt_pool(params: Params, model: str) -> list[list[int]]:
    """Return the rows of token ids that prompts are cut from: the held-out text of this model.

    Raises:
        InputError: it was not made yet.
    """
    folder = Path("calib_data") / f"{params.evaluation.held_out}.{model}"
    if not (folder / "tokens.json").is_file():
        raise InputError(f"{folder} is missing. Run `uv run dvc repro calibrate@{folder.name}`.")
    rows: list[list[int]] = jsonio.read_json(folder / "tokens.json")["input_ids"]
    return rows


def in_reach(
    name: str, workload: Workload, facts: dict[str, Any], cell: Cell, params: Params, timed: results.Timed
) -> list[Point]:
    """Return the points that both servers can hold; note the others with the reason."""
    seqs = serve_options(cell, params).get("max-num-seqs")
    points = []
    for point in workload.points:
        why = [out_of_reach(point, workload, fact | {"max_num_seqs": seqs}) for fact in facts.values()]
        if any(why):
            timed.leave_out(name, point, next(w for w in why if w))
        else:
            points.append(point)
    return points


def run_workload(
    name: str, workload: Workload, points: list[Point], servers: dict[str, Server], cell: Cell, scratch: Path,
    pool: list[list[int]], timed: results.Timed,
) -> None:  # fmt: skip
    """Time every leg of the order (A baseline, B candidate) and add the workload to `timed`."""
    legs: list[tuple[str, Leg]] = []
    for number, side in enumerate(workload.sides if points else ""):
        # Against itself: the same server, streamed (B) and not streamed (A).
        split = workload.against == "not-streamed"
        streaming = side == "B" if split else workload.streaming
        server = servers["B"] if split or workload.order == "A" else servers[side]
        leg = settle(name, workload, points, server, cell, streaming, scratch / f"{name}.{number}{side}", pool)
        legs.append((side, leg))
        wall, busy = leg.beside["wall_s"], leg.beside["load_s"]
        print(
            f"{name} leg {number + 1}/{len(workload.sides)} ({side}): {wall:.0f} s, {busy:.0f} s of it load", flush=True
        )
    timed.add(name, workload, points, legs)


def settle(
    name: str, workload: Workload, points: list[Point], server: Server, cell: Cell, streaming: bool, folder: Path,
    pool: list[list[int]],
) -> Leg:  # fmt: skip
    """Run a leg; while a point had not settled and retries are left, run it again with twice the warm-up."""
    for attempt in range(workload.warmup_retries + 1):
        where = folder.with_name(f"{folder.name}.try{attempt}") if attempt else folder
        plan = Plan(workload, points, pool, cell.model, streaming, f"{name}.{where.name}")
        leg = run_leg(plan, server, where)
        unsettled = results.unsettled(points, leg)
        if not unsettled or attempt == workload.warmup_retries:
            return leg
        print(f"{name}: not settled at {', '.join(unsettled)}; again with twice the warm-up", flush=True)
        points = [p.model_copy(update={"warmup": 2 * p.warmup}) if p.name in unsettled else p for p in points]
    raise AssertionError("unreachable")


if __name__ == "__main__":
    for variable in DROPPED:
        os.environ.pop(variable, None)
    run_main(main)

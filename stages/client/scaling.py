"""Measure how a cell scales over the GPUs of one host, in one run: one server on one GPU alone, one on each GPU at
once, one over all of them: `python -m pipeline run client scaling --model M --recipe R --runtime vllm --target T`.
"""

from __future__ import annotations

import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, WorkError, unknown
from pipeline.making import arguments
from pipeline.package import Cell
from pipeline.params import load_params
from pipeline.program import run_main
from pipeline.serving import Change, Server
from pipeline.specs import Params
from pipeline.speed.leg import Leg, Plan, run_leg
from pipeline.speed.load import DROPPED
from pipeline.speed.steady import Row
from pipeline.speed.workloads import Point, Workload
from pipeline.tuning import scaling
from stages.client import runs
from stages.client.benchmark import prompt_pool

SPLIT = "tensor-parallel-size"
ALL = "all"
Legs = dict[str, list[Leg]]


class Scaling:
    """One run: the cell, its loads, its servers and the legs timed so far, by `alone`, a GPU's number, or `all`."""

    def __init__(self, cell: Cell, params: Params, workload: str, points: list[Point], scratch: Path) -> None:
        """Prepare a run; raise an InputError where the held-out text is missing."""
        self.cell, self.params, self.scratch = cell, params, scratch
        self.workload, self.points = workload, points
        self.pool = prompt_pool(params, cell.model)
        self.gpus = visible(params.targets[cell.target].count)
        self.start = time.monotonic()
        self.legs: Legs = {}
        self.facts: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.writing = threading.Lock()

    def server(self, name: str, gpus: list[str]) -> Server:
        """Return the cell's server over `gpus`, not started."""
        change = Change({SPLIT: len(gpus)}, {"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
        return Server(self.cell, self.params, self.scratch / f"server.{name}.log", 1, change=change)

    def leg(self, side: str, server: Server) -> None:
        """Time the loads against a server."""
        label = f"{sum(map(len, self.legs.values()))}.{side}"
        spec = self.params.workloads[self.workload]
        plan = Plan(spec, self.points, self.pool, self.cell.model, True, f"scaling.{label}")
        found = run_leg(plan, server, self.scratch / label)
        with self.writing:
            self.legs.setdefault(side, []).append(found)
            self.facts[self.gpus[0] if side == "alone" else side] = server.facts()
            print(f"{side}: {found.beside['wall_s']:.0f} s", flush=True)
            # After every leg: a lent host may be gone before the last one.
            self.write(complete=False)

    def cells(self) -> None:
        """Time one server on the first GPU alone, one on each at once, and the first alone again."""
        with ExitStack() as stack:
            servers = {gpu: stack.enter_context(self.server(f"gpu{gpu}", [gpu])) for gpu in self.gpus}
            for server in servers.values():
                server.wait_ready()
            print(f"{len(servers)} servers ready after {time.monotonic() - self.start:.0f} s", flush=True)
            self.leg("alone", servers[self.gpus[0]])
            with ThreadPoolExecutor(len(self.gpus)) as pool:
                list(pool.map(lambda gpu: self.leg(gpu, servers[gpu]), self.gpus))
            self.leg("alone", servers[self.gpus[0]])

    def tensor_parallel(self) -> None:
        """Time one server over all GPUs. Where it fails, why is kept: what was timed before holds all the same."""
        server = self.server(ALL, self.gpus)
        try:
            with server:
                server.wait_ready()
                self.leg(ALL, server)
        except (InputError, WorkError, OSError) as error:
            self.failed["tensor parallel"] = str(error)
            print(f"tensor parallel FAILED: {error}", flush=True)

    def rows(self, side: str, point: Point) -> list[list[Row]]:
        """Return the requests of a side's legs at one load."""
        return [leg.rows.get(point.name, []) for leg in self.legs.get(side, [])]

    def write(self, complete: bool) -> None:
        """Write scaling.json with what there is; also half way, because a lent host may be gone before the end."""
        points = []
        for p in self.points:
            together = {gpu: rows[0] for gpu in self.gpus if (rows := self.rows(gpu, p))}
            points.append(scaling.point(p, len(self.gpus), self.rows("alone", p), together, self.rows(ALL, p)))
        raw = runs.raw_folder(self.cell, "scaling")
        facts = {name: fact | {"log": (raw / Path(fact["log"]).name).as_posix()} for name, fact in self.facts.items()}
        spec = self.params.workloads[self.workload]
        ended = {} if complete or ALL in self.legs else {"tensor parallel": "the run ended before it"}
        failed = ended | self.failed
        record = {
            "schema": scaling.SCHEMA,
            "gpus": len(self.gpus),
            "workload": self.workload,
            "prompt_tokens": spec.prompt_tokens,
            "output_tokens": spec.output_tokens,
            "order": "alone, together, alone, tensor parallel",
            "points": points,
            "failed": failed,
            "server": facts,
        }
        runs.write(self.cell, "scaling", record, next(iter(facts.values()))["environment"], self.start)
        print(json.dumps({p["name"]: p["efficiency"] for p in points}), flush=True)


def main() -> None:
    """Scale the cell named by --model --recipe --runtime --target over the GPUs that its target counts."""
    args = arguments("model", "recipe", "runtime", "target", optional=("loads",))
    cell = Cell(args.model, args.recipe, args.runtime, args.target)
    params = load_params()
    target = cell.check(params)
    if target.count < 2:
        raise InputError(f"Target {cell.target} has one GPU (count); scaling needs two or more.")
    name = params.workloads_of(target)[0]
    scratch = runs.begin(cell, "scaling")
    run = Scaling(cell, params, name, chosen(params.workloads[name], args.loads), scratch)
    run.cells()
    # Not beside the others: a server that starts would disturb them, and three at once took minutes to start.
    run.tensor_parallel()
    runs.keep(cell, "scaling", scratch)
    run.write(complete=True)


def visible(count: int) -> list[str]:
    """Return the GPUs to use: those that CUDA_VISIBLE_DEVICES names, where it is set.

    Raises:
        InputError: it names fewer than the target counts.
    """
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if named and len(named) < count:
        raise InputError(f"The target counts {count} GPUs, CUDA_VISIBLE_DEVICES names {len(named)}; unset it.")
    return named[:count] or [str(number) for number in range(count)]


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

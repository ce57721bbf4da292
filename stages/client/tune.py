"""Time a cell's variants (other options, kernels, checkpoints; params.yaml, `tuning`) beside the cell as it is, in one
run on one GPU: `python -m pipeline run client tune --model M --recipe R --runtime vllm --target T`.
"""

from __future__ import annotations

import itertools
import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pipeline import host
from pipeline.errors import InputError, WorkError
from pipeline.making import arguments
from pipeline.package import Cell
from pipeline.params import load_params
from pipeline.program import run_main
from pipeline.serving import Change, Server
from pipeline.specs import Params
from pipeline.speed.leg import Leg, Plan, run_leg
from pipeline.speed.load import DROPPED
from pipeline.speed.steady import Row
from pipeline.speed.workloads import Point, Workload, out_of_reach
from pipeline.tuning import rank
from pipeline.tuning.served import served_as
from pipeline.tuning.spec import OWN, Tuning, Variant
from stages.client import runs
from stages.client.benchmark import prompt_pool

AGAIN = "own again"
# How long a variant may take to start, in starts of the cell as it is.
LATE, LEAST_START_S = 2.5, 180.0


def main() -> None:
    """Tune the cell named by --model --recipe --runtime --target."""
    args = arguments("model", "recipe", "runtime", "target")
    cell = Cell(args.model, args.recipe, args.runtime, args.target)
    params = load_params()
    cell.check(params)
    if cell.name not in params.tuning:
        known = ", ".join(params.tuning) or "none"
        raise InputError(f"params.yaml has no `tuning` for {cell.name}. It has: {known}.")
    tuning = params.tuning[cell.name]
    workload = params.workloads[tuning.workload]
    pool = prompt_pool(params, cell.model)
    scratch = runs.begin(cell, "tune")
    start = time.monotonic()
    legs: dict[str, list[Leg]] = {}
    order: list[str] = []
    with ExitStack() as stack:
        servers, failed = start_all(cell, params, tuning, scratch, stack)
        print(f"{len(servers)} servers ready after {time.monotonic() - start:.0f} s; failed: {failed}", flush=True)
        points = in_reach(workload, servers)
        raw = runs.raw_folder(cell, "tune")
        facts = {name: server.facts() | {"log": (raw / log_name(name)).as_posix()}
                 for name, server in servers.items()}  # fmt: skip
        served = {c.recipe: served_as(c.deploy) for c in (cell, *others(cell, tuning))}
        by_turns = itertools.cycle((OWN, AGAIN))
        for number, name in enumerate(rank.order([v for v in tuning.variants if v in servers])):
            plan = Plan(workload, points, pool, cell.model, True, f"tune.{number}")
            server = servers[next(by_turns) if name == OWN else name]
            try:
                leg = run_leg(plan, server, scratch / f"{number}.{name}")
            except WorkError as error:
                if name == OWN:
                    raise
                failed[name] = str(error)
                print(f"leg {number + 1} ({name}) FAILED: {error}", flush=True)
                continue
            legs.setdefault(name, []).append(leg)
            order.append(name)
            print(f"leg {number + 1} ({name}): {leg.beside['wall_s']:.0f} s", flush=True)
            # After every leg: a lent host may be gone before the last one. Without it the noise is not known, and
            # nothing is proposed.
            record = outcome(tuning, workload, points, legs, order, failed) | {"server": facts, "served": served}
            found = runs.write(cell, "tune", record, facts[OWN]["environment"], start)
    runs.keep(cell, "tune", scratch)
    said = "\n".join(proposal.text for proposal in rank.proposals(found))
    print(said or "nothing is shown to beat the cell's own options", flush=True)


def others(cell: Cell, tuning: Tuning) -> list[Cell]:
    """Return the cells whose packages the variants serve, beside the cell's own, where they are there."""
    recipes = dict.fromkeys(v.recipe for v in tuning.variants.values() if v.recipe)
    cells = [cell._replace(recipe=recipe) for recipe in recipes if recipe != cell.recipe]
    return [c for c in cells if (c.deploy / "manifest.json").is_file()]


def outcome(
    tuning: Tuning,
    workload: Workload,
    points: list[Point],
    legs: dict[str, list[Leg]],
    order: list[str],
    failed: dict[str, str],
) -> dict[str, Any]:
    """Return what tune.json says of the legs so far, which ran in `order`."""
    return {
        "schema": rank.SCHEMA,
        "workload": tuning.workload,
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "common_options": tuning.options,
        "variants": {name: v.model_dump() for name, v in tuning.variants.items()},
        "order": order,
        "points": [rank.point(p, rows_of(legs, p)) for p in points],
        "client_bound": client_bound(legs, points),
        "front_end_pct": front_end_pct(legs, points),
        "legs": {name: [_beside(leg) for leg in found] for name, found in legs.items()},
        "failed": failed,
    }


def start_all(
    cell: Cell, params: Params, tuning: Tuning, scratch: Path, stack: ExitStack
) -> tuple[dict[str, Server], dict[str, str]]:
    """Start every side at once; return those that are ready, and why the others are not.

    The cell as it is stands there twice: two starts of one server may differ by more than two legs of it. A variant
    that takes far longer than they did is ended: what still compiles would be in all timings, and a lent host waits.

    Raises:
        WorkError, InputError: the cell as it is did not start.
    """
    threads = max(1, host.usable_cores() - 1)
    started: dict[str, Server] = {}
    failed: dict[str, str] = {}
    for name, variant in {OWN: None, AGAIN: None, **tuning.variants}.items():
        of = cell if variant is None or variant.recipe is None else cell._replace(recipe=variant.recipe)
        server = Server(of, params, scratch / log_name(name), threads, change=change_of(tuning, variant))
        try:
            started[name] = stack.enter_context(server)
        except (InputError, WorkError) as error:  # a variant's package that is not there must not lose the others
            if variant is None:
                raise
            failed[name] = str(error)
    limit_s = 0.0
    for name, server in list(started.items()):
        try:
            server.wait_ready(*([limit_s] if limit_s and name not in (OWN, AGAIN) else []))
        except WorkError as error:
            if name in (OWN, AGAIN):
                raise
            failed[name] = str(error)
            started.pop(name).__exit__(None, None, None)
            continue
        limit_s = max(limit_s, LEAST_START_S, LATE * (server.startup_s or 0))
    return started, failed


def log_name(side: str) -> str:
    """Return the name of a side's log."""
    return f"server.{side.replace(' ', '-')}.log"


def change_of(tuning: Tuning, variant: Variant | None) -> Change:
    """Return what a side's server is started with beside its package: the common options, then the variant's own."""
    if variant is None:
        return Change(tuning.options, {})
    return Change(tuning.options | variant.options, variant.variables)


def in_reach(workload: Workload, servers: dict[str, Server]) -> list[Point]:
    """Return the points that every server can hold.

    Raises:
        InputError: none of them.
    """
    why: list[str] = []
    points = []
    for point in workload.points:
        found = [w for s in servers.values() if (w := out_of_reach(point, workload, s.facts()))]
        if found:
            why.append(f"{point.name}: {found[0]}")
        else:
            points.append(point)
    if not points:
        raise InputError(f"The servers hold none of the workload's loads: {'; '.join(why)}.")
    return points


def rows_of(legs: dict[str, list[Leg]], point: Point) -> dict[str, list[list[Row]]]:
    """Return each side's requests at one load, leg by leg."""
    return {name: [leg.rows.get(point.name, []) for leg in found] for name, found in legs.items()}


def client_bound(legs: dict[str, list[Leg]], points: list[Point]) -> list[str]:
    """Return the loads at which the client itself was seen at its limit in some leg."""
    sides = [leg.beside["client"] for found in legs.values() for leg in found]
    return [p.name for p in points if any((side.get(p.name) or {}).get("bound") for side in sides)]


def front_end_pct(legs: dict[str, list[Leg]], points: list[Point]) -> dict[str, dict[str, float | None]]:
    """Return for each side and load how busy the process that answers requests was, % of a core, in its busiest leg."""
    return {
        name: {p.name: max((x for leg in found if (x := _busy(leg, p)) is not None), default=None) for p in points}
        for name, found in legs.items()
    }


def _busy(leg: Leg, point: Point) -> float | None:
    busy: float | None = (leg.beside["front_end"].get(point.name) or {}).get("busy_pct")
    return busy


def _beside(leg: Leg) -> dict[str, Any]:
    return {key: value for key, value in leg.beside.items() if key != "client"}


if __name__ == "__main__":
    for variable in DROPPED:
        os.environ.pop(variable, None)
    run_main(main)

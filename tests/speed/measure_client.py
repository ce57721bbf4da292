"""What the load generator's own waiting costs: one server, timed with this project's AIPerf plugin and without it.

    python -m tests.speed.measure_client --model smollm2-135m --recipe bf16 --runtime vllm --target cpu

In the order without, with, with, without, on the first workload of the target; prints each leg's tokens/s, TPOT and the
busiest client process, and the ratios with over without. It writes nothing but a folder under .quantpress/scratch.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def measure(arguments: list[str]) -> None:
    """Run inside the client's environment; see the module."""
    from pipeline import host
    from pipeline.package import Cell
    from pipeline.params import load_params
    from pipeline.serving import Server
    from pipeline.speed import leg, load
    from pipeline.speed.points import side
    from stages.client.benchmark import prompt_pool

    cell = Cell(*arguments)
    params = load_params()
    name = params.workloads_of(cell.check(params))[0]
    workload = params.workloads[name]
    scratch = Path(".quantpress/scratch/measure_client")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    plugin, check = load.PLUGIN, leg.need_plugin
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with Server(cell, params, scratch / "server.log", max(1, host.usable_cores() - 1)) as server:
        server.wait_ready()
        for number, how in enumerate(("without", "with", "with", "without")):
            load.PLUGIN = plugin if how == "with" else scratch / "none"
            leg.need_plugin = check if how == "with" else lambda *_: None
            plan = leg.Plan(workload, workload.points, prompt_pool(params, cell.model), cell.model, True, f"c{number}")
            timed = leg.run_leg(plan, server, scratch / f"{number}.{how}")
            for point in workload.points:
                seen = side([timed.rows[point.name]], point.concurrency)
                row = {"tok_s": seen["output_tok_s"], "tpot_ms": seen["tpot_ms"]["p50"],
                       "ttft_ms": seen["ttft_ms"]["p50"],
                       "busiest_pct": timed.beside["client"][point.name]["busiest_pct"]}  # fmt: skip
                found.setdefault((point.name, how), []).append(row)
                print(point.name, how, row, flush=True)
    for point in workload.points:
        for key in ("tok_s", "tpot_ms", "ttft_ms"):
            mean = {how: sum(r[key] for r in found[point.name, how]) / 2 for how in ("with", "without")}
            print(f"{point.name} {key}: with / without = {mean['with'] / mean['without']:.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        measure(sys.argv[2:])
    else:
        from pipeline.runstage import env_python

        values = sys.argv[2::2]
        if sys.argv[1::2] != ["--model", "--recipe", "--runtime", "--target"] or len(values) != 4:
            sys.exit(__doc__)
        command = [str(env_python("client")), "-m", "tests.speed.measure_client", "--inside", *values]
        sys.exit(subprocess.run(command, cwd=ROOT).returncode)

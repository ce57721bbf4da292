"""trtllm and import-bench: engines and bundles of TensorRT-LLM, and results of other benchmark tools."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.commands import PARAMS, Add

if TYPE_CHECKING:
    from pipeline.cells import Cell
    from pipeline.specs import Params

STEPS = {
    "plan": "print parameters, flags, YAML and commands of a cell, with reasons",
    "export": "make the TensorRT-LLM checkpoint of an engine (no GPU needed) and prove it",
    "build": "run trtllm-build on the target GPU and write the sidecar",
    "check": "compare an engine with this host, field by field, before anything loads it",
    "warm": "start the server, wait until it answers, ask one question, and record it",
}


def _trtllm(args: argparse.Namespace) -> int:
    from pipeline.cells import Cell
    from pipeline.errors import InputError
    from pipeline.params import load_params
    from pipeline.trtllm.settings import RUNTIMES

    params, cell = load_params(PARAMS), Cell.parse(args.cell)
    cell.check(params)
    if cell.runtime not in RUNTIMES:
        raise InputError(f"{cell.name} is served by {cell.runtime}; this command is for {' and '.join(RUNTIMES)}.")
    steps = {"plan": _plan, "export": _export, "build": _build, "check": _check, "warm": _warm}
    return steps[args.step](cell, params)


def _config(cell: Cell) -> dict[str, object]:
    from pipeline import jsonio, plan
    from pipeline.params import load_params

    known = plan.known_configs(Path("."), load_params(PARAMS))
    if cell.model in known:
        return known[cell.model]
    return dict(jsonio.read_json(Path("artifacts/models") / cell.model / "config.json"))


def _plan(cell: Cell, params: Params) -> int:
    import shlex

    import yaml

    from pipeline.plan import checkpoint_path
    from pipeline.producers import producer_for, served
    from pipeline.trtllm.deployment import deployment
    from pipeline.trtllm.package import describe
    from pipeline.trtllm.settings import RUNTIMES

    recipe, target = params.recipes[cell.recipe], params.targets[cell.target]
    producer = producer_for(recipe, cell.runtime)
    found = served(recipe, producer, cell.runtime, target, cell.target, params.allow_unknown)
    print(f"{cell.name}: {found.verdict}: {found.reason or found.source}")
    where = Path(checkpoint_path(cell.model, cell.recipe, recipe, producer)) if cell.runtime == RUNTIMES[1] else None
    plan = deployment(cell, params, _config(cell), where)
    facts = describe(plan)
    ranks = "1 rank" if plan.split.world_size == 1 else f"{plan.split.world_size} ranks ({plan.split.name})"
    print(f"TensorRT-LLM {plan.version}, {ranks}, container {plan.container}")
    for entry in facts["serving"]:
        print(f"  {entry['name']:28} {entry['value']!s:22} {entry['reason']}")
    if facts["build"]:
        print(f"build:\n  {shlex.join(facts['build'])}")
    print(f"serve:\n  {shlex.join(facts['serve'])}")
    print("serve.yaml:\n  " + yaml.safe_dump(plan.yaml).strip().replace("\n", "\n  "))
    print("engine and speed: not measured (planned only)")
    return 0


def _export(cell: Cell, params: Params) -> int:
    from pipeline.runstage import run_stage
    from pipeline.trtllm.deployment import deployment

    plan = deployment(cell, params, _config(cell))
    if plan.build is None:
        print(f"{cell.name} is served from {plan.checkpoint} as it is: nothing to export.")
        return 0
    names = ["--model", cell.model, "--recipe", cell.recipe, "--tp", str(plan.split.tp), "--pp", str(plan.split.pp)]
    return run_stage("modelopt", "trtllm_checkpoint", names)


def _build(cell: Cell, params: Params) -> int:
    from pipeline.trtllm.build import build

    made = build(cell, params)
    ranks, seconds = made["world_size"], made["build_s"]
    print(f"{cell.engine}: SM{made['sm']}, TensorRT-LLM {made['tensorrt_llm']}, {ranks} ranks, {seconds} s")
    if not made["genuine"]:
        print(
            "warning: what built this engine is not an installed TensorRT-LLM; it can be neither measured nor shipped."
        )
    return 0


def _check(cell: Cell, params: Params) -> int:
    from pipeline.trtllm.checking import check_engine

    print(check_engine(cell, params))
    return 0


def _warm(cell: Cell, params: Params) -> int:
    from pipeline.trtllm.warming import warm

    made = warm(cell, params)
    print(f"{cell.name}: {made['state']}")
    return 0


def _import(args: argparse.Namespace) -> int:
    from pipeline import jsonio
    from pipeline.speed import imported

    made = imported.import_result(args.file, args.tool, args.model)
    if args.out:
        jsonio.write_json(args.out, made)
    print(imported.summary(made))
    if args.against:
        rows = list(imported.compare(made, imported.read(args.against)))
        imported.need_comparable(rows, args.metric)
        print(imported.table([r for r in rows if args.metric in (None, r.metric)]))
    print(made["note"])
    return 0


def register(add: Add) -> None:
    """Add the commands of this module."""
    trtllm = add("trtllm", _trtllm, "engines and bundles of TensorRT-LLM: " + ", ".join(STEPS))
    trtllm.add_argument("step", choices=tuple(STEPS), help="; ".join(f"{k}: {v}" for k, v in STEPS.items()))
    trtllm.add_argument("cell", help="MODEL.RECIPE.RUNTIME.TARGET, as `python -m pipeline plan` lists it")
    bench = add("import-bench", _import, "read a result of trtllm-bench or vllm bench, with units and definitions")
    bench.add_argument("file", type=Path)
    bench.add_argument(
        "--tool", required=True, help="trtllm-bench, vllm-bench-serve, vllm-bench-latency, vllm-bench-throughput"
    )
    bench.add_argument("--model", help="this project's model id")
    bench.add_argument("--out", type=Path, help="keep it there as JSON")
    bench.add_argument("--against", type=Path, help="another imported result, or bench.json#WORKLOAD/CONCURRENCY")
    bench.add_argument("--metric", help="only this one; unlike definitions are then an error")

"""memory, serving: what a model needs, and the options that a server of a cell gets."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.commands import PARAMS, Add

if TYPE_CHECKING:
    from pipeline.memory.cells import CellIds
    from pipeline.specs import Params

# Where an option comes from that is neither proposed nor the user's; see pipeline/package.py, serve_options.
FIXED = {
    "served_model_name": "the model's id in params.yaml",
    "seed": "fixed, so that a run can be repeated",
    "trust_remote_code": "models.trust_remote_code in params.yaml",
    "kv_cache_dtype": "recipes.kv_cache in params.yaml",
}


def _memory(args: argparse.Namespace) -> int:
    import json

    from pipeline.errors import unknown
    from pipeline.memory.describe import describe, text
    from pipeline.params import load_params

    target, loads = None, None
    if args.target:
        params = load_params(PARAMS)
        if args.target not in params.targets:
            raise unknown("target", args.target, params.targets, "params.yaml")
        target, loads = (args.target, params.targets[args.target]), params.workloads
    found = describe(args.config, args.format, args.group_size, args.kv_dtype, args.tensor_parallel, target, loads)
    print(json.dumps(found, indent=1) if args.json else text(found))
    return 0


def _serving(args: argparse.Namespace) -> int:
    import json

    from pipeline import plan
    from pipeline.errors import InputError, unknown
    from pipeline.memory.cells import CellIds, sizes
    from pipeline.params import load_params
    from pipeline.tuning.propose import proposed, read_tune, tuned
    from pipeline.whole_gpu import kept_small

    params = load_params(PARAMS)
    configs = plan.known_configs(Path("."), params)
    cells = {cell["cell"]: cell for cell in plan.make_plan(params, configs)["cells"]}
    if args.cell not in cells:
        raise unknown("cell", args.cell, cells, "the plan")
    cell = cells[args.cell]
    if cell["model"] not in configs:
        raise InputError(f"{cell['model']} is not fetched yet. Run `uv run dvc repro fetch@{cell['model']}`.")
    ids = CellIds(*(cell[key] for key in CellIds._fields))
    found = sizes(params, ids, configs[cell["model"]], cell["verdict"])
    if ids.runtime == "vllm" and not found["problem"]:
        found["serving"] += _others(params, ids, configs[cell["model"]], {item["name"] for item in found["serving"]})
    if args.json:
        doc = read_tune(Path("."), args.cell)
        run = tuned(doc, args.cell) if doc else None
        found["tuned"] = run and run._asdict() | {"offers": [offer._asdict() for offer in run.offers]}
        print(json.dumps(found, indent=1))
    else:
        print(_serving_text(found))
        if ids.runtime == "vllm" and (kept := kept_small(params, ids, configs[cell["model"]])):
            print(kept.text)
        if tried := proposed(Path("."), [args.cell]):
            print(tried)
    return 2 if found["problem"] else 0


def _others(params: Params, ids: CellIds, config: Mapping[str, Any], listed: set[str]) -> list[dict[str, Any]]:
    """Return the options of the package's serve.yaml that the plan does not propose, each with its source."""
    from pipeline.memory.cells import own_options
    from pipeline.memory.serving_params import YOURS
    from pipeline.package import Cell, serve_options

    own = {str(name).replace("-", "_") for name in own_options(params, ids.runtime, ids.target)}
    options = {k.replace("-", "_"): v for k, v in serve_options(Cell(*ids), params, config).items()}
    return [
        {"name": name, "value": value, "reason": YOURS if name in own else FIXED[name]}
        for name, value in options.items()
        if name not in listed
    ]


def _serving_text(found: dict[str, Any]) -> str:
    lines = [found["cell"]]
    if found["problem"]:
        lines.append(f"no serving parameters: {found['problem']}")
    width = max((len(item["name"]) for item in found["serving"]), default=0)
    lines += [f"  {item['name']:{width}}  {item['value']!s:20}  {item['reason']}" for item in found["serving"]]
    lines.append("predicted (a bound from bandwidth and peaks, not a measurement):")
    for load in found["predicted"]:
        what = f"  {load['workload']}, {load['concurrency']} at once:"
        if load["output_tok_s"] is None:
            lines.append(f"{what} not predicted ({load['decode_reason']})")
            continue
        prefill = f"prefill of one prompt {load['prefill_ms']:.3g} ms" if load["prefill_ms"] is not None else ""
        prefill = prefill or f"prefill not predicted ({load['prefill_reason']})"
        lines.append(
            f"{what} at most {load['output_tok_s']:,.0f} tok/s, at least {load['tpot_ms']:.3g} ms a token "
            f"(bound by {load['decode_bound_by']}); {prefill}"
        )
    return "\n".join(lines)


def register(add: Add) -> None:
    """Add the commands of this module."""
    memory = add("memory", _memory, "weights, KV cache and fit of any model, from config.json and headers alone")
    memory.add_argument("config", type=Path, metavar="CONFIG_JSON", help="a config.json, or a folder that holds one")
    memory.add_argument("--format", help="predict this format, e.g. fp8-tensor or int4-w4a16 (default: as it is)")
    memory.add_argument("--group-size", type=int, help="of a format with groups (default 128)")
    memory.add_argument("--kv-dtype", default="auto", help="type of the KV cache, e.g. fp8 (default: the model's own)")
    memory.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share the model (default 1)")
    memory.add_argument("--target", help="a target of params.yaml: does it fit, how many sequences, which context")
    memory.add_argument("--json", action="store_true", help="print one JSON document; bytes are per GPU")
    serving = add("serving", _serving, "the serving parameters of a cell, each with its reason, and predicted speed")
    serving.add_argument("--cell", required=True, help="model.recipe.runtime.target, as the plan prints it")
    serving.add_argument("--json", action="store_true", help="print one JSON document")

"""lint, package, verify: whether an artifact is whole."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.commands import PARAMS, Add
from pipeline.errors import WorkError, unknown


def _lint(args: argparse.Namespace) -> int:
    from pipeline import jsonio
    from pipeline.lint import lint
    from pipeline.params import load_params
    from pipeline.trtllm.checkpoint import is_rank_checkpoint
    from pipeline.trtllm.proof import prove

    params = load_params(PARAMS)
    if args.recipe not in params.recipes:
        raise unknown("recipe", args.recipe, params.recipes, "params.yaml")
    if args.model not in params.models:
        raise unknown("model", args.model, params.models, "params.yaml")
    recipe = params.recipes[args.recipe]
    source = Path("artifacts/models") / args.model
    # A TensorRT-LLM checkpoint has ranks instead of shards, and rules of its own.
    rule = prove if is_rank_checkpoint(args.checkpoint) else lint
    kv_first = (recipe.kv_cache, recipe.algorithm) if rule is prove else (recipe.algorithm, recipe.kv_cache)
    result = rule(args.checkpoint, source, recipe.format, recipe.group_size, *kv_first)
    if args.out:
        jsonio.write_json(args.out, result)
    for finding in result["findings"]:
        print(f"{finding['severity']}: {finding['rule']}: {finding['subject']}: {finding['message']}")
    if not result["passed"]:
        errors = sum(f["severity"] == "error" for f in result["findings"])
        raise WorkError(f"{args.checkpoint} has {errors} lint errors; it must not be served.")
    layers = result["layers"]
    print(f"{args.checkpoint}: whole. {layers['quantized']} linear layers quantized, {layers['ignored']} left alone.")
    return 0


def _package(args: argparse.Namespace) -> int:
    from pipeline.package import Cell, package
    from pipeline.params import load_params

    cell = Cell(args.model, args.recipe, args.runtime, args.target)
    made = package(cell, load_params(PARAMS))
    print(
        f"{cell.deploy}: {made['support']['verdict']} on {cell.target}, checkpoint {made['checkpoint']['digest'][:12]}"
    )
    return 0


def _verify(args: argparse.Namespace) -> int:
    from pipeline.manifest import verify

    found = verify(args.package, args.root)
    print(f"{args.package}: whole, {len(found['checkpoint']['files'])} checkpoint files match their sha256.")
    if found.get("runtime") == "trtllm-engine":
        from pipeline.cells import Cell
        from pipeline.params import load_params
        from pipeline.trtllm.checking import check_engine

        print(check_engine(Cell.parse(found["cell"]), load_params(PARAMS)))
    if "trtllm" in found:
        from pipeline.trtllm.warming import said

        print(f"load and warm: {said(found)}")
    return 0


def register(add: Add) -> None:
    """Add the commands of this module."""
    lint = add("lint", _lint, "prove a checkpoint whole without a GPU")
    lint.add_argument("checkpoint", type=Path)
    lint.add_argument("--model", required=True)
    lint.add_argument("--recipe", required=True)
    lint.add_argument("--out", type=Path)
    package = add("package", _package, "make what is deployed for one cell")
    for name in ("model", "recipe", "runtime", "target"):
        package.add_argument(f"--{name}", required=True)
    verify = add("verify", _verify, "check a package and its checkpoint against the manifest")
    verify.add_argument("package", type=Path)
    verify.add_argument("--root", type=Path, help="the folder that holds artifacts/ (default: from the package's path)")

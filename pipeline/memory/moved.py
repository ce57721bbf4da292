"""The gain that bytes alone allow: what a decoding step of the baseline reads, over what the cell's step reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.memory.arch import read_arch
from pipeline.memory.cells import CellIds, serving
from pipeline.memory.roofline import roofline
from pipeline.memory.serving_params import NoRoom, form_of, kv_dtype_of
from pipeline.specs import Params


def bytes_ratio(
    params: Params, ids: CellIds, config: Mapping[str, Any], workload: str, concurrency: int
) -> tuple[float | None, str | None]:
    """Return the predicted ratio of weights and KV cache read per step, baseline over cell, or None and why.

    It is the speed-up of decoding where nothing but memory counts (see roofline.py), so it needs no bandwidth. A load
    at which the operations bound the step allows less.
    """
    arch, load = read_arch(config), params.workloads[workload]
    try:
        chosen = {p.name: p.value for p in serving(params, ids, config)}
    except NoRoom:
        chosen = {}
    # Any bandwidth gives the same ratio, and without peaks only bytes bound the step.
    target = params.targets[ids.target].model_copy(update={"bandwidth_gb_s": 1.0, "peaks_tflops": None})
    found = []
    for recipe in (params.recipes[params.baseline], params.recipes[ids.recipe]):
        bound = roofline(
            arch, form_of(recipe, arch), target, round(load.mean_prompt), round(load.mean_output), concurrency,
            tensor_parallel=int(chosen.get("tensor_parallel_size", 1)), kv_dtype=kv_dtype_of(recipe),
        )  # fmt: skip
        if bound.tpot_ms is None:
            return None, bound.decode_reason
        found.append(bound.tpot_ms)
    return found[0] / found[1], None

"""Does it fit: weights, cache and overhead against a target's memory, at each degree of tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.memory.arch import Arch
from pipeline.memory.kv import KvCache, kv_cache
from pipeline.memory.overhead import (
    GIB,
    Engine,
    activation_bytes,
    cache_budget_bytes,
    engine_bytes,
    usable_bytes,
)
from pipeline.memory.stored import Stored
from pipeline.memory.tensors import parameters, weights_of
from pipeline.memory.weights import WeightBytes, exact, predicted
from pipeline.specs import Target
from pipeline.speed.workloads import Workload

TP_SIZES = (1, 2, 4, 8)
ROOM_FOR_CONTEXT = 131_072  # the limit of the search for the largest context where the config names none


@dataclass(frozen=True)
class Fit:
    """One degree of tensor parallelism on one target; bytes are per GPU.

    `sequences`: workload -> how many of its sequences (prompt and output) the cache holds at once. `max_context`: the
    longest single sequence, tokens, capped by the model's own limit. `reason` says why it does not fit.
    """

    tensor_parallel: int
    weights: WeightBytes
    kv: KvCache
    activation_bytes: int
    engine_bytes: int
    usable_bytes: int | None
    budget_bytes: int | None
    fits: bool | None
    reason: str | None
    sequences: Mapping[str, int] = field(default_factory=dict)
    max_context: int | None = None


def split_problem(arch: Arch, tensor_parallel: int, form: Stored | None = None) -> str | None:
    """Return why this model cannot be divided among so many GPUs, or None.

    Query heads must divide, key-value heads divide or be divided (they are copied then), and a row-parallel layer's
    groups must not be cut (TensorRT-LLM: docs/source/legacy/architecture/checkpoint.md; vLLM: linear.py).
    """
    n = tensor_parallel
    if arch.heads % n:
        return f"{n} does not divide the {arch.heads} attention heads"
    if arch.latent is None and arch.kv_heads % n and n % arch.kv_heads:
        return f"{n} neither divides the {arch.kv_heads} key-value heads nor is divided by them"
    widths = [arch.moe.width] if arch.moe else []
    if arch.moe is None or arch.moe.layers < arch.layers:
        widths.append(arch.inter)
    for width in widths:
        if width % n:
            return f"{n} does not divide the intermediate size {width}"
        if form and form.group and form.group < width and (width // n) % form.group:
            return f"{n} leaves {width // n} inputs a GPU, which groups of {form.group} do not divide"
    return None


def weight_bytes(arch: Arch, form: Stored | None, tensor_parallel: int, folder: Path | None = None) -> WeightBytes:
    """Return the weights on one GPU: from the folder's headers where one is given, else predicted."""
    if folder is not None:
        return exact(folder, arch, tensor_parallel, form.fmt if form else "as stored")
    return predicted(arch, form, tensor_parallel)


def fit(
    arch: Arch,
    form: Stored | None,
    target: Target,
    tensor_parallel: int,
    engine: Engine,
    workloads: Mapping[str, Workload] | None = None,
    folder: Path | None = None,
) -> Fit:
    """Return what a target holds when the model is divided among `tensor_parallel` of its GPUs."""
    weights = weight_bytes(arch, form, tensor_parallel, folder)
    cache = kv_cache(arch, engine.kv_dtype, tensor_parallel)
    usable = usable_bytes(target)
    known = (weights, cache, activation_bytes(arch, engine, tensor_parallel), engine_bytes(tensor_parallel), usable)
    problem = split_problem(arch, tensor_parallel, form)
    if problem is None and usable is None:
        problem = "this target's memory is not given (memory_gib)"
    if problem is None and weights.bytes is None:
        problem = f"the weights are not predicted: {weights.reason}"
    if problem is None and arch.not_modelled:
        problem = f"what a sequence keeps is not modelled: {'; '.join(arch.not_modelled)}"
    if problem is not None or usable is None or weights.bytes is None:
        impossible = split_problem(arch, tensor_parallel, form) is not None
        return Fit(tensor_parallel, *known, None, False if impossible else None, problem)
    left = cache_budget_bytes(usable, weights.bytes, arch, engine, tensor_parallel)
    budget = left
    if engine.cache_bytes is not None:
        left, budget = usable - weights.bytes - known[2] - known[3], engine.cache_bytes
    room = budget - cache.fixed_bytes
    limit = arch.max_positions or ROOM_FOR_CONTEXT
    context = cache.longest_in(room, limit, engine.block_tokens) if room > 0 else 0
    counts = {
        name: cache.sequences_in(room, load.longest, engine.block_tokens) for name, load in (workloads or {}).items()
    }
    reason = None
    if left <= 0:
        need = (weights.bytes + known[2] + known[3]) / GIB
        share = engine.fraction if engine.runtime == "vllm" and engine.cache_bytes is None else 1.0
        reason = f"weights and overhead need {need:.1f} GiB, {share * usable / GIB:.1f} GiB of a GPU may be used"
    elif budget > left:
        reason = f"weights and overhead leave {left / GIB:.1f} GiB for a KV cache of {budget / GIB:.1f} GiB"
    elif any(n == 0 for n in counts.values()) or context == 0:
        short = next((name for name, n in counts.items() if n == 0), "one token")
        reason = f"the {budget / GIB:.2f} GiB left for the cache hold no sequence of {short}"
    return Fit(tensor_parallel, *known, budget, reason is None, reason, counts, context)


def calibration_gpus(arch: Arch, algorithm: str, backend: str, target: Target) -> tuple[int | None, str]:
    """Return how many of a target's GPUs a quantization needs at least, and why.

    Model: llm-compressor and GPTQModel bring one decoder layer at a time to the GPU, with, for GPTQ, an FP32 Hessian of
    the inputs of each of its linear layers (docs.vllm.ai/projects/llm-compressor, guides "sequential onloading" and
    "memory requirements") and one more for the inverse. ModelOpt holds the whole source model and runs whole forward
    passes (its layerwise calibration, Model-Optimizer#1251, is not used here). 15% is kept for activations.
    """
    if algorithm in ("none", "rtn"):
        return 0, "it reads no calibration data: a CPU does it layer by layer"
    if not arch.weights_modelled:
        return None, f"not predicted: {'; '.join(arch.not_modelled)}"
    usable = usable_bytes(target)
    if usable is None:
        return 0, "no GPU: it runs on the host, layer by layer"
    source = parameters(arch) * arch.dtype_bytes
    room = 0.85 * usable
    if backend == "modelopt":
        count = math.ceil(source / room)
        return count, f"ModelOpt holds all {source / GIB:.1f} GiB of the source model while it calibrates"
    layer = source / arch.layers
    hessians = _hessian_bytes(arch) if "gptq" in algorithm else 0
    need = layer + hessians
    why = f"one decoder layer at a time: {layer / GIB:.2f} GiB"
    if hessians:
        why += f" and {hessians / GIB:.2f} GiB of Hessians"
    return max(1, math.ceil(need / room)), why


def _hessian_bytes(arch: Arch) -> int:
    """Return the bytes of the FP32 Hessians of one layer's linear layers, and of one inverse."""
    linear = [w for w in weights_of(arch) if w.linear]
    total = sum(w.width**2 * math.ceil(w.count / arch.layers) for w in linear)
    return 4 * (total + max((w.width for w in linear), default=0) ** 2)

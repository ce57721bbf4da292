"""What an engine needs beside weights and cache. A stated model with its sources, checked against published logs.

While vLLM profiles itself it runs one step of `max_num_batched_tokens` tokens and samples for `max_num_seqs` sequences.
The peak of the second is 38.5 bytes a logit (logits and probabilities in FP32, sorted copies, 64-bit indices): with
1024 sequences this gives the "torch peak memory increase" of six published runs within 2% (llm-d/llm-d-benchmark
config_explorer/empirical-vllm-memory-results.md@4f4d449, H100, vLLM defaults; its multi-modal run used less than
predicted). The same table has 0.13 GiB outside torch on one GPU and 0.55 GiB on each of two (NCCL), and CUDA graphs of
-0.9 to 1.0 GiB. tests/unit/test_memory_fit.py holds the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.memory.arch import Arch
from pipeline.specs import Target

GIB = 2**30
LOGIT_BYTES = 38.5
NON_TORCH_BYTES = int(0.13 * GIB)
NON_TORCH_PARALLEL_BYTES = int(0.55 * GIB)
CUDA_GRAPH_BYTES = int(0.5 * GIB)
# The least that a driver was seen to report of the memory as sold: 44.40 GiB of an L40's 48 (QwenLM/Qwen3-VL#2097).
LEAST_USABLE = 0.925
# What a server on a CPU gets for its cache (VLLM_CPU_KVCACHE_SPACE, GiB) and its block (vllm/platforms/cpu.py, 0.32).
CPU_CACHE_GIB = 1
CPU_BLOCK_TOKENS = 128


@dataclass(frozen=True)
class Engine:
    """The settings that decide how much memory is left for the cache. Defaults: vLLM 0.32's on small GPUs, with 0.90.

    `fraction`: of all memory for vLLM (gpu_memory_utilization), of what is free after loading for TensorRT-LLM
    (free_gpu_memory_fraction). cache_bytes: the cache itself where the user gives it, which vLLM takes as it is and
    then ignores the share (vllm/config/cache.py, kv_cache_memory_bytes).
    """

    runtime: str = "vllm"
    fraction: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    block_tokens: int = 16
    kv_dtype: str = "auto"
    cache_bytes: int | None = None


def usable_bytes(target: Target) -> int | None:
    """Return the bytes of one GPU that its driver reports in all, or None for a target without a known size."""
    if target.usable_gib is not None:
        return int(target.usable_gib * GIB)
    return None if target.memory_gib is None else int(target.memory_gib * LEAST_USABLE * GIB)


def activation_bytes(arch: Arch, engine: Engine, tensor_parallel: int = 1) -> int:
    """Return the peak of temporary tensors on one GPU: of the sampler or of one step, whichever is larger.

    A step holds its hidden states four times over and the widest products of its feed-forward part, in 16 bits; with
    experts, one copy of the hidden states for each expert a token uses.
    """
    tokens = engine.max_num_batched_tokens
    hidden = 2 * tokens * arch.hidden
    width = arch.moe.top_k * arch.moe.width + arch.moe.shared_width if arch.moe else arch.inter
    copies = 4 + (arch.moe.top_k if arch.moe else 0)
    step = copies * hidden + 2 * tokens * 3 * width // tensor_parallel
    sampler = int(LOGIT_BYTES * engine.max_num_seqs * arch.vocab) + hidden
    return max(step, sampler)


def engine_bytes(tensor_parallel: int = 1) -> int:
    """Return the bytes outside torch and of CUDA graphs on one GPU."""
    return CUDA_GRAPH_BYTES + (NON_TORCH_BYTES if tensor_parallel == 1 else NON_TORCH_PARALLEL_BYTES)


def cache_budget_bytes(usable: int, weight_bytes: int, arch: Arch, engine: Engine, tensor_parallel: int = 1) -> int:
    """Return the bytes left for the key-value cache on one GPU; negative where weights alone are too much."""
    held = weight_bytes + activation_bytes(arch, engine, tensor_parallel) + engine_bytes(tensor_parallel)
    if engine.runtime == "vllm":
        return int(usable * engine.fraction) - held
    free = usable - held
    return int(free * engine.fraction) if free > 0 else free

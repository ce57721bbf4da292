"""The user's own serving options: read in any spelling, checked against the model, the target and the workloads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import InputError
from pipeline.memory.arch import Arch
from pipeline.memory.fit import Fit, split_problem
from pipeline.memory.overhead import GIB
from pipeline.memory.stored import Stored
from pipeline.speed.workloads import Workload

# Other spellings of the names that `propose` uses (vLLM: --config keys; TensorRT-LLM: LlmArgs, build and serve flags).
SAME = {
    "tp_size": "tensor_parallel_size", "tp": "tensor_parallel_size", "dtype": "kv_cache_dtype",
    "kv_cache_free_gpu_memory_fraction": "free_gpu_memory_fraction",
    "kv_cache_free_gpu_mem_fraction": "free_gpu_memory_fraction", "enable_chunked_context": "enable_chunked_prefill",
    "scheduler_policy": "capacity_scheduler_policy",
}  # fmt: skip
_WHOLE = (
    "tensor_parallel_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "max_batch_size",
    "max_input_len", "max_seq_len", "max_num_tokens", "tokens_per_block", "kv_cache_memory_bytes",
)  # fmt: skip
_SHARES = ("gpu_memory_utilization", "free_gpu_memory_fraction")


def flat(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options by the names that `propose` uses: `max-model-len` and `kv_cache_config: {dtype: fp8}` alike."""
    return dict(_pairs(options, nested=False))


def _pairs(options: Mapping[str, Any], nested: bool) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        name = str(key).replace("-", "_")
        if isinstance(value, Mapping):
            yield from _pairs(value, nested=True)
        elif name == "dtype" and not nested:
            yield name, value  # at the top level it is the model's own type, not the cache's
        else:
            yield SAME.get(name, name), value


def check_values(options: Mapping[str, Any], where: str) -> None:
    """Check what needs no model: whole numbers above zero, shares between 0 and 1.

    Raises:
        InputError: with the option's name and value.
    """
    for name in _WHOLE:
        value = options.get(name)
        if value is not None and (type(value) is not int or value <= 0):
            raise InputError(f"{where}: {name} is {value!r}, which must be a whole number above zero.")
    for name in _SHARES:
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1):
            raise InputError(f"{where}: {name} is {value!r}, which must be a share above 0 and at most 1.")


def check_lengths(options: Mapping[str, Any], workloads: Mapping[str, Workload], where: str) -> None:
    """Check that every workload's prompt and output fit the lengths that the user set.

    Raises:
        InputError: the first workload that does not.
    """
    for name, load in workloads.items():
        total = load.longest
        for key, need in (("max_model_len", total), ("max_seq_len", total), ("max_input_len", load.longest_prompt)):
            limit = options.get(key)
            if limit is not None and need > limit:
                what = "its prompt" if key == "max_input_len" else "prompt and output"
                raise InputError(f"{where}: workload {name} needs {need} tokens ({what}) and {key} is {limit}.")


def check_split(arch: Arch, form: Stored | None, tensor_parallel: int, count: int, where: str) -> None:
    """Check a tensor parallel size that the user set.

    Raises:
        InputError: it does not divide the model, or the target has fewer GPUs.
    """
    problem = split_problem(arch, tensor_parallel, form)
    if problem:
        good = [n for n in (1, 2, 4, 8) if split_problem(arch, n, form) is None]
        raise InputError(f"{where}: tensor_parallel_size {problem}; possible: {', '.join(map(str, good))}.")
    if tensor_parallel > count:
        raise InputError(
            f"{where}: tensor_parallel_size {tensor_parallel} needs as many GPUs and the target has count: {count}."
        )


def check_budget(found: Fit, tokens: int, where: str) -> None:
    """Check that the GPU holds the cache, and the cache one sequence of `tokens`.

    Raises:
        InputError: it does not; with both sizes.
    """
    known = (found.weights.bytes, found.activation_bytes, found.engine_bytes, found.budget_bytes)
    too_much = found.usable_bytes is not None and sum(size or 0 for size in known) > found.usable_bytes
    if found.reason and found.budget_bytes is not None and (found.budget_bytes <= 0 or too_much):
        raise InputError(f"{where}: {found.reason} at tensor parallel {found.tensor_parallel}.")
    need = found.kv.sequence_bytes(tokens)
    if found.budget_bytes is not None and need > found.budget_bytes:
        raise InputError(
            f"{where}: one sequence of {tokens} tokens needs {need / GIB:.2f} GiB of KV cache a GPU and "
            f"{found.budget_bytes / GIB:.2f} GiB are left; the most is {found.max_context} tokens."
        )

"""Propose the serving parameters of a cell, each with its reason; the user's own value always wins, and is checked.

The names are the runtimes' own, with underscores. TensorRT-LLM nests some of them in its YAML:
free_gpu_memory_fraction, tokens_per_block and kv_cache_dtype (as `dtype`) stand under kv_cache_config, and
capacity_scheduler_policy under scheduler_config.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import InputError
from pipeline.memory import user_options
from pipeline.memory.arch import Arch, read_arch
from pipeline.memory.fit import TP_SIZES, Fit, fit, split_problem
from pipeline.memory.kv import need_dtype
from pipeline.memory.overhead import GIB, Engine
from pipeline.memory.stored import Stored, formats, stored
from pipeline.specs import Recipe, Target
from pipeline.speed.workloads import Workload

SEQUENCES = (256, 192, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1)
LEAST_CONTEXT = 4096  # room for an evaluation's prompts where no workload is longer
LATENCY_CHUNK, THROUGHPUT_CHUNK = 2048, 8192
YOURS = "yours, from params.yaml"


class NoRoom(InputError):
    """The model does not fit the target: no fault of an option."""


class Proposal(NamedTuple):
    """One option of a server: its `name` in the runtime's spelling with underscores, its value, and why."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True)
class _Case:
    arch: Arch
    form: Stored | None
    target: Target
    loads: Mapping[str, Workload]
    own: Mapping[str, Any]
    folder: Path | None
    where: str
    kv_dtype: str

    @property
    def total(self) -> int:
        """Tokens of the longest workload, prompt and output."""
        return max((w.longest for w in self.loads.values()), default=0)

    @property
    def prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max((w.longest_prompt for w in self.loads.values()), default=0)

    @property
    def load(self) -> int:
        """Requests in flight at the largest load."""
        return max((p.concurrency or 1 for w in self.loads.values() for p in w.points), default=1)

    @property
    def throughput(self) -> bool:
        """Whether every workload is tuned for tokens per second rather than for the tail of its latencies."""
        return bool(self.loads) and all(w.objective == "throughput" for w in self.loads.values())


def propose(
    config: Mapping[str, Any],
    recipe: Recipe,
    target: Target,
    workloads: Mapping[str, Workload],
    runtime: str,
    user_options: Mapping[str, Any],
    *,
    folder: Path | None = None,
    where: str = "params.yaml",
) -> list[Proposal]:
    """Return the serving parameters of one cell as (name, value, reason), in a fixed order.

    For vLLM: tensor_parallel_size, max_model_len, max_num_seqs, max_num_batched_tokens, gpu_memory_utilization,
    block_size, kv_cache_dtype. For TensorRT-LLM (`runtime` starts with "trtllm" or "tensorrt"): tensor_parallel_size,
    max_batch_size, max_input_len, max_seq_len (input plus output), max_num_tokens, free_gpu_memory_fraction,
    tokens_per_block, kv_cache_dtype, capacity_scheduler_policy, enable_chunked_prefill. On a CPU only the user's own.

    Args:
        config: the model's config.json.
        recipe: what is stored; its `kv_cache`, where it has one, is the cache's type.
        target: the GPU; `count` of them may be used together.
        workloads: those that the server is sized for, by name (params.yaml: the ones that `benchmark` names).
        runtime: "vllm", "trtllm-engine" or "trtllm-bundle".
        user_options: the user's own options in any spelling; their values win and keep their place in the list.
        folder: the artifact, if it is made: its weights are then read from its headers, else predicted.
        where: how errors name the place of the user's options.

    Raises:
        InputError: a user's value that cannot work (too short for a workload, does not divide the model, leaves no
            room for one sequence).
        NoRoom: the model does not fit the target's GPUs, or it is not known whether it does.
    """
    own = flat_options(user_options)
    checks(own, workloads, where)
    if target.device == "cpu":
        return [Proposal(name, value, YOURS) for name, value in own.items()]
    arch = read_arch(config)
    form = form_of(recipe, arch)
    kv_dtype = need_dtype(str(own.get("kv_cache_dtype", kv_dtype_of(recipe))))
    case = _Case(arch, form, target, workloads, own, folder, where, kv_dtype)
    if case.total > (arch.max_positions or case.total):
        raise InputError(
            f"{where}: the longest workload needs {case.total} tokens, the model's own limit is {arch.max_positions}."
        )
    made = (_trtllm if is_trtllm(runtime) else _vllm)(case)
    return [Proposal(p.name, own[p.name], YOURS) if p.name in own else p for p in made]


def is_trtllm(runtime: str) -> bool:
    """Say whether a runtime takes TensorRT-LLM's parameters."""
    return runtime.startswith(("trtllm", "tensorrt"))


def flat_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's options by the names that `propose` uses."""
    return user_options.flat(options)


def checks(own: Mapping[str, Any], workloads: Mapping[str, Workload], where: str) -> None:
    """Check the user's values that need no model."""
    user_options.check_values(own, where)
    user_options.check_lengths(own, workloads, where)


def form_of(recipe: Recipe, arch: Arch) -> Stored | None:
    """Return what a recipe stores; None where the source is kept and says itself how it is stored."""
    if recipe.backend == "none" and arch.quantization:
        return None
    if recipe.format not in formats():
        return None
    return stored(recipe.format, recipe.group_size, recipe.backend, kv_scales=kv_dtype_of(recipe) != "auto")


def kv_dtype_of(recipe: Recipe) -> str:
    """Return the cache type that a recipe asks for, "auto" (the model's own) where it asks for none."""
    asked = str(getattr(recipe, "kv_cache", None) or "auto")
    return "auto" if asked == "bf16" else asked


def sized(case: _Case, engine: Engine) -> tuple[Fit, str]:
    """Return the smallest division of the model that holds its load, and why it is that one.

    The first size that holds all sequences of the largest load; else the first that holds one.
    """
    own = case.own.get("tensor_parallel_size")
    if own is not None:
        user_options.check_split(case.arch, case.form, own, case.target.count, case.where)
        return fit(case.arch, case.form, case.target, own, engine, case.loads, case.folder), YOURS
    tried = [
        fit(case.arch, case.form, case.target, n, engine, case.loads, case.folder)
        for n in TP_SIZES
        if n <= case.target.count and split_problem(case.arch, n, case.form) is None
    ]
    whole = [f for f in tried if f.fits and min(f.sequences.values(), default=1) >= case.load]
    partly = [f for f in tried if f.fits]
    for found, why in ((whole, f"and {case.load} sequences at once"), (partly, "and at least one sequence")):
        if found:
            return found[0], f"the smallest size whose GPUs hold the weights {why}"
    unknown = next((f for f in tried if f.fits is None), None)
    if unknown:
        raise NoRoom(f"No size can be proposed: {unknown.reason}.")
    raise NoRoom(_no_room(case, engine, tried))


def _no_room(case: _Case, engine: Engine, tried: list[Fit]) -> str:
    """Return the sentence for a model that does not fit, with the size at which it would."""
    larger = [
        n for n in TP_SIZES
        if n > case.target.count
        and fit(case.arch, case.form, case.target, n, engine, case.loads, case.folder).fits
    ]  # fmt: skip
    reason = tried[-1].reason if tried else "no size divides it"
    then = f"; it fits on {larger[0]} of them (targets: count)" if larger else "; nor does it on 8 of them"
    return f"The model does not fit on {case.target.count} x {case.target.gpu}: {reason}{then}."


def _engine(case: _Case, runtime: str, names: tuple[str, str, str], chunk: int, block: int) -> Engine:
    """Return the engine's settings, with the load's own number of sequences; `names`: of share, chunk and block."""
    share, tokens, size = (case.own.get(name) for name in names)
    own_chunk = int(tokens or max(chunk, case.load))
    return Engine(
        runtime, float(share or 0.9), max(1, case.load), own_chunk, int(size or block), case.kv_dtype,
        case.own.get("kv_cache_memory_bytes"),
    )  # fmt: skip


def _sequences(case: _Case, name: str, engine: Engine, size: int) -> tuple[Proposal, Fit]:
    """Return how many sequences may run at once: the most that the cache holds of the longest workload, up to 256."""
    own = case.own.get(name)
    for count in SEQUENCES if own is None else (own,):
        settings = replace(engine, max_num_seqs=count)
        found = fit(case.arch, case.form, case.target, size, settings, case.loads, case.folder)
        held = min(found.sequences.values(), default=count)
        if own is not None:
            return Proposal(name, own, YOURS), found
        if found.fits and held >= count:
            break
    reason = f"the cache holds {held} sequences of {case.total} tokens"
    if count == SEQUENCES[0]:
        reason += f"; more than {count} cost memory for sampling"
    if case.load > count:
        reason += f"; {case.load - count} of {case.load} requests will wait"
    return Proposal(name, count, reason), found


def _length(case: _Case, name: str, found: Fit) -> Proposal:
    """Return the longest sequence to accept: the longest workload, room for an evaluation, never past what fits."""
    own = case.own.get(name)
    user_options.check_budget(found, own or case.total, case.where)
    if own is not None:
        return Proposal(name, own, YOURS)
    most = found.max_context or case.total
    value = min(max(case.total, LEAST_CONTEXT), most)
    parts = [f"the longest workload needs {case.total} tokens"]
    if case.total < value == LEAST_CONTEXT:
        parts.append(f"{LEAST_CONTEXT} leave room for an evaluation's prompts")
    parts.append(f"the most is {most}" + (" (the model's limit)" if most == case.arch.max_positions else ""))
    return Proposal(name, value, ", ".join(parts))


def _kv_type(case: _Case) -> Proposal:
    if case.kv_dtype == "auto":
        reason = f"the model's own {case.arch.dtype}; the recipe calibrates no scales for a smaller one"
    else:
        reason = "the recipe stores calibrated scales for it"
    return Proposal("kv_cache_dtype", case.kv_dtype, reason)


def _vllm(case: _Case) -> list[Proposal]:
    chunk = THROUGHPUT_CHUNK if case.throughput else LATENCY_CHUNK
    block = 64 if case.arch.latent else 16
    names = ("gpu_memory_utilization", "max_num_batched_tokens", "block_size")
    engine = _engine(case, "vllm", names, chunk, block)
    chosen, why = sized(case, engine)
    sequences, found = _sequences(case, "max_num_seqs", engine, chosen.tensor_parallel)
    goal = "long prefill steps for tokens per second" if case.throughput else "short prefill steps delay decoding least"
    usable = (found.usable_bytes or 0) / GIB
    return [
        Proposal("tensor_parallel_size", chosen.tensor_parallel, why),
        _length(case, "max_model_len", found),
        sequences,
        Proposal("max_num_batched_tokens", engine.max_num_batched_tokens, f"{goal} (vLLM docs, optimization.md)"),
        Proposal("gpu_memory_utilization", engine.fraction, f"of {usable:.1f} GiB; {_left(found)} GiB become KV cache"),
        Proposal("block_size", engine.block_tokens, "FlashMLA has no other" if case.arch.latent else "vLLM's default"),
        _kv_type(case),
    ]


def _trtllm(case: _Case) -> list[Proposal]:
    chunk = THROUGHPUT_CHUNK if case.throughput else LATENCY_CHUNK
    names = ("free_gpu_memory_fraction", "max_num_tokens", "tokens_per_block")
    engine = _engine(case, "trtllm", names, chunk, 32)
    chosen, why = sized(case, engine)
    batch, found = _sequences(case, "max_batch_size", engine, chosen.tensor_parallel)
    length = _length(case, "max_seq_len", found)
    output = max((w.longest_output for w in case.loads.values()), default=1)
    prompt = int(case.own.get("max_input_len", max(case.prompt, int(length.value) - output)))
    chunked = prompt > engine.max_num_batched_tokens
    step = "tokens of one step: short ones delay decoding least"
    if case.throughput:
        step = "tokens of one step: long ones for tokens per second"
    policy, goal = ("MAX_UTILIZATION", "throughput: requests may be paused to fill the batch")
    if not case.throughput:
        policy, goal = ("GUARANTEED_NO_EVICT", "tail latency: a request that started is never paused")
    return [
        Proposal("tensor_parallel_size", chosen.tensor_parallel, why),
        batch,
        Proposal("max_input_len", prompt, f"what {output} output tokens leave; the longest prompt has {case.prompt}"),
        length._replace(reason=f"input plus output: {length.reason}"),
        Proposal("max_num_tokens", engine.max_num_batched_tokens, step),
        Proposal("free_gpu_memory_fraction", engine.fraction, f"of what loading leaves; {_left(found)} GiB of cache"),
        Proposal("tokens_per_block", engine.block_tokens, "TensorRT-LLM's default"),
        _kv_type(case),
        Proposal("capacity_scheduler_policy", policy, goal),
        Proposal(
            "enable_chunked_prefill", chunked,
            f"a prompt may {'' if chunked else 'not '}be longer than max_num_tokens {engine.max_num_batched_tokens}",
        ),
    ]  # fmt: skip


def _left(found: Fit) -> str:
    return f"{(found.budget_bytes or 0) / GIB:.1f}"

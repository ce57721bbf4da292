"""The speed that a target's bandwidth and peaks allow: an upper bound, printed as `predicted`, never as measured.

Decoding a step reads every weight that the batch uses and the cache of every sequence (arXiv:2211.05102, section 3);
prefilling computes 2 operations for each weight and token, and the attention products. No kernel, launch or
communication cost is in it, so a measured speed lies below; how far below is what the report shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeline.memory.arch import Arch
from pipeline.memory.fit import weight_bytes
from pipeline.memory.kv import kv_cache
from pipeline.memory.stored import Stored
from pipeline.memory.tensors import weights_of
from pipeline.specs import Target


@dataclass(frozen=True)
class Roofline:
    """Predicted bounds of one load: None where `reason` says why. Times in ms, speed over all sequences."""

    tpot_ms: float | None
    output_tok_s: float | None
    decode_bound_by: str | None
    decode_reason: str | None
    prefill_ms: float | None
    prefill_reason: str | None


def roofline(
    arch: Arch,
    form: Stored | None,
    target: Target,
    prompt_tokens: int,
    output_tokens: int,
    concurrency: int,
    *,
    verdict: str = "native",
    tensor_parallel: int = 1,
    kv_dtype: str = "auto",
    folder: Path | None = None,
) -> Roofline:
    """Return the bounds for `concurrency` sequences of one length on one target.

    Args:
        arch: the model.
        form: what is stored; None for the source as it is.
        target: with `bandwidth_gb_s` and, for prefill, `peaks_tflops`.
        prompt_tokens: length of each prompt.
        output_tokens: tokens that each sequence generates; the cache is read at its mean length.
        concurrency: sequences in flight.
        verdict: of the support table; a `fallback` computes in bf16 whatever it stores.
        tensor_parallel: GPUs that share the work.
        kv_dtype: type of the cache.
        folder: the artifact, if it is made.
    """
    weights = weight_bytes(arch, form, tensor_parallel, folder)
    cache = kv_cache(arch, kv_dtype, tensor_parallel)
    peak, no_peak = _peak(target, form, verdict)
    missing = None
    if target.bandwidth_gb_s is None:
        missing = "the target gives no bandwidth_gb_s"
    elif weights.read_bytes is None or weights.active_bytes is None:
        missing = weights.reason
    elif arch.not_modelled:
        missing = f"{'; '.join(arch.not_modelled)} are not modelled"
    tpot = speed = bound = None
    if missing is None:
        assert target.bandwidth_gb_s and weights.read_bytes is not None
        moved = _read_bytes(arch, weights.read_bytes, weights.active_bytes or 0, concurrency)
        moved += concurrency * cache.sequence_bytes(prompt_tokens + output_tokens // 2)
        memory_ms = moved / (target.bandwidth_gb_s * 1e6)
        compute_ms = concurrency * _operations(arch) / tensor_parallel / (peak * 1e9) if peak else 0.0
        tpot = max(memory_ms, compute_ms)
        speed, bound = 1000 * concurrency / tpot, "bandwidth" if memory_ms >= compute_ms else "operations"
    prefill = None
    if peak and not arch.not_modelled:
        prefill = prefill_operations(arch, prompt_tokens) / tensor_parallel / (peak * 1e9)
    elif arch.not_modelled:
        no_peak = f"{'; '.join(arch.not_modelled)} are not modelled"
    return Roofline(tpot, speed, bound, missing, prefill, None if prefill is not None else no_peak)


def _peak(target: Target, form: Stored | None, verdict: str) -> tuple[float | None, str | None]:
    """Return the dense peak in TFLOPS (or TOPS) of the type that the kernels multiply in, or why there is none."""
    compute = "bf16" if verdict == "fallback" or form is None else form.compute
    peak = (target.peaks_tflops or {}).get(compute)  # type: ignore[call-overload]
    return peak, None if peak else f"the target gives no peaks_tflops for {compute}"


def _operations(arch: Arch) -> int:
    """Return the operations of one token's linear layers: two for each weight that it uses."""
    return sum(2 * w.out * w.width * w.used for w in weights_of(arch) if w.linear or w.name == "lm_head")


def prefill_operations(arch: Arch, tokens: int) -> float:
    """Return the operations of a prompt: its linear layers, the head for one token, and causal attention."""
    head = 2 * arch.vocab * arch.hidden
    linear = sum(2 * w.out * w.width * w.used for w in weights_of(arch) if w.linear and w.name != "lm_head")
    attention = 0.0
    for _, window in arch.cache:
        pairs = tokens * tokens / 2 if window is None or window >= tokens else tokens * window - window * window / 2
        attention += 4 * arch.heads * arch.head_dim * pairs
    return linear * tokens + head + attention


def _read_bytes(arch: Arch, every: int, active: int, batch: int) -> float:
    """Return the bytes of weights that a step reads: of the experts, those that a batch is expected to use.

    With k of E experts a token, each expert is used by a batch of b with probability 1 - (1 - k/E)^b.
    """
    if arch.moe is None:
        return float(every)
    share = arch.moe.top_k / arch.moe.experts
    experts = (every - active) / (1 - share) if share < 1 else 0.0
    return every - experts + experts * (1 - (1 - share) ** batch)

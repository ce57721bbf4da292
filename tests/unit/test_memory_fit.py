"""What fits where: against published vLLM logs, against the logs of this project's own servers, and by its laws."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.memory.arch import load_arch
from pipeline.memory.cells import CellIds, cache_tokens, cell_fit, serving
from pipeline.memory.fit import calibration_gpus, fit
from pipeline.memory.overhead import GIB, Engine, activation_bytes, cache_budget_bytes, usable_bytes
from pipeline.memory.roofline import prefill_operations, roofline
from pipeline.memory.stored import stored
from pipeline.memory.weights import predicted
from pipeline.params import load_params
from pipeline.plan import known_configs
from pipeline.specs import Target, Workload

ROOT = Path(__file__).parents[2]
CONFIGS = Path(__file__).parent / "configs"
PARAMS = load_params(ROOT / "params.yaml")
# GiB of "torch peak memory increase" and "Available KV cache memory" (llm-d/llm-d-benchmark
# config_explorer/empirical-vllm-memory-results.md@4f4d449: H100 of 79.18 GiB, vLLM's defaults for it, utilization 0.9).
PUBLISHED = [
    ("gpt-oss-20b", None, 1, 7.38, 50.28), ("gpt-oss-120b", None, 1, 7.38, 3.33),
    ("llama-3-70b", "fp8-channel-token", 2, 4.84, 32.0), ("llama-3.1-8b", None, 1, 4.76, 51.38),
    ("qwen3-0.6b", None, 1, 5.56, 64.45), ("qwen3-32b", None, 1, 5.64, 4.45), ("qwen3-32b", None, 2, 5.64, 34.49),
]  # fmt: skip
DEFAULTS = Engine(max_num_seqs=1024, max_num_batched_tokens=8192)


def target(gib: float, **more: Any) -> Target:
    """A GPU of a size."""
    return Target(device="cuda", gpu="T", sm=90, memory_gib=gib, usable_gib=gib, **more)


@pytest.mark.parametrize(("name", "fmt", "gpus", "activation", "cache"), PUBLISHED)
def test_the_overhead_model_gives_what_vllm_logged(
    name: str, fmt: str | None, gpus: int, activation: float, cache: float
) -> None:
    """The cache within 2.5% of the GPU's memory: a part of that is CUDA graphs, which those versions did not count."""
    arch = load_arch(CONFIGS / f"{name}.json")
    weights = predicted(arch, stored(fmt) if fmt else None, gpus).bytes or 0
    assert activation_bytes(arch, DEFAULTS, gpus) / GIB == pytest.approx(activation, rel=0.02)
    left = cache_budget_bytes(int(79.18 * GIB), weights, arch, DEFAULTS, gpus) / GIB
    assert left == pytest.approx(cache, abs=0.025 * 79.18)


def workload(prompt: int, output: int) -> Workload:
    """A load of one request at a time."""
    point = {"concurrency": 1, "requests": 1, "warmup": 1}
    return Workload.model_validate({"prompt_tokens": prompt, "output_tokens": output, "points": [point]})


def logged() -> list[tuple[str, int]]:
    """(cell, tokens of KV cache) that this project's servers logged, from every committed result."""
    found = set()
    for path in sorted((ROOT / "artifacts/results").glob("*.*.*.*/*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        server = data.get("server", {})
        for facts in (server, server.get("baseline", {}), server.get("candidate", {})):
            if isinstance(facts, dict) and facts.get("kv_cache_tokens"):
                found.add((path.parent.name, int(facts["kv_cache_tokens"])))
    return sorted(found)


@pytest.mark.parametrize(("cell", "tokens"), logged())
def test_predicted_cache_tokens_are_within_ten_percent_of_every_log(cell: str, tokens: int) -> None:
    ids = CellIds(*cell.split("."))
    if ids.model not in PARAMS.models or ids.recipe not in PARAMS.recipes or ids.target not in PARAMS.targets:
        pytest.skip(f"{cell} is not in params.yaml")
    record = json.loads((ROOT / f"artifacts/results/{ids.model}/model.json").read_text(encoding="utf-8"))
    config = record["config"]
    assert cache_tokens(PARAMS, ids, config, serving(PARAMS, ids, config)) == pytest.approx(tokens, rel=0.1)


def test_there_are_logs_to_check() -> None:
    assert len(logged()) >= 5


def test_seventy_billion_in_four_formats_on_an_l40s() -> None:
    arch, l40s = load_arch(CONFIGS / "llama-3-70b.json"), PARAMS.targets["l40s"]
    at = {
        fmt: [n for n in (1, 2, 4, 8) if fit(arch, stored(fmt, 128), l40s, n, Engine()).fits]
        for fmt in ("bf16", "fp8-tensor", "int4-w4a16")
    }
    assert at == {"bf16": [4, 8], "fp8-tensor": [2, 4, 8], "int4-w4a16": [1, 2, 4, 8]}


def test_why_it_does_not_fit() -> None:
    arch = load_arch(CONFIGS / "llama-3-70b.json")
    load = {"long": workload(8000, 100)}
    weights = fit(arch, stored("bf16"), PARAMS.targets["l40s"], 1, Engine(), load)
    assert weights.fits is False and "need 133.3 GiB, 40.0 GiB of a GPU may be used" in str(weights.reason)
    tight = fit(arch, stored("int4-w4a16", 128), PARAMS.targets["l40s"], 1, Engine(), load)
    assert tight.fits is False and "hold no sequence of long" in str(tight.reason)
    split = fit(arch, stored("bf16"), PARAMS.targets["h200"], 3, Engine(), load)
    assert split.fits is False and "3 does not divide the 64 attention heads" in str(split.reason)
    unknown = fit(load_arch(CONFIGS / "qwen3-next-80b-a3b.json"), None, PARAMS.targets["h200"], 1, Engine(), load)
    assert unknown.fits is None and "not modelled" in str(unknown.reason)
    assert fit(arch, None, PARAMS.targets["cpu"], 1, Engine()).fits is None


def test_a_pinned_cache_is_what_sequences_are_counted_in() -> None:
    """`kv-cache-memory-bytes` beside two GPUs that could hold more: tokens and sequences tell of the same cache."""
    ids = CellIds("llama-8b-random", "bf16", "vllm", "h200-x2")
    config = known_configs(ROOT, PARAMS)[ids.model]
    chosen = serving(PARAMS, ids, config)
    tokens = cache_tokens(PARAMS, ids, config, chosen)
    assert tokens == 366_208
    assert cell_fit(PARAMS, ids, config, chosen).sequences == {"brief-128-128": tokens // 256}


def test_a_pinned_cache_larger_than_what_is_left_does_not_fit() -> None:
    arch, h200 = load_arch(CONFIGS / "llama-3-70b.json"), PARAMS.targets["h200"]
    found = fit(arch, stored("bf16"), h200, 1, Engine(cache_bytes=24 * GIB))
    assert found.fits is False and "leave 6.5 GiB for a KV cache of 24.0 GiB" in str(found.reason)


def test_memory_as_sold_is_not_all_there() -> None:
    assert usable_bytes(Target(device="cuda", gpu="X", sm=89, memory_gib=48)) == int(0.925 * 48 * GIB)
    assert usable_bytes(PARAMS.targets["h200"]) == int(139.8 * GIB)


@pytest.mark.parametrize(
    ("name", "algorithm", "backend", "gpu", "count"),
    [
        ("llama-3-70b", "max", "modelopt", "h200", 2),  # 131 GiB of weights in 0.85 x 139.8
        ("llama-3-70b", "max", "modelopt", "l40s", 4),
        ("llama-3-70b", "gptq", "llmcompressor", "l40s", 1),  # one layer and its Hessians: 9 GiB
        ("deepseek-v3", "gptq", "llmcompressor", "h200", 2),  # Hessians of 256 experts
        ("llama-3-70b", "rtn", "llmcompressor", "l40s", 0),
        ("llama-3-70b", "gptq", "llmcompressor", "cpu", 0),
        ("qwen3-next-80b-a3b", "gptq", "llmcompressor", "h200", None),
    ],
)
def test_calibration_gpus(name: str, algorithm: str, backend: str, gpu: str, count: int | None) -> None:
    found, why = calibration_gpus(load_arch(CONFIGS / f"{name}.json"), algorithm, backend, PARAMS.targets[gpu])
    assert found == count and why


@settings(deadline=None)
@given(
    st.sampled_from(["llama-3.1-8b", "gemma-2-9b", "deepseek-v2-lite", "mixtral-8x7b"]),
    st.floats(10, 200), st.floats(1, 100), st.sampled_from([1, 2, 4, 8]), st.sampled_from([8, 64, 512]),
)  # fmt: skip
def test_more_memory_never_holds_less(name: str, gib: float, more: float, gpus: int, seqs: int) -> None:
    arch, engine = load_arch(CONFIGS / f"{name}.json"), Engine(max_num_seqs=seqs)
    load = {"w": workload(512, 128)}
    small, large = (fit(arch, stored("fp8-tensor"), target(g), gpus, engine, load) for g in (gib, gib + more))
    assert small.sequences["w"] <= large.sequences["w"]
    assert (small.max_context or 0) <= (large.max_context or 0) <= (arch.max_positions or 0)
    assert large.fits or not small.fits


def test_decoding_is_bound_by_bytes() -> None:
    """Llama-3-70B in FP8 on an H200: 70.5 GB of weights less the embedding, and 576 tokens of cache, over 4800 GB/s."""
    arch, h200 = load_arch(CONFIGS / "llama-3-70b.json"), PARAMS.targets["h200"]
    found = roofline(arch, stored("fp8-tensor"), h200, 512, 128, 1)
    head = 128256 * 8192
    moved = (70_553_706_496 - 2 * head) + 2 * head + 576 * 327_680
    assert found.tpot_ms == pytest.approx(moved / 4800e6, rel=0.001)
    assert found.decode_bound_by == "bandwidth"
    assert found.output_tok_s == pytest.approx(1000 / (found.tpot_ms or 1))
    full = roofline(arch, stored("fp8-tensor"), h200, 512, 128, 4096)
    assert full.decode_bound_by == "operations"
    assert full.tpot_ms == pytest.approx(4096 * 2 * (70_553_706_496 - head - 161 * 8192) / 1979e9, rel=1e-6)


def test_prefill_is_bound_by_operations() -> None:
    arch = load_arch(CONFIGS / "llama-3-70b.json")
    linear = 2 * (70_553_706_496 - 2 * 128256 * 8192 - 161 * 8192) * 1000
    attention = 80 * 4 * 64 * 128 * 1000 * 1000 / 2
    wanted = linear + attention + 2 * 128256 * 8192
    assert prefill_operations(arch, 1000) == pytest.approx(wanted, rel=1e-6)
    h100 = PARAMS.targets["h100"]
    eight = roofline(arch, stored("fp8-tensor"), h100, 1000, 10, 1)
    assert eight.prefill_ms == pytest.approx(wanted / 1979e9, rel=1e-6)
    fallback = roofline(arch, stored("fp8-tensor"), h100, 1000, 10, 1, verdict="fallback")
    assert fallback.prefill_ms == pytest.approx(wanted / 989e9, rel=1e-6)


def test_what_is_not_known_is_not_predicted() -> None:
    arch = load_arch(CONFIGS / "llama-3.1-8b.json")
    cpu = roofline(arch, stored("bf16"), PARAMS.targets["cpu"], 512, 128, 1)
    assert cpu.output_tok_s is None and cpu.decode_reason == "the target gives no bandwidth_gb_s"
    assert cpu.prefill_ms is None and "no peaks_tflops for bf16" in str(cpu.prefill_reason)
    given_one = roofline(arch, stored("bf16"), Target(device="cpu", bandwidth_gb_s=40), 512, 128, 1)
    assert given_one.output_tok_s is not None
    hybrid = roofline(load_arch(CONFIGS / "qwen3-next-80b-a3b.json"), None, PARAMS.targets["h200"], 512, 128, 1)
    assert hybrid.output_tok_s is None and hybrid.prefill_ms is None


def test_a_batch_reads_more_experts() -> None:
    arch, h200 = load_arch(CONFIGS / "qwen3-30b-a3b.json"), PARAMS.targets["h200"]
    one, many = (roofline(arch, stored("bf16"), h200, 100, 20, n).tpot_ms or 0 for n in (1, 512))
    dense = (predicted(arch, stored("bf16")).read_bytes or 0) / 4800e6
    assert one < 0.2 * dense < dense < many


@given(st.integers(1, 256), st.integers(1, 256))
def test_more_sequences_never_decode_slower_in_all(few: int, more: int) -> None:
    arch, h200 = load_arch(CONFIGS / "mixtral-8x7b.json"), PARAMS.targets["h200"]
    a, b = (roofline(arch, stored("bf16"), h200, 200, 50, n) for n in (few, few + more))
    assert (a.tpot_ms or 0) <= (b.tpot_ms or 0)
    assert (a.output_tok_s or 0) <= (b.output_tok_s or 0) * 1.0000001

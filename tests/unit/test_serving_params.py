"""Serving parameters: what is proposed and why, that the user's value wins, and each value that cannot work."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.memory.arch import read_arch
from pipeline.memory.cells import CellIds, compact, own_options, sizes
from pipeline.memory.fit import fit
from pipeline.memory.overhead import Engine
from pipeline.memory.serving_params import YOURS, NoRoom, form_of, propose
from pipeline.package import Cell, serve_options
from pipeline.params import load_params
from pipeline.specs import Recipe, Target, Workload

ROOT = Path(__file__).parents[2]
CONFIGS = Path(__file__).parent / "configs"
PARAMS = load_params(ROOT / "params.yaml")
INT4 = Recipe(format="int4-w4a16", algorithm="rtn", backend="llmcompressor", group_size=128)
BF16 = Recipe(format="bf16", algorithm="none", backend="none")


def config(name: str) -> dict[str, Any]:
    """A fixture's config.json."""
    return dict(json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8")))


def load(prompt: int = 512, output: int = 128, concurrency: int = 8, objective: str = "latency") -> dict[str, Workload]:
    """One workload, 'chat'."""
    point = {"concurrency": concurrency, "requests": 8, "warmup": 1}
    raw = {"prompt_tokens": prompt, "output_tokens": output, "points": [point], "objective": objective}
    return {"chat": Workload.model_validate(raw)}


def gpu(gib: float, count: int = 1) -> Target:
    """A GPU of a size, so many of them."""
    return Target(device="cuda", gpu="Test GPU", sm=90, memory_gib=gib, usable_gib=gib, count=count)


def values(*args: Any, **more: Any) -> dict[str, Any]:
    """The proposal as {name: value}."""
    return {p.name: p.value for p in propose(*args, **more)}


def test_vllm_gets_every_parameter_with_a_reason() -> None:
    found = propose(config("llama-3.1-8b"), BF16, PARAMS.targets["l40s"], load(), "vllm", {})
    assert {p.name: p.value for p in found} == {
        "tensor_parallel_size": 1, "max_model_len": 4096, "max_num_seqs": 256, "max_num_batched_tokens": 2048,
        "gpu_memory_utilization": 0.9, "block_size": 16, "kv_cache_dtype": "auto",
    }  # fmt: skip
    assert all(len(p.reason) > 10 for p in found)


def test_tensorrt_llm_gets_its_own_names() -> None:
    found = values(config("llama-3.1-8b"), BF16, PARAMS.targets["l40s"], load(), "trtllm-engine", {})
    assert found == {
        "tensor_parallel_size": 1, "max_batch_size": 256, "max_input_len": 4096 - 128, "max_seq_len": 4096,
        "max_num_tokens": 2048, "free_gpu_memory_fraction": 0.9, "tokens_per_block": 32, "kv_cache_dtype": "auto",
        "capacity_scheduler_policy": "GUARANTEED_NO_EVICT", "enable_chunked_prefill": True,
    }  # fmt: skip


def test_the_objective_decides_on_eviction_and_chunks() -> None:
    target, loads = PARAMS.targets["h100"], load(objective="throughput")
    found = values(config("llama-3.1-8b"), BF16, target, loads, "trtllm-bundle", {})
    assert found["capacity_scheduler_policy"] == "MAX_UTILIZATION"
    assert found["max_num_tokens"] == 8192 and found["enable_chunked_prefill"] is False
    assert values(config("llama-3.1-8b"), BF16, target, loads, "vllm", {})["max_num_batched_tokens"] == 8192
    mixed = loads | {"other": load()["chat"]}
    assert values(config("llama-3.1-8b"), BF16, target, mixed, "trtllm-engine", {})["max_num_tokens"] == 2048


def test_the_smallest_size_that_holds_the_load() -> None:
    assert values(config("llama-3-70b"), BF16, gpu(139.8, 8), load(), "vllm", {})["tensor_parallel_size"] == 2
    many = load(concurrency=64)
    assert values(config("llama-3-70b"), INT4, gpu(44.4, 8), many, "vllm", {})["tensor_parallel_size"] == 2
    alone = values(config("llama-3-70b"), INT4, gpu(44.4, 1), load(), "vllm", {})
    assert alone["tensor_parallel_size"] == 1 and alone["max_num_seqs"] <= 8 and alone["max_model_len"] >= 640


def test_a_small_cache_lowers_sequences_and_says_who_waits() -> None:
    found = propose(config("llama-3-70b"), INT4, gpu(44.4), load(concurrency=64), "vllm", {})
    seqs = next(p for p in found if p.name == "max_num_seqs")
    assert 0 < seqs.value < 64 and f"{64 - seqs.value} of 64 requests will wait" in seqs.reason


def test_latent_attention_needs_its_block() -> None:
    assert values(config("deepseek-v2-lite"), BF16, gpu(80), load(), "vllm", {})["block_size"] == 64


@pytest.mark.parametrize("runtime", ["vllm", "trtllm-engine"])
def test_the_users_value_wins_in_any_spelling(runtime: str) -> None:
    own = {"max-num-seqs": 7, "max_batch_size": 7, "tp_size": 2, "kv_cache_config": {"dtype": "fp8"}, "block-size": 32}
    found = propose(config("llama-3.1-8b"), BF16, gpu(80, 2), load(), runtime, own)
    at = {p.name: p for p in found}
    name = "max_num_seqs" if runtime == "vllm" else "max_batch_size"
    for key, value in ((name, 7), ("tensor_parallel_size", 2), ("kv_cache_dtype", "fp8")):
        assert (at[key].value, at[key].reason) == (value, YOURS)


def test_an_fp8_cache_holds_twice_the_sequences() -> None:
    target = gpu(44.4)
    plain, half = (
        values(config("llama-3-70b"), INT4, target, load(), "vllm", own)["max_num_seqs"]
        for own in ({}, {"kv-cache-dtype": "fp8"})
    )
    assert half >= 2 * plain


@pytest.mark.parametrize(
    ("name", "own", "target", "loads", "says"),
    [
        ("llama-3.1-8b", {"max-model-len": 512}, gpu(80), load(), "chat needs 640 tokens .* max_model_len is 512"),
        ("llama-3.1-8b", {"max_seq_len": 639}, gpu(80), load(), "chat needs 640 tokens .* max_seq_len is 639"),
        (
            "llama-3.1-8b",
            {"max_input_len": 511},
            gpu(80),
            load(),
            "chat needs 512 tokens .its prompt. and max_input_len",
        ),
        ("qwen2.5-7b", {"tensor-parallel-size": 8}, gpu(80, 8), load(), "8 does not divide the 28 .*possible: 1, 2, 4"),
        (
            "llama-3.1-8b",
            {"tensor-parallel-size": 2},
            gpu(80),
            load(),
            "needs as many GPUs and the target has count: 1",
        ),
        ("llama-3.1-8b", {"tensor-parallel-size": True}, gpu(80), load(), "tensor_parallel_size is True, .* whole"),
        ("llama-3.1-8b", {"max-num-seqs": 0}, gpu(80), load(), "max_num_seqs is 0"),
        ("llama-3.1-8b", {"max-num-seqs": "many"}, gpu(80), load(), "max_num_seqs is 'many'"),
        ("llama-3.1-8b", {"gpu-memory-utilization": 1.2}, gpu(80), load(), "gpu_memory_utilization is 1.2, .* share"),
        ("llama-3.1-8b", {"gpu-memory-utilization": "0.9"}, gpu(80), load(), "gpu_memory_utilization is '0.9'"),
        ("llama-3.1-8b", {"kv_cache_dtype": "fp7"}, gpu(80), load(), "no KV cache type 'fp7'"),
        ("llama-3.1-8b", {"max-model-len": 131072}, gpu(24), load(), "131072 tokens needs 16.00 GiB .* the most is"),
        ("llama-3.1-8b", {}, gpu(80), load(131000, 128), "needs 131128 tokens, the model's own limit is 131072"),
    ],
)
def test_what_cannot_work_is_one_sentence(name: str, own: Any, target: Target, loads: Any, says: str) -> None:
    runtime = "trtllm-engine" if {"max_seq_len", "max_input_len"} & set(own) else "vllm"
    with pytest.raises(InputError, match=says) as error:
        propose(config(name), BF16, target, loads, runtime, own)
    assert not isinstance(error.value, NoRoom)
    assert "params.yaml" in str(error.value) or "pipeline/memory/kv.py" in str(error.value)


def test_a_model_that_does_not_fit_says_where_it_would() -> None:
    with pytest.raises(NoRoom, match="does not fit on 1 x Test GPU: .* it fits on 4 of them"):
        propose(config("llama-3-70b"), BF16, gpu(44.4), load(), "vllm", {})
    with pytest.raises(NoRoom, match="nor does it on 8 of them"):
        propose(config("deepseek-v3"), BF16, gpu(44.4, 8), load(), "vllm", {})
    with pytest.raises(NoRoom, match="36 linear_attention layers"):
        propose(config("qwen3-next-80b-a3b"), BF16, gpu(80), load(), "vllm", {})


def test_on_a_cpu_only_the_users_options() -> None:
    found = propose(config("llama-3.1-8b"), BF16, Target(device="cpu"), load(), "vllm", {"max-model-len": 2048})
    assert [tuple(p) for p in found] == [("max_model_len", 2048, YOURS)]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["llama-3.1-8b", "qwen2.5-7b", "gemma-2-9b", "mixtral-8x7b", "deepseek-v2-lite", "smollm2-135m"]),
    st.floats(20, 200), st.sampled_from([1, 2, 8]), st.integers(1, 4000), st.integers(2, 1000), st.integers(1, 400),
    st.sampled_from(["vllm", "trtllm-engine"]),
)  # fmt: skip
def test_whatever_is_proposed_holds(
    name: str, gib: float, count: int, prompt: int, output: int, concurrency: int, runtime: str
) -> None:
    """A proposal's sequences of the workload fit in the cache that its own settings leave."""
    target, loads = gpu(gib, count), load(prompt, output, concurrency)
    try:
        found = values(config(name), INT4, target, loads, runtime, {})
    except NoRoom:
        return
    trt = runtime != "vllm"
    seqs, tokens = (
        found["max_batch_size" if trt else "max_num_seqs"],
        found["max_num_tokens" if trt else "max_num_batched_tokens"],
    )
    engine = Engine("trtllm" if trt else "vllm", 0.9, seqs, tokens, found["tokens_per_block" if trt else "block_size"])
    arch = read_arch(config(name))
    held = fit(arch, form_of(INT4, arch), target, found["tensor_parallel_size"], engine, loads)
    assert held.fits and held.sequences["chat"] >= seqs >= 1
    length = found["max_seq_len" if trt else "max_model_len"]
    assert prompt + output <= length <= (arch.max_positions or 0)
    assert length <= (held.max_context or 0)


def params_with(tmp_path: Path, change: Any) -> Any:
    """The project's params.yaml with a change, loaded."""
    raw = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    change(raw)
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    return load_params(tmp_path / "params.yaml")


def test_options_of_a_target_lie_over_those_of_its_device(tmp_path: Path) -> None:
    def change(raw: Any) -> None:
        raw["serving"]["vllm-cuda"] = {"max-num-seqs": 32, "max-model-len": 16384}
        raw["serving"]["vllm-l40s"] = {"max-num-seqs": 8}

    params = params_with(tmp_path, change)
    assert own_options(params, "vllm", "l40s") == {"max-num-seqs": 8, "max-model-len": 16384}
    assert own_options(params, "vllm", "h100") == {"max-num-seqs": 32, "max-model-len": 16384}


@pytest.mark.parametrize(
    ("key", "options", "says"),
    [
        ("vllm-cudo", {}, "no runtime and device 'vllm-cudo'.*Did you mean 'vllm-cuda'"),
        ("vllm-cuda", {"max-model-len": 80}, "workload closed-128-128 needs 256 tokens"),
        ("vllm-l40s", {"gpu-memory-utilization": 0}, "serving.vllm-l40s.*gpu_memory_utilization is 0"),
    ],
)
def test_params_are_checked_when_they_are_read(tmp_path: Path, key: str, options: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        params_with(tmp_path, lambda raw: raw["serving"].update({key: options}))


def model_config() -> dict[str, Any]:
    """The default model's config.json."""
    facts = json.loads((ROOT / "artifacts/results/smollm2-135m/model.json").read_text(encoding="utf-8"))
    return dict(facts["config"])


def test_a_package_for_a_gpu_gets_proposals_and_the_users_own(tmp_path: Path) -> None:
    params = params_with(
        tmp_path, lambda raw: raw["serving"].update({"vllm-cuda": {"max_num_seqs": 12, "quiet": True}})
    )
    options = serve_options(Cell("smollm2-135m", "gptq", "vllm", "l40s"), params, model_config())
    assert options["max-num-seqs"] == 12 and options["quiet"] is True
    assert options["tensor-parallel-size"] == 1 and options["max-model-len"] == 6400
    cpu = serve_options(Cell("smollm2-135m", "gptq", "vllm", "cpu"), params, model_config())
    assert "gpu-memory-utilization" not in cpu and cpu["max-num-seqs"] == 16


def test_the_plan_shows_cells_with_equal_parameters_on_one_line() -> None:
    cells = [
        {"model": "smollm2-135m", "recipe": r, "runtime": "vllm", "target": t, "verdict": v}
        for r, t, v in (("bf16", "l40s", "native"), ("gptq", "h100", "native"), ("int8", "b200", "refused"),
                        ("bf16", "cpu", "native"))
    ]  # fmt: skip
    text = compact(PARAMS, {"smollm2-135m": model_config()}, cells)
    assert text.count("tensor_parallel_size 1, max_model_len 6400") == 1
    assert "2 cells: bf16 on l40s, gptq on h100" in text and "b200" not in text
    assert "not fetched yet" in compact(PARAMS, {}, cells)
    big = {"smollm2-135m": config("llama-3-70b")}
    assert "does not fit: The model does not fit on 1 x NVIDIA L40S" in compact(PARAMS, big, cells)


def test_a_users_value_that_cannot_work_stops_the_plan(tmp_path: Path) -> None:
    params = params_with(tmp_path, lambda raw: raw["serving"].update({"vllm-cuda": {"tensor-parallel-size": 2}}))
    cells = [{"model": "smollm2-135m", "recipe": "bf16", "runtime": "vllm", "target": "l40s", "verdict": "native"}]
    with pytest.raises(InputError, match="2 does not divide the 9 attention heads; possible: 1"):
        compact(params, {"smollm2-135m": model_config()}, cells)


def test_all_sizes_of_a_cell_are_plain_data() -> None:
    found = sizes(PARAMS, CellIds("smollm2-135m", "gptq", "vllm", "l40s"), model_config(), "native")
    assert json.loads(json.dumps(found)) == found
    assert found["fits_at"] == [1] and found["problem"] is None
    fits = [n for n in PARAMS.workloads_of(PARAMS.targets["l40s"]) if PARAMS.workloads[n].longest <= 8192]
    closed = [(n, p.concurrency) for n in fits for p in PARAMS.workloads[n].points if p.concurrency]
    assert [(p["workload"], p["concurrency"]) for p in found["predicted"]] == closed and "closed-8192-512" not in fits
    assert all(p["output_tok_s"] > 0 and p["prefill_ms"] > 0 for p in found["predicted"])
    lost = sizes(PARAMS, CellIds("smollm2-135m", "bf16", "vllm", "l40s"), config("llama-3-70b"), "native")
    assert "does not fit" in lost["problem"] and lost["serving"] == [] and lost["fits_at"] == [4, 8]


@pytest.mark.parametrize("size", [{}, {"tensor-parallel-size": 1}])
def test_a_pinned_cache_that_the_gpu_does_not_hold_is_refused(size: dict[str, Any]) -> None:
    own = size | {"kv-cache-memory-bytes": 80 * 2**30}
    with pytest.raises(InputError, match="leave 64.2 GiB for a KV cache of 80.0 GiB"):
        propose(config("llama-3.1-8b"), BF16, gpu(80), load(), "vllm", own)
    assert propose(config("llama-3.1-8b"), BF16, gpu(80), load(), "vllm", size | {"kv-cache-memory-bytes": 8 * 2**30})

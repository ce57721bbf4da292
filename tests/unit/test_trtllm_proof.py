"""The proof of TensorRT-LLM checkpoints: sound ones pass in every format and split, every planted fault is found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packers import CONFIG, load, make_source, save
from packing_bits import Tensors
from packing_ranks import GROUP, make_ranks

from pipeline.errors import InputError
from pipeline.trtllm.export import mend_config
from pipeline.trtllm.proof import prove, rotary
from pipeline.trtllm.ranks import Sizes, Split, decoder_of, possible, sizes_of, why_not_split

FORMATS = ("bf16", "int8-w8a16", "fp8-tensor", "fp8-channel-token", "int8-w8a8", "int4-w4a16", "int4-w4a8", "nvfp4")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source") / "m", tied=False)


def _prove(folder: Path, source: Path, fmt: str, kv: str = "bf16") -> dict[str, Any]:
    return prove(folder, source, fmt, GROUP if fmt.startswith("int4") else None, kv)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_a_sound_checkpoint_passes(fmt: str, tp: int, pp: int, source: Path, tmp_path: Path) -> None:
    kv = "fp8" if fmt == "fp8-tensor" else "bf16"
    result = _prove(make_ranks(tmp_path / "c", source, fmt, tp, pp, kv), source, fmt, kv)
    assert result["passed"], result["findings"]
    assert result["findings"] == []
    assert result["weight_bytes"] == result["predicted_weight_bytes"]
    assert result["ranks"] == {"tp": tp, "pp": pp}
    if fmt in ("bf16", "int8-w8a16"):
        assert result["dequantized"]["worst_relative_rms"] == 0


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    tied = make_source(tmp_path / "m", tied=True)
    assert _prove(make_ranks(tmp_path / "c", tied, "fp8-tensor"), tied, "fp8-tensor")["passed"]


Edit = Callable[[Tensors], None]


def _set(name: str, change: Callable[[Any], Any]) -> Edit:
    def edit(tensors: Tensors) -> None:
        dtype, raw = tensors[name]
        tensors[name] = dtype, change(raw)

    return edit


def _drop(name: str) -> Edit:
    return lambda tensors: tensors.pop(name) and None  # type: ignore[return-value]


def _swap(a: str, b: str) -> Edit:
    def edit(tensors: Tensors) -> None:
        tensors[a], tensors[b] = tensors[b], tensors[a]

    return edit


L0, L1 = "transformer.layers.0", "transformer.layers.1"
TENSOR_FAULTS = {
    "a missing scale": ("fp8-tensor", _drop(f"{L0}.mlp.fc.weights_scaling_factor"), "tensor-missing", "lacks"),
    "no calibration": (
        "nvfp4", _drop(f"{L0}.mlp.fc.activation_scaling_factor"), "tensor-missing", "no forward pass saw",
    ),
    "fewer rows": (
        "int8-w8a8", _set(f"{L0}.attention.qkv.weight", lambda r: r[:-1]), "tensor-shape", "rank arithmetic",
    ),
    "fewer groups": (
        "int4-w4a16", _set(f"{L0}.mlp.proj.weights_scaling_factor", lambda r: r[:, :-1]), "tensor-shape",
        "rank arithmetic",
    ),
    "a doubled scale": (
        "fp8-tensor", _set(f"{L0}.mlp.fc.weights_scaling_factor", lambda r: r * 2), "values", "gate_proj",
    ),
    "fc and gate swapped": ("bf16", _swap(f"{L0}.mlp.fc.weight", f"{L0}.mlp.gate.weight"), "values", "is 1.4"),
    "two layers swapped": (
        "int8-w8a8", _swap(f"{L0}.attention.dense.weight", f"{L1}.attention.dense.weight"), "values", "o_proj",
    ),
    "one wrong row": (
        "int8-w8a8",
        _set(f"{L0}.mlp.fc.weights_scaling_factor", lambda r: r * np.r_[2, np.ones(len(r) - 1)].astype("f4")),
        "row-gain", "gain",
    ),
    "an infinite scale": (
        "int4-w4a16", _set(f"{L0}.mlp.fc.weights_scaling_factor", lambda r: r * np.float32(np.inf)),
        "not-finite", "NaN",
    ),
    "low and high halves swapped": (
        "int4-w4a16", _set(f"{L0}.mlp.fc.weight", lambda r: ((r.view("u1") >> 4) | (r.view("u1") << 4)).view("i1")),
        "values", "relative RMS",
    ),
    "a changed norm": (
        "fp8-tensor", _set(f"{L0}.input_layernorm.weight", lambda r: r + 8), "changed", "not the source's",
    ),
    "a changed head": ("fp8-tensor", _set("lm_head.weight", lambda r: r[::-1]), "changed", "lm_head"),
    "no prequant factor": ("int4-w4a16", _drop(f"{L0}.mlp.fc.prequant_scaling_factor"), "tensor-missing", "prequant"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_every_fault_of_a_tensor_is_found(name: str, source: Path, tmp_path: Path) -> None:
    fmt, edit, rule, message = TENSOR_FAULTS[name]
    folder = make_ranks(tmp_path / "c", source, fmt)
    tensors = load(folder / "rank0.safetensors")
    edit(tensors)
    save(folder / "rank0.safetensors", tensors)
    errors = [f for f in _prove(folder, source, fmt)["findings"] if f["severity"] == "error"]
    assert [f for f in errors if f["rule"] == rule and message in f["message"]], errors


def _config(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: config.update(changes)


CONFIG_FAULTS = {
    "another size": (_config(intermediate_size=512), "config-differs", "intermediate_size is 512, the source has 256"),
    "no dtype": (lambda c: c.pop("dtype"), "config-missing", "has no dtype"),
    "another rotary base": (_config(rotary_base=5e5), "rotary-base", "the source's rope_theta is 10000"),
    "another algorithm": (lambda c: c["quantization"].update(quant_algo="FP8"), "quant-algo", "quant_algo is FP8"),
    "an unknown algorithm": (lambda c: c["quantization"].update(quant_algo="FP9"), "quant-algo", "'FP9' is not known"),
    "no group size": (lambda c: c["quantization"].pop("group_size"), "group-size", "group_size is None"),
    "a KV cache not asked for": (
        lambda c: c["quantization"].update(kv_cache_quant_algo="INT8"), "kv-cache",
        "'INT8', the recipe's KV cache is bf16",
    ),
    "a world that is no product": (
        lambda c: c["mapping"].update(tp_size=3), "mapping", "world_size 1 is not tp_size 3 x pp_size 1",
    ),
    "more ranks than files": (lambda c: c["mapping"].update(world_size=2), "unreadable", "has the ranks [0]"),
    "no mapping": (lambda c: c.pop("mapping"), "unreadable", "mapping.world_size = None"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_every_fault_of_the_config_is_found(name: str, source: Path, tmp_path: Path) -> None:
    edit, rule, message = CONFIG_FAULTS[name]
    folder = make_ranks(tmp_path / "c", source, "int4-w4a16")
    config = json.loads((folder / "config.json").read_text())
    edit(config)
    (folder / "config.json").write_text(json.dumps(config))
    result = _prove(folder, source, "int4-w4a16")
    assert not result["passed"]
    assert [f for f in result["findings"] if f["rule"] == rule and message in f["message"]], result["findings"]


def test_a_truncated_rank_and_an_extra_rank_are_found(source: Path, tmp_path: Path) -> None:
    folder = make_ranks(tmp_path / "c", source, "fp8-tensor", 2)
    whole = (folder / "rank1.safetensors").read_bytes()
    (folder / "rank1.safetensors").write_bytes(whole[:-10])
    assert "truncated" in _prove(folder, source, "fp8-tensor")["findings"][0]["message"]
    (folder / "rank1.safetensors").write_bytes(whole)
    (folder / "rank2.safetensors").write_bytes(whole)
    assert "has the ranks [0, 1, 2]" in _prove(folder, source, "fp8-tensor")["findings"][0]["message"]


def test_ranks_of_another_order_are_found(source: Path, tmp_path: Path) -> None:
    folder = make_ranks(tmp_path / "c", source, "bf16", 2)
    a, b = (folder / f"rank{r}.safetensors" for r in (0, 1))
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)
    assert {f["rule"] for f in _prove(folder, source, "bf16")["findings"]} >= {"values", "changed"}


SMOL = Sizes(hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, head_size=64, vocab=49152)


@pytest.mark.parametrize(("sizes", "split", "group", "message"), [
    (SMOL, Split(2), None, "tensor parallel 2 does not divide 9 attention heads; possible: 1"),
    (SMOL, Split(1, 4), None, "pipeline parallel 4 does not divide 30 layers"),
    (SMOL, Split(0), None, "must be at least 1"),
    (SMOL._replace(heads=8, kv_heads=3, head_size=72), Split(2), None,
     "3 key and value heads do not divide each other"),
    (SMOL._replace(heads=8, kv_heads=4, head_size=72), Split(2), 64,
     "a rank gets 288 of hidden_size 576, which group size 64"),
    (SMOL._replace(hidden=8192, heads=64, kv_heads=8, head_size=128, intermediate=28672, layers=80), Split(8, 2),
     128, None),
    (SMOL, Split(1), 64, None),
])  # fmt: skip
def test_a_split_that_does_not_divide_says_why(
    sizes: Sizes, split: Split, group: int | None, message: str | None
) -> None:
    said = why_not_split(sizes, split, group)
    assert (said is None) if message is None else (said is not None and message in said)


def test_more_ranks_than_heads_are_possible_when_heads_divide_them() -> None:
    assert possible(SMOL._replace(heads=8, kv_heads=2, head_size=72, hidden=576), None) == "1, 2, 4, 8"


def test_experts_and_unknown_architectures_are_refused_with_the_other_runtime() -> None:
    with pytest.raises(InputError, match="MixtralForCausalLM cannot be made here.*trtllm-bundle"):
        decoder_of({"architectures": ["MixtralForCausalLM"]})
    with pytest.raises(InputError, match="it has experts \\(num_experts\\)"):
        decoder_of({"architectures": ["Qwen3ForCausalLM"], "num_experts": 8})
    with pytest.raises(InputError, match="hidden_size = 'x'"):
        sizes_of({"hidden_size": "x", "num_attention_heads": 2})


def test_the_rotary_base_is_found_where_either_transformers_writes_it() -> None:
    assert rotary({"rope_theta": 5e5}) == (5e5, None)
    assert rotary({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}) == (5e5, None)
    scaled = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}
    assert rotary({"rope_parameters": scaled}) == (5e5, {"rope_type": "llama3", "factor": 8.0})


def test_what_modelopt_loses_is_mended() -> None:
    made = {"quantization": {"quant_algo": "W4A16_AWQ", "pre_quant_scale": True}, "rank": 3}
    mended = mend_config(made, CONFIG, "int4-w4a16", 64, prequant=False)
    assert mended["rotary_base"] == 10000.0
    assert mended["rank"] == 0
    assert mended["quantization"] == {
        "quant_algo": "W4A16_AWQ", "group_size": 64, "has_zero_point": False, "pre_quant_scale": False,
    }  # fmt: skip
    weight_only = mend_config({"quantization": {"quant_algo": None}}, CONFIG, "int8-w8a16", None, prequant=False)
    assert weight_only["quantization"]["quant_algo"] == "W8A16"

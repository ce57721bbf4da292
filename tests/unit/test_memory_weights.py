"""Weights: published parameter counts, the bytes of what was made here, and what tensor parallelism does to them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packers import CONFIG, KINDS, make_pair, make_source

from pipeline.checkpoint import Checkpoint
from pipeline.errors import InputError
from pipeline.formats import FORMATS, LAYOUTS_OF
from pipeline.layouts import find_layout, predict_weight_bytes
from pipeline.memory.arch import load_arch, read_arch
from pipeline.memory.fit import split_problem
from pipeline.memory.serving_params import form_of
from pipeline.memory.stored import formats, of_checkpoint, stored
from pipeline.memory.tensors import parameters
from pipeline.memory.weights import exact, predicted
from pipeline.params import load_params
from pipeline.plan import known_configs

ROOT = Path(__file__).parents[2]
CONFIGS = Path(__file__).parent / "configs"
CHECKPOINTS = ROOT / "artifacts/checkpoints"
# As the models' own repositories and papers count them; tied embeddings once, without multi-token prediction layers.
PUBLISHED_PARAMETERS = {
    "llama-3-70b": 70_553_706_496, "llama-3.1-8b": 8_030_261_248, "llama-3.2-1b": 1_235_814_400,
    "llama-2-7b": 6_738_415_616, "llama-2-70b": 68_976_648_192, "smollm2-135m": 134_515_008,
    "mistral-7b-v0.1": 7_241_732_096, "mixtral-8x7b": 46_702_792_704, "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648, "qwen3-8b": 8_190_735_360, "qwen3-0.6b": 596_049_920, "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624, "gemma-2-9b": 9_241_705_984, "gemma-3-27b": 27_009_346_304,
    "gemma-3-4b": 3_880_263_168, "phi-3-mini-4k": 3_821_079_552, "falcon-7b": 6_921_720_704,
    "deepseek-v3": 671_026_419_200, "deepseek-v2-lite": 15_706_484_224, "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672, "gpt2": 124_439_808, "opt-125m": 125_239_296, "phi-2": 2_779_683_840,
}  # fmt: skip
# GiB that vLLM says "Model loading took" (llm-d/llm-d-benchmark empirical-vllm-memory-results.md@4f4d449, H100). Of
# gpt-oss it pads the experts' rows for its kernel, 5% more than is stored.
LOADED_GIB = [
    ("llama-3-70b", "fp8-channel-token", 2, 33.88, 0.01), ("llama-3.1-8b", None, 1, 14.99, 0.01),
    ("qwen3-0.6b", None, 1, 1.12, 0.02), ("qwen3-32b", None, 1, 61.03, 0.01), ("qwen3-32b", None, 2, 30.59, 0.01),
    ("gpt-oss-20b", None, 1, 13.47, 0.06), ("gpt-oss-120b", None, 1, 64.38, 0.06),
]  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED_PARAMETERS)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert parameters(load_arch(CONFIGS / f"{name}.json")) == PUBLISHED_PARAMETERS[name]


@pytest.mark.parametrize(("name", "fmt", "gpus", "gib", "within"), LOADED_GIB)
def test_weights_are_what_vllm_loaded(name: str, fmt: str | None, gpus: int, gib: float, within: float) -> None:
    found = predicted(load_arch(CONFIGS / f"{name}.json"), stored(fmt) if fmt else None, gpus)
    assert found.bytes is not None
    assert found.bytes / 2**30 == pytest.approx(gib, rel=within)


def made_here() -> list[tuple[str, dict[str, Any]]]:
    """Every artifact whose facts are committed: (its id, quantize.json)."""
    paths = sorted((ROOT / "artifacts/results").glob("*/quantize.json"))
    return [(p.parent.name, json.loads(p.read_text(encoding="utf-8"))) for p in paths]


def recipes() -> list[tuple[str, dict[str, Any]]]:
    """Those of the small model: (recipe, quantize.json)."""
    return [(name.split(".")[1], made) for name, made in made_here() if name.startswith("smollm2-135m.")]


@pytest.mark.parametrize(("name", "made"), made_here())
def test_every_artifact_made_here_is_predicted_to_the_byte(name: str, made: dict[str, Any]) -> None:
    params = load_params(ROOT / "params.yaml")
    model, recipe = name.split(".")[:2]
    arch = read_arch(known_configs(ROOT, params)[model])
    form = form_of(params.recipes[recipe].model_copy(update={"backend": made["made_by"]}), arch)
    assert predicted(arch, form).bytes == made["weight_bytes"]


@pytest.mark.parametrize(
    ("backend", "fmt"),
    [(b, f) for b, methods in LAYOUTS_OF.items() for f in FORMATS if any(find_layout(m, f) for m in methods)],
)
def test_lint_and_memory_predict_the_same_bytes(tmp_path: Path, backend: str, fmt: str) -> None:
    """One table says what a backend stores, whoever asks."""
    folder = make_source(tmp_path / "source")
    layout = next(m for m in LAYOUTS_OF[backend] if find_layout(m, fmt))
    form = stored(fmt, 64, backend)
    lint = predict_weight_bytes(Checkpoint.open(folder).tensors, fmt, form.group, layout)
    assert predicted(load_arch(folder), form).bytes == lint


def test_there_are_artifacts_to_check() -> None:
    assert {"int8", "int4", "gptq", "awq", "fp8", "fp8-dynamic"} <= {recipe for recipe, _ in recipes()}


@pytest.mark.parametrize("recipe", ["int8", "int4", "gptq", "awq", "fp8", "fp8-dynamic"])
def test_headers_of_a_local_checkpoint_agree_with_its_record(recipe: str) -> None:
    folder = CHECKPOINTS / f"smollm2-135m.{recipe}"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not made here")
    record = next(made for name, made in recipes() if name == recipe)
    assert exact(folder, load_arch(folder)).bytes == record["weight_bytes"]


def test_every_format_that_a_recipe_may_name_has_a_size() -> None:
    assert set(FORMATS) <= set(formats())


def test_eight_billion_in_four_formats() -> None:
    """Llama-3.1-8B's shape: 16.1, 9.1 and 5.7 GB, as stored by llm-compressor and ModelOpt."""
    arch = load_arch(CONFIGS / "llama-3.1-8b.json")
    sizes = [predicted(arch, stored(*form)).bytes for form in (("bf16",), ("fp8-tensor",), ("int4-w4a16", 128))]
    assert [round((size or 0) / 1e9, 1) for size in sizes] == [16.1, 9.1, 5.7]


BACKEND = {"compressed-tensors": "llmcompressor", "modelopt": "modelopt", "gptq": "gptqmodel"}


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("kind", ["bf16", "ct-int8", "ct-int4", "ct-fp8-dynamic", "modelopt-fp8", "gptq"])
def test_headers_and_prediction_agree_on_every_gpu(tmp_path: Path, kind: str, gpus: int) -> None:
    made = make_pair(tmp_path, kind, tied=False)
    arch = read_arch(CONFIG | {"tie_word_embeddings": False})
    form = stored("bf16") if kind == "bf16" else stored(KINDS[kind].fmt, 64, BACKEND[KINDS[kind].method])
    said, read = predicted(arch, form, gpus), exact(made, load_arch(made), gpus)
    assert read.kind == "exact"
    assert said.bytes == pytest.approx(read.bytes, rel=0.02)
    assert said.read_bytes == pytest.approx(read.read_bytes, rel=0.02)


def test_exact_reads_headers_and_not_the_config(tmp_path: Path) -> None:
    """A prediction cannot know of a bias that the family does not have; headers do."""
    plain, biased = make_source(tmp_path / "plain"), make_source(tmp_path / "biased", bias=True)
    sizes = [exact(folder, load_arch(folder)).bytes or 0 for folder in (plain, biased)]
    assert sizes[1] - sizes[0] == 2 * 128 * 2
    assert sizes[0] == predicted(load_arch(plain)).bytes


def test_a_damaged_checkpoint_is_an_error(tmp_path: Path) -> None:
    folder = make_source(tmp_path / "source")
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])
    with pytest.raises(InputError, match="truncated"):
        exact(folder, load_arch(folder))


@pytest.mark.parametrize("name", sorted(PUBLISHED_PARAMETERS))
@pytest.mark.parametrize("form", [("bf16",), ("int8-w8a8",), ("int4-w4a16", 32), ("nvfp4",)])
def test_gpus_together_never_hold_less_than_one_alone(name: str, form: tuple[Any, ...]) -> None:
    arch = load_arch(CONFIGS / f"{name}.json")
    alone = predicted(arch, stored(*form)).bytes or 0
    for gpus in (2, 4, 8):
        each = predicted(arch, stored(*form), gpus).bytes or 0
        assert gpus * each >= alone > each


@given(st.integers(1, 6), st.sampled_from([1, 2, 4]), st.booleans(), st.sampled_from([16, 32, 128]))
def test_fewer_bits_never_need_more_bytes(layers: int, kv: int, tied: bool, group: int) -> None:
    config = CONFIG | {"num_hidden_layers": layers, "num_key_value_heads": kv, "tie_word_embeddings": tied}
    arch = read_arch(config)
    four, eight, sixteen = (
        predicted(arch, form).bytes or 0 for form in (stored("int4-w4a16", group), stored("int8-w8a8"), stored("bf16"))
    )
    assert four < eight < sixteen
    assert sixteen == 2 * parameters(arch)


def test_experts_count_once_a_gpu_and_partly_a_token() -> None:
    found = predicted(load_arch(CONFIGS / "mixtral-8x7b.json"), stored("bf16"))
    assert (found.read_bytes or 0) - (found.active_bytes or 0) == 6 * 32 * 3 * 4096 * 14336 * 2


def test_a_published_format_is_read_from_its_config() -> None:
    deepseek = predicted(load_arch(CONFIGS / "deepseek-v3.json"))
    assert deepseek.fmt == "fp8-block"
    assert deepseek.bytes == pytest.approx(671.0e9, rel=0.01)  # one byte a parameter, and embeddings in two
    ct = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int",
          "strategy": "group", "group_size": 32}, "input_activations": None}}}  # fmt: skip
    found = of_checkpoint(ct)
    assert found is not None and (found.fmt, found.group) == ("int4-w4a16", 32)
    assert of_checkpoint({"quant_method": "bitsandbytes"}) is None


def test_a_kind_that_is_not_known_is_not_predicted() -> None:
    found = predicted(read_arch(CONFIG | {"quantization_config": {"quant_method": "bitsandbytes"}}))
    assert found.bytes is None and "not in stored.yaml" in str(found.reason)
    linear = predicted(load_arch(CONFIGS / "qwen3-next-80b-a3b.json"))
    assert linear.bytes is None and "36 linear_attention layers" in str(linear.reason)


def test_a_family_that_is_not_known_is_said_to_be_assumed() -> None:
    arch = read_arch(CONFIG | {"model_type": "llamma"})
    assert "'llamma' is not in families.yaml" in arch.notes[0]
    assert parameters(arch) == parameters(read_arch(CONFIG))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": None}, "lacks the key 'num_hidden_layers'"),
        ({"vocab_size": "many"}, "has vocab_size 'many', which must be a whole number"),
        ({"num_attention_heads": -4}, "has num_attention_heads -4"),
        (
            {"num_attention_heads": 5, "head_dim": None},
            "lacks the key 'head_dim', and hidden_size 128 is not",
        ),
        ({"dtype": "bfloat61"}, "dtype 'bfloat61'.*Did you mean 'bfloat16'"),
        ({"kv_lora_rank": 512}, "lacks the key 'qk_rope_head_dim'"),
        ({"num_local_experts": 8}, "8 experts and lacks the key 'num_experts_per_tok'"),
        ({"num_key_value_heads": [2, 4]}, r"has num_key_value_heads \[2, 4\]"),
        ({"num_hidden_layers": 99_999_999}, "num_hidden_layers 99999999, more than any model has"),
        ({"layer_types": ["full_attention"]}, "layer_types for 1 of its 2 layers"),
        ({"quantization_config": "fp8"}, "quantization_config that is no JSON object"),
    ],
)
def test_a_broken_config_names_its_key(change: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        read_arch({k: v for k, v in (CONFIG | change).items() if v is not None}, "x/config.json")


@pytest.mark.parametrize("model_type", ["mamba", "jamba", "deepseek_v32", "gemma3n"])
def test_caches_that_are_not_modelled_are_null_and_not_guessed(model_type: str) -> None:
    arch = read_arch(CONFIG | {"model_type": model_type})
    assert arch.cache == () and arch.not_modelled[0].startswith(f"{model_type}: ")
    assert predicted(arch).bytes is None
    nested = read_arch({"model_type": model_type, "text_config": CONFIG | {"model_type": "inner"}})
    assert nested.not_modelled == arch.not_modelled
    bare = read_arch({"model_type": model_type, "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 9})
    assert bare.not_modelled == arch.not_modelled


def test_a_hybrid_of_an_unknown_family_is_known_by_its_keys() -> None:
    arch = read_arch(CONFIG | {"model_type": "newest", "mamba_d_state": 16})
    assert arch.not_modelled == ("newest (mamba_d_state): state-space layers",) and arch.cache == ()


def test_a_gptq_group_of_minus_one_is_a_whole_row() -> None:
    form = of_checkpoint({"quant_method": "gptq", "bits": 4, "group_size": -1})
    assert form is not None and form.layer_bytes(8, 64) == 8 * 64 // 2 + 20 + 4 * 64  # 2.5 bytes a row, an index


def test_unknown_format_and_bad_group() -> None:
    with pytest.raises(InputError, match="no format 'fp8-tenser'.*Did you mean 'fp8-tensor'"):
        stored("fp8-tenser")
    with pytest.raises(InputError, match="group size -1"):
        stored("int4-w4a16", -1)


@pytest.mark.parametrize(
    ("name", "gpus", "form", "says"),
    [
        ("llama-3-70b", 8, None, None),
        ("llama-3-70b", 16, None, None),
        ("smollm2-135m", 2, None, "2 does not divide the 9 attention heads"),
        ("qwen2.5-7b", 8, None, "8 does not divide the 28 attention heads"),
        ("qwen2.5-7b", 7, None, "7 neither divides the 4 key-value heads"),
        ("qwen2.5-72b", 8, ("int8-w8a8",), None),
        ("qwen2.5-72b", 8, ("int4-w4a16", 128), "8 leaves 3696 inputs a GPU, which groups of 128 do not divide"),
        ("deepseek-v3", 8, None, None),
    ],
)
def test_what_cannot_be_divided(name: str, gpus: int, form: Any, says: str | None) -> None:
    found = split_problem(load_arch(CONFIGS / f"{name}.json"), gpus, stored(*form) if form else None)
    assert found is None if says is None else says in str(found)

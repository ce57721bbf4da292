"""Which backend makes the artifact of a runtime, and that no cell is served with another's artifact."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import plan
from pipeline.formats import BACKENDS, FORMATS, LAYOUTS_OF
from pipeline.params import load_params
from pipeline.producers import first_producer, makes, producer_for, producers_of, served
from pipeline.specs import Params, Recipe, Target
from pipeline.support import runtimes
from pipeline.support.table import tables

ROOT = Path(__file__).parents[2]
H200 = Target(device="cuda", gpu="NVIDIA H200", sm=90, memory_gib=141)
B200 = Target(device="cuda", gpu="NVIDIA B200", sm=100, memory_gib=180)
SCHEMES = [(b, f, a) for b, pairs in BACKENDS.items() for f, a in pairs]


@pytest.fixture
def params() -> Params:
    return load_params(ROOT / "params.yaml")


# (recipe, runtime) -> (backend, layout) of the artifact that the runtime is given
CHOICES = {
    ("bf16", "vllm"): ("none", "hf"),
    ("bf16", "trtllm-bundle"): ("none", "hf"),
    ("awq", "vllm"): ("llmcompressor", "compressed-tensors"),
    ("awq", "trtllm-bundle"): ("modelopt", "modelopt"),
    ("awq", "trtllm-engine"): ("modelopt", "modelopt-trtllm"),
    ("int8", "vllm"): ("llmcompressor", "compressed-tensors"),
    ("int8", "trtllm-engine"): ("modelopt", "modelopt-trtllm"),
    ("fp8", "vllm"): ("modelopt", "modelopt"),
    ("fp8", "trtllm-bundle"): ("modelopt", "modelopt"),
    ("fp8", "trtllm-engine"): ("modelopt", "modelopt-trtllm"),
    ("fp8-dynamic", "trtllm-bundle"): ("llmcompressor", "compressed-tensors"),
    ("gptq", "vllm"): ("gptqmodel", "gptq"),
}


@pytest.mark.parametrize("recipe, runtime", CHOICES)
def test_the_producer_of_a_runtime(recipe: str, runtime: str, params: Params) -> None:
    found = producer_for(params.recipes[recipe], runtime)
    assert (found.backend, found.layout) == CHOICES[recipe, runtime]


def test_another_producers_artifact_has_an_id_of_its_own(params: Params) -> None:
    awq = params.recipes["awq"]
    ids = {runtime: producer_for(awq, runtime).id("m", "awq", awq) for runtime in runtimes()}
    assert ids == {"vllm": "m.awq", "trtllm-bundle": "m.awq.modelopt", "trtllm-engine": "m.awq.modelopt-trtllm"}


def test_the_recipe_may_name_the_producer(params: Params) -> None:
    recipe = params.recipes["fp8"].model_copy(update={"producers": {"vllm": "llmcompressor"}})
    assert producer_for(recipe, "vllm").backend == "llmcompressor"
    assert producer_for(recipe, "trtllm-bundle").backend == "modelopt"
    gptq = params.recipes["gptq"].model_copy(update={"producers": {"vllm": "llmcompressor"}})
    assert producer_for(gptq, "vllm").id("m", "gptq", gptq) == "m.gptq.compressed-tensors"


def test_a_stand_in_algorithm_is_named(params: Params) -> None:
    """ModelOpt has SmoothQuant without GPTQ: the artifact says so."""
    found = producer_for(params.recipes["int8"], "trtllm-engine")
    assert (params.recipes["int8"].algorithm, found.algorithm) == ("smoothquant-gptq", "smoothquant")


@given(
    st.sampled_from(SCHEMES), st.sampled_from(["vllm", "trtllm-engine", "trtllm-bundle"]), st.sampled_from([H200, B200])
)
def test_a_cell_is_served_with_what_its_runtime_loads_or_refused(
    scheme: tuple[str, str, str], runtime: str, target: Target
) -> None:
    backend, fmt, algorithm = scheme
    recipe = Recipe(format=fmt, algorithm=algorithm, backend=backend)
    producer = producer_for(recipe, runtime)
    assert producer.layout in LAYOUTS_OF[producer.backend]
    assert producer.algorithm == makes(producer.backend, recipe) or producer == first_producer(recipe)
    found = served(recipe, producer, runtime, target, "t", ())
    assert found.verdict in ("native", "fallback", "refused")
    if found.verdict != "refused":
        assert producer.layout in tables()[runtime].packaged_layouts
        rows = [r for r in tables()[runtime].rows if r.format == fmt and producer.layout in (r.layouts or [])]
        assert rows, "served without a row for this artifact"


def test_every_format_is_made_by_a_backend() -> None:
    assert {fmt for _, fmt, _ in SCHEMES} == set(FORMATS)


def test_ids_of_one_recipe_never_meet() -> None:
    for backend, fmt, algorithm in SCHEMES:
        recipe = Recipe(format=fmt, algorithm=algorithm, backend=backend)
        ids = [producer.id("m", "r", recipe) for producer in producers_of(recipe)]
        assert len(ids) == len(set(ids))
        assert ids[0] == "m.r"


def test_what_is_unknown_is_refused_until_params_names_it(params: Params) -> None:
    recipe = Recipe(format="int8-w8a16", algorithm="rtn", backend="llmcompressor")
    producer = producer_for(recipe, "vllm")
    refused = served(recipe, producer, "vllm", B200, "b200", ())
    assert refused.verdict == "refused"
    assert refused.reason.startswith("unknown: ")
    assert "name int8-w8a16.vllm.b200 under allow_unknown" in refused.reason
    allowed = served(recipe, producer, "vllm", B200, "b200", ["int8-w8a16.vllm.b200"])
    assert allowed.verdict == "unknown"
    assert "served because params.yaml names int8-w8a16.vllm.b200" in allowed.reason


def test_weights_and_kv_cache_are_judged_together() -> None:
    recipe = Recipe(format="fp8-tensor", algorithm="max", backend="modelopt", calib_set="docs", kv_cache="fp8")
    producer = producer_for(recipe, "vllm")
    both = served(recipe, producer, "vllm", H200, "h200", ())
    assert both.verdict == "native"
    assert "CUTLASS" in both.reason
    assert "FlashAttention" in both.reason
    a100 = Target(device="cuda", gpu="NVIDIA A100", sm=80, memory_gib=80)
    assert "kv-fp8.vllm.a100 under allow_unknown" in served(recipe, producer, "vllm", a100, "a100", ()).reason
    cell = served(recipe, producer, "vllm", a100, "a100", ["kv-fp8.vllm.a100"])
    assert cell.verdict == "unknown"
    assert "stored in FP8, computed in bf16" in cell.reason


def _planned(params: Params, recipes: list[str], runtimes_: list[str], targets: list[str], **more: object) -> dict:  # type: ignore[type-arg]
    fixed = {"recipes": recipes, "runtimes": runtimes_, "targets": targets, "measure": False}
    row = params.matrix[0].model_copy(update=fixed | more)
    return plan.make_plan(params.model_copy(update={"matrix": [params.matrix[0], row]}), {})


def test_the_plan_says_which_artifact_a_cell_is_given(params: Params) -> None:
    made = _planned(params, ["awq", "int8"], ["vllm", "trtllm-bundle", "trtllm-engine"], ["h200"])
    cells = {c["cell"]: c for c in made["cells"]}
    assert cells["smollm2-135m.awq.vllm.h200"]["checkpoint"] == "smollm2-135m.awq"
    assert cells["smollm2-135m.awq.trtllm-bundle.h200"]["checkpoint"] == "smollm2-135m.awq.modelopt"
    assert cells["smollm2-135m.int8.trtllm-bundle.h200"]["verdict"] == "refused"
    assert made["checkpoints"]["smollm2-135m.awq.modelopt"]["backend"] == "modelopt"
    text = plan.table(made)
    assert "made apart: smollm2-135m.awq.modelopt: modelopt by awq, stored as modelopt" in text
    assert "smollm2-135m.int8.modelopt-trtllm: modelopt by smoothquant" in text


def test_a_measured_cell_makes_and_packages_its_own_artifact(params: Params) -> None:
    row = params.matrix[0].model_copy(update={"recipes": ["bf16", "gptq"]})
    recipes = dict(params.recipes)
    recipes["gptq"] = recipes["gptq"].model_copy(update={"producers": {"vllm": "llmcompressor"}})
    made = plan.make_plan(params.model_copy(update={"matrix": [row], "recipes": recipes}), {})
    key = "smollm2-135m.gptq.compressed-tensors"
    assert made["quantize"][key]["env"] == "llmcompressor"
    assert made["quantize"]["smollm2-135m.gptq"]["env"] == "gptqmodel"
    package = made["package"]["smollm2-135m.gptq.vllm.cpu"]
    assert package["checkpoint"] == f"artifacts/checkpoints/{key}"
    assert package["lint"] == f"artifacts/results/{key}/lint.json"

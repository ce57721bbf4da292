"""The plan: what is made, what is served where, what is refused and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline import plan
from pipeline.errors import InputError
from pipeline.params import load_params
from pipeline.specs import Params

ROOT = Path(__file__).parents[2]
CONFIG = {"hidden_size": 576, "intermediate_size": 1536}


@pytest.fixture
def params() -> Params:
    return load_params(ROOT / "params.yaml")


def test_the_committed_plan_is_fresh(params: Params) -> None:
    made = plan.make_plan(params, plan.known_configs(ROOT, params))
    plan.check_fresh(made, ROOT / plan.PLAN)


def test_a_stale_plan_is_an_error_that_says_what_to_type(params: Params, tmp_path: Path) -> None:
    stale = tmp_path / "plan.yaml"
    stale.write_text("old", encoding="utf-8")
    with pytest.raises(InputError, match="is stale.*python -m pipeline plan"):
        plan.check_fresh(plan.make_plan(params, {}), stale)


def test_cells_without_a_kernel_are_packaged_but_not_measured(params: Params) -> None:
    made = plan.make_plan(params, {})
    cell = "smollm2-135m.fp8.vllm.cpu"
    entry = next(c for c in made["cells"] if c["cell"] == cell)
    assert entry["verdict"] == "refused"
    assert "static_scaled_fp8_quant" in entry["reason"]
    assert cell not in made["measure"]
    assert {"smollm2-135m.fp8"} <= set(made["quantize"]) & set(made["lint"])
    assert cell in made["package"]


def test_cells_of_gpus_are_planned_and_not_measured_here(params: Params) -> None:
    made = plan.make_plan(params, {})
    gpu = [c for c in made["cells"] if c["target"] != "cpu"]
    assert {c["target"] for c in gpu} == {
        "h200",
        "h200-x2",
        "h100",
        "l40s",
        "a100-80g",
        "a10g",
        "b200",
        "b300",
        "rtx-4090",
        "rtx-5090",
        "rtx-pro-6000",
    }
    assert not any(c["measured_here"] for c in gpu)
    assert all(name.endswith(".cpu") for name in made["measure"])


def test_fallbacks_and_refusals_of_gpus(params: Params) -> None:
    verdicts = {c["cell"]: c for c in plan.make_plan(params, {})["cells"]}
    assert verdicts["smollm2-135m.fp8.vllm.a100-80g"]["verdict"] == "fallback"
    assert "computed in bf16" in verdicts["smollm2-135m.fp8.vllm.a100-80g"]["reason"]
    assert verdicts["smollm2-135m.int8.vllm.b200"]["verdict"] == "refused"
    assert verdicts["smollm2-135m.int8.vllm.h200"]["verdict"] == "native"


def test_a_group_size_that_does_not_divide_is_refused_with_one_that_does(params: Params) -> None:
    recipe = params.recipes["int4"].model_copy(update={"group_size": 128})
    reason = plan.why_not_made("smollm2-135m", recipe, CONFIG)
    assert reason is not None
    assert "group_size 128 does not divide hidden_size 576" in reason
    assert "group_size 64 divides" in reason
    assert plan.why_not_made("smollm2-135m", params.recipes["int4"], CONFIG) is None


def test_fixed_blocks_must_divide(params: Params) -> None:
    block = params.recipes["fp8-block"]
    reason = plan.why_not_made("smollm2-135m", block, CONFIG)
    assert reason is not None
    assert "blocks of 128x128, which do not divide hidden_size 576 of smollm2-135m" in reason
    whole = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2}
    assert plan.why_not_made("m", block, whole) is None
    narrow = whole | {"num_key_value_heads": 1}
    assert "key and value width 64" in str(plan.why_not_made("m", block, narrow))
    for name in ("nvfp4", "mxfp4", "mxfp8"):
        assert plan.why_not_made("smollm2-135m", params.recipes[name], CONFIG) is None
        assert "blocks of 1x" in str(plan.why_not_made("m", params.recipes[name], {"hidden_size": 584}))


def test_a_recipe_that_is_only_planned_may_be_refused(params: Params) -> None:
    made = plan.make_plan(params, {"smollm2-135m": CONFIG})
    assert [(item["what"], item["measure"]) for item in made["refusals"]] == [("smollm2-135m.fp8-block", False)]
    assert not any("smollm2-135m.fp8-block." in cell["cell"] for cell in made["cells"])


def test_planned_recipes_lengthen_no_default_run(params: Params) -> None:
    """What `dvc repro` makes and measures is in the first row; the others are planned, and two packages are written."""
    made = plan.make_plan(params, {})
    first = plan.make_plan(params.model_copy(update={"matrix": params.matrix[:1]}), {})
    for group in ("fetch", "calibrate", "quantize", "lint", "package", "measure"):
        made[group] = {key: item for key, item in made[group].items() if ".trtllm-" not in key}
        assert made[group] == first[group]


def test_a_refused_recipe_is_listed_and_nothing_of_it_runs(params: Params) -> None:
    recipes = dict(params.recipes) | {"int4": params.recipes["int4"].model_copy(update={"group_size": 128})}
    made = plan.make_plan(params.model_copy(update={"recipes": recipes}), {"smollm2-135m": CONFIG})
    assert [item["what"] for item in made["refusals"] if item["measure"]] == ["smollm2-135m.int4"]
    assert not any(
        ".int4." in key or key.endswith(".int4") for g in ("quantize", "package", "measure") for key in made[g]
    )


def test_one_more_recipe_leaves_the_other_stages_as_they_are(params: Params) -> None:
    before = plan.make_plan(params, {})
    recipes = dict(params.recipes) | {"int4-g32": params.recipes["int4"].model_copy(update={"group_size": 32})}
    rows = [r.model_copy(update={"recipes": [*r.recipes, "int4-g32"]}) for r in params.matrix]
    after = plan.make_plan(params.model_copy(update={"recipes": recipes, "matrix": rows}), {})
    for group in ("fetch", "calibrate", "quantize", "lint", "package", "measure"):
        assert {k: v for k, v in after[group].items() if "int4-g32" not in k} == before[group]
        if group not in ("fetch", "calibrate"):
            assert any("int4-g32" in key for key in after[group])


def test_dvc_watches_every_local_source() -> None:
    assert plan.local_path(["stdlib:pydoc_data.topics"]) == "stages/source/pyproject.toml"
    assert plan.local_path(["file:texts/a.jsonl", "stdlib:pydoc_data.topics"]) == "texts/a.jsonl"
    assert plan.local_path(["file:texts/a.jsonl", "file:texts/more/b.txt"]) == "texts"
    for apart in (["file:a.jsonl", "file:b.jsonl"], ["file:texts/a.jsonl", "file:/data/b.jsonl"]):
        with pytest.raises(InputError, match="in one folder: DVC watches"):
            plan.local_path(apart)


def test_an_unknown_runtime_is_named(params: Params) -> None:
    rows = [params.matrix[0].model_copy(update={"runtimes": ["vlm"]})]
    with pytest.raises(InputError, match="no runtime 'vlm'.*Did you mean 'vllm'"):
        plan.make_plan(params.model_copy(update={"matrix": rows}), {})


def test_the_table_shows_every_cell(params: Params) -> None:
    made = plan.make_plan(params, {})
    text = plan.table(made)
    assert all(cell["cell"] in text and cell["reason"] in text for cell in made["cells"])

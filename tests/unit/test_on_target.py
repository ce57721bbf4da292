"""Cells that are made and measured on their own target: their plan, their order, what is still to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline import jsonio, manifest, on_target, on_target_order
from pipeline.errors import InputError, WorkError
from pipeline.on_target import last_error
from pipeline.on_target_files import is_there, kept_facts
from pipeline.on_target_order import FILE, needs, order, pending, result
from pipeline.plan_on_target import is_on_target
from pipeline.specs import Params

ROOT = Path(__file__).parents[2]
FP8 = "llama-8b-random.fp8-dynamic.vllm.h200"
BF16 = "llama-8b-random.bf16.vllm.h200"


def test_a_plain_repro_has_no_cell_of_another_target(made: dict[str, Any]) -> None:
    for group in ("fetch", "calibrate", "quantize", "lint", "package", "measure"):
        assert not [name for name in made[group] if name.endswith(".h200") or "random" in name]


def test_what_is_made_on_a_target_stands_beside_what_a_laptop_made(made: dict[str, Any]) -> None:
    there = made["on_target"]
    assert "smollm2-135m.int8.h200" in there["quantize"] and "smollm2-135m.int8" in made["quantize"]
    package = there["package"]["smollm2-135m.int8.vllm.h200"]
    assert package["checkpoint"] == "artifacts/checkpoints/smollm2-135m.int8.h200"
    assert package["lint"] == "artifacts/checkpoints/smollm2-135m.int8.h200.lint.json"
    assert there["package"]["smollm2-135m.bf16.vllm.h200"]["checkpoint"] == "artifacts/models/smollm2-135m"
    cell = next(c for c in made["cells"] if c["cell"] == "smollm2-135m.int8.vllm.h200")
    assert (cell["checkpoint"], cell["measured_here"]) == ("smollm2-135m.int8.h200", False)


def test_random_weights_are_timed_and_never_evaluated(made: dict[str, Any]) -> None:
    there = made["on_target"]
    assert FP8 in there["benchmark"]
    assert not [name for name in there["evaluate"] if "random" in name]
    assert "smollm2-135m" not in there["fetch"]  # the ordinary plan has it


def test_every_stage_of_the_file_finds_its_own_in_the_plan(made: dict[str, Any]) -> None:
    stages = yaml.safe_load((ROOT / FILE).read_text(encoding="utf-8"))["stages"]
    assert {f"${{on_target.{group}}}" for group in stages} == {s["foreach"] for s in stages.values()}
    assert set(stages) == set(made["on_target"])
    assert all(s["do"]["wdir"] == "../.." for s in stages.values())


def test_stages_there_depend_on_what_the_ordinary_ones_depend_on() -> None:
    ordinary, there = (
        yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))["stages"] for name in ("dvc.yaml", FILE)
    )
    # A lent host is another machine each time, of one kind; random weights come from another program and no GGUF.
    other = {"artifacts/host.json": "artifacts/kind.${item.target}.json"}
    for name in ("calibrate", "quantize", "lint", "package", "evaluate", "benchmark"):
        cell = "${item.model}.${item.recipe}.${item.runtime}.${item.target}"
        wanted = {other.get(dep, dep).replace(cell, "${key}") for dep in ordinary[name]["do"]["deps"]}
        assert set(there[name]["do"]["deps"]) == wanted, name
        left_out = {"benchmark", "benchmark_gpu"}  # the target names its own workloads
        assert set(ordinary[name]["do"]["params"]) - left_out <= set(there[name]["do"]["params"]), name


def test_every_output_there_is_left_out_of_the_cache() -> None:
    stages = yaml.safe_load((ROOT / FILE).read_text(encoding="utf-8"))["stages"]
    outs = [out for s in stages.values() for key in ("outs", "metrics") for out in s["do"].get(key, [])]
    assert outs and all(isinstance(out, dict) and next(iter(out.values())) == {"cache": False} for out in outs)


def test_no_stage_of_a_plain_repro_reads_a_folder_that_a_stage_there_writes() -> None:
    # DVC would run them first: an 8B of random weights on a laptop, because the report reads artifacts/results.
    ordinary, there = (
        yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))["stages"] for name in ("dvc.yaml", FILE)
    )
    outs = [
        next(iter(out))
        for stage in there.values()
        for kind in ("outs", "metrics", "plots")
        for out in stage["do"].get(kind, [])
    ]
    deps = {dep for stage in ordinary.values() for dep in stage.get("do", stage).get("deps", []) if "$" not in dep}
    assert "artifacts/results" in deps
    assert not [(dep, out) for dep in deps for out in outs if f"{out}/".startswith(f"{dep}/")]


def test_the_most_telling_comes_first(params: Params, made: dict[str, Any]) -> None:
    found = order(params, made, "h200")
    large = [c for c in made["on_target"]["benchmark"] if c.startswith("llama") and c.endswith(".h200") and c != BF16]
    tunes = [f"tune@{name}" for name in params.tuning]
    assert sorted(params.tuning) == sorted(made["on_target"]["tune"])
    first, others = ([f"benchmark@{name}" for name in part] for part in (large[:2], large[2:]))
    assert first[0] == f"benchmark@{FP8}" and len(tunes) > 1 and others
    assert found[: len(large) + len(tunes)] == [*first, *tunes, *others]
    first_quality = next(s for s in found if s.startswith("evaluate@"))
    assert first_quality == "evaluate@smollm2-135m.bf16.vllm.h200"
    assert found.index(f"benchmark@{BF16}") > max(i for i, s in enumerate(found) if s.startswith("evaluate@"))
    assert found[-1].startswith("benchmark@smollm2-135m")
    for target in ("h200", "h200-x2"):
        ours = order(params, made, target)
        groups = ("evaluate", "benchmark", "tune", "scaling")
        there = [f"{kind}@{name}" for kind in groups for name in made["on_target"][kind] if name.endswith(f".{target}")]
        assert sorted(ours) == sorted(there)
    assert order(params, made, "h100") == []


def test_scaling_comes_after_its_targets_first_row(params: Params, made: dict[str, Any]) -> None:
    cells = ("benchmark@llama-8b-random.fp8-dynamic", "scaling@llama-8b-random.bf16", "benchmark@llama-8b-random.bf16")
    assert order(params, made, "h200-x2") == [f"{cell}.vllm.h200-x2" for cell in cells]
    there = made["on_target"]
    both = {"on_target": there | {"scaling": {BF16: there["benchmark"][BF16]}}}
    found = order(params, both, "h200")
    kinds = [stage.split("@")[0] for stage in found]
    assert kinds[:2] == ["benchmark"] * 2 and kinds[2:].index("scaling") == len(params.tuning)
    assert kinds[2 : kinds.index("scaling")] == ["tune"] * len(params.tuning)


def test_what_a_stage_needs_is_made_before_it_and_its_baseline_too(made: dict[str, Any]) -> None:
    found = needs(made, [f"benchmark@{FP8}"])
    assert found["fetch"] == ["fetch@smollm2-135m", f"{FILE}:fetch@llama-8b-random"]
    assert found["calibrate"] == [f"{FILE}:calibrate@held-out.llama-8b-random"]
    assert found["chains"] == [
        f"{FILE}:lint@llama-8b-random.bf16.h200 {FILE}:package@{BF16}",
        f"{FILE}:quantize@llama-8b-random.fp8-dynamic.h200 {FILE}:lint@llama-8b-random.fp8-dynamic.h200 "
        f"{FILE}:package@{FP8}",
    ]
    quality = needs(made, ["evaluate@smollm2-135m.int8.vllm.h200"])
    assert set(quality["calibrate"]) == {"calibrate@docs.smollm2-135m", "calibrate@held-out.smollm2-135m"}


def test_only_what_dvc_would_run_is_pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked: list[list[str]] = []

    def dvc(arguments: list[str]) -> str:
        asked.append(arguments)
        return f"Stage '{FILE}:evaluate@a' didn't change, skipping\nRunning stage '{FILE}:evaluate@b':\n> x\n"

    stages = ["evaluate@a", "evaluate@b", "evaluate@c", "benchmark@a"]
    assert pending(stages, dvc) == stages
    assert asked == []
    lock = Path(FILE).with_name("dvc.lock")
    lock.parent.mkdir(parents=True)
    lock.write_text(yaml.safe_dump({"stages": {s: {} for s in ("evaluate@a", "evaluate@b", "benchmark@a")}}), "utf-8")
    for stage in ("evaluate@a", "evaluate@b"):
        result(stage).parent.mkdir(parents=True)
        result(stage).touch()
    # `benchmark@a` ran, and its result is not here: DVC would take it for one that can be fetched.
    assert pending(stages, dvc) == ["evaluate@b", "evaluate@c", "benchmark@a"]
    assert asked[0][-2:] == [f"{FILE}:evaluate@a", f"{FILE}:evaluate@b"]


def test_what_is_whole_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    stage = f"{FILE}:fetch@m"
    assert not is_there(stage)
    folder = Path("artifacts/models/m")
    folder.mkdir(parents=True)
    (folder / "x").write_text("weights", encoding="utf-8")
    jsonio.write_json(Path("artifacts/results/m/model.json"), {"files": manifest.describe(folder)})
    assert is_there(stage)
    (folder / "x").write_text("others!", encoding="utf-8")
    assert not is_there(stage)
    assert not is_there("calibrate@docs.m")
    jsonio.write_json(Path("calib_data/docs.m/tokens.json"), {"input_ids": []})
    assert is_there("calibrate@docs.m")


def test_facts_of_a_model_stay_as_they_are_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = Path("artifacts/results/m/model.json")
    path.parent.mkdir(parents=True)
    path.write_text('{"files": {"a": 1}, "versions": "here"}', encoding="utf-8")
    with kept_facts(["m", "never-fetched"]):
        path.write_text('{"files": {"a": 1}, "versions": "there"}', encoding="utf-8")
    assert "here" in path.read_text(encoding="utf-8")
    with pytest.raises(WorkError, match="m was fetched here with other bytes"), kept_facts(["m"]):
        path.write_text('{"files": {"a": 2}, "versions": "there"}', encoding="utf-8")


def test_the_last_error_is_the_stages_own_sentence() -> None:
    text = "Running\nquantpress: error: no space.\nERROR: failed to reproduce 'x': exited with 1\n"
    assert last_error(text) == "no space."
    assert last_error("a\nERROR: lock\n") == "ERROR: lock"


def test_a_target_without_such_cells_is_refused(params: Params, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError, match="no target with `measure: on-target` 'h20'.*Did you mean 'h200'"):
        on_target.Run(params, "h20", None, 1, None)
    with pytest.raises(InputError, match="leaves no time"):
        on_target.need_minutes(0)


def test_which_cells_take_their_targets_checkpoint(params: Params) -> None:
    assert is_on_target(params, "smollm2-135m", "int8", "h200")
    assert not is_on_target(params, "smollm2-135m", "int8", "cpu")
    assert not is_on_target(params, "smollm2-135m", "int8", "h100")


def test_a_tuning_run_needs_the_packages_that_its_variants_name(made: dict[str, Any]) -> None:
    def packages(stage: str) -> set[str]:
        return {chain.split(":package@")[1].split(".")[1] for chain in needs(made, [stage])["chains"]}

    assert packages(f"tune@{FP8}") == {"fp8-dynamic", "fp8"}
    assert packages(f"tune@{BF16}") == {"bf16", "fp8-dynamic", "int8-rtn", "fp8-block"}
    assert packages("tune@llama-8b-random.int4-g128.vllm.h200") == {"int4-g128", "w4a8-g128"}
    assert packages("scaling@llama-8b-random.bf16.vllm.h200-x2") == {"bf16"}
    assert f"{FILE}:calibrate@docs.llama-8b-random" in needs(made, [f"tune@{FP8}"])["calibrate"]


def test_results_of_tuning_and_scaling_are_named_after_them() -> None:
    assert result("tune@a.b.c.d").as_posix() == "artifacts/results/a.b.c.d/tune.json"
    assert result("scaling@a.b.c.d").as_posix() == "artifacts/results/a.b.c.d/scaling.json"
    assert result("benchmark@a.b.c.d").name == "bench.json" and result("evaluate@a.b.c.d").name == "eval.json"


def test_the_only_stages_with_a_guess_are_those_of_the_order(params: Params, made: dict[str, Any]) -> None:
    kinds = {s.split("@")[0] for target in ("h200", "h200-x2") for s in order(params, made, target)}
    assert kinds == set(on_target.FIRST_GUESS_S)


@given(
    st.lists(st.sampled_from(["evaluate@a", "benchmark@b", "tune@c"]), max_size=12),
    st.floats(0, 4000),
    st.integers(1, 8),
)
def test_reached_timings_are_the_first_ones_and_more_gpus_reach_more(stages: list[str], left: float, gpus: int) -> None:
    guess = on_target.FIRST_GUESS_S
    reached = on_target_order.in_time(stages, guess, left, gpus)
    assert [s for s in reached if s[0] == "e"] == [s for s in stages if s[0] == "e"]
    timed, all_timed = ([s for s in some if s[0] != "e"] for some in (reached, stages))
    assert timed == all_timed[: len(timed)]
    assert len(reached) <= len(on_target_order.in_time(stages, guess, left, gpus + 1))
    if left > 0 and all_timed:
        assert timed


@pytest.mark.parametrize(("weight_gb", "gpu_gb", "ram_gb", "gpus", "jobs"), [
    (16, 150, 135, 1, 4),  # an 8B on an H200
    (65, 150, 135, 1, 1),  # a 32B
    (65, 150, 405, 2, 1),
    (65, 300, 405, 2, 2),  # the host's memory is shared by its GPUs
    (141, 150, 135, 1, 1),  # what does not fit at all is for quantize to refuse, with its numbers
    (0.3, 150, 135, 8, 4),
])  # fmt: skip
def test_no_more_checkpoints_at_once_than_fit(
    weight_gb: float, gpu_gb: float, ram_gb: float, gpus: int, jobs: int
) -> None:
    found = on_target_order.jobs_that_fit(4, int(1e9 * weight_gb), 1e9 * gpu_gb, 1e9 * ram_gb, gpus)
    assert found == jobs


def test_gpus_that_may_be_seen_are_the_ones_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert on_target.gpu_names(2) == ["3", "5"]
    assert on_target.gpu_names(1) == [None]
    with pytest.raises(InputError, match="--gpus 3 wants more GPUs than CUDA_VISIBLE_DEVICES=3,5"):
        on_target.gpu_names(3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert on_target.gpu_names(3) == ["0", "1", "2"]

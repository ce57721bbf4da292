"""Tuning and scaling: the rule of what is proposed, the checks of params.yaml, options of one start, the proposals."""

from __future__ import annotations

import itertools
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from tuning_records import LOADS, leg, scaling_json, tune_json

from pipeline.errors import InputError
from pipeline.params import load_params
from pipeline.plan import make_plan
from pipeline.serving import changed
from pipeline.specs import Params
from pipeline.tuning import propose, rank, scaling
from pipeline.tuning.check import check_tuning
from pipeline.tuning.records import fault
from pipeline.tuning.spec import Tuning, Variant

ROOT = Path(__file__).parents[2]
CELL, DIGEST = "toy-135m.int8.vllm.cpu", "d1" * 32
SPEED = st.floats(min_value=0.2, max_value=5.0)


def record(ratios: dict[str, float | None], noise: float | None, errors: int = 0, changes: str = "") -> dict[str, Any]:
    """The part of tune.json that the rule reads."""
    sides = {
        name: {"ratio": {"output_tok_s": r}, "errors": 0 if name == "own" else errors} for name, r in ratios.items()
    }
    variants = {name: {"changes_answers": name == changes} for name in ratios}
    return {"variants": variants, "points": [{"name": "c1", "noise": noise, "sides": {"own": sides["own"], **sides}}]}


def proposed(ratio: float | None, noise: float | None, **more: Any) -> list[str]:
    return [p.variant for p in rank.proposals(record({"own": 1.0, "v": ratio}, noise, **more))]


def test_a_gain_is_proposed_only_past_noise_and_threshold() -> None:
    assert proposed(1.12, 0.01) == ["v"]
    assert proposed(1.01, 0.001) == []  # under the least gain
    assert proposed(1.10, 0.01) == []  # two legs 1% apart at one load: chance gives up to 11%
    assert proposed(1.10, None) == []
    assert proposed(None, 0.01) == []
    assert proposed(1.10, 0.01, errors=1) == []
    assert proposed(0.80, 0.01) == []


def test_beside_one_that_changes_answers_the_best_that_does_not_is_proposed() -> None:
    both = record({"own": 1.0, "v": 1.5, "w": 1.1, "x": 1.05}, 0.001, changes="v")
    assert [p.variant for p in rank.proposals(both)] == ["v", "w"]
    assert [p.variant for p in rank.proposals(record({"own": 1.0, "v": 1.5, "w": 1.1}, 0.001))] == ["v"]
    assert "evaluate it first" in rank.proposals(both)[0].text and "evaluate" not in rank.proposals(both)[1].text


def test_more_variants_ask_for_more_and_loads_do_not_share_their_noise() -> None:
    one = record({"own": 1.0, "v": 1.1}, 0.01)
    load = one["points"][0]
    assert rank.margins(one)["c1"] == pytest.approx(12.7062 * 0.01 / 2**0.5 * 1.5**0.5, rel=1e-4)
    wide = one | {"points": [load | {"sides": load["sides"] | {"w": load["sides"]["v"]}}]}
    assert rank.margins(wide)["c1"] == pytest.approx(25.4517 * 0.01 / 2**0.5 * 1.5**0.5, rel=1e-4)
    noisy = one | {"points": [load, load | {"name": "c256", "noise": 0.2}]}
    assert rank.margins(noisy)["c1"] == rank.margins(one)["c1"]
    assert rank.margins(noisy)["c256"] == pytest.approx(20 * rank.margins(one)["c1"])  # type: ignore[operator]
    assert rank.margins(noisy | {"points": [load | {"name": "c0", "noise": None}]}) == {"c0": None}


@pytest.mark.parametrize(("legs", "sds"), [
    (2, (0.03, 0.03, 0.03)), (2, (0.01, 0.01, 0.06)), (4, (0.03, 0.03, 0.03)), (4, (0.004, 0.02, 0.2)),
])  # fmt: skip
def test_variants_that_change_nothing_are_seldom_proposed(legs: int, sds: tuple[float, ...]) -> None:
    """Five equal variants at three loads, legs so far apart (sd): loads have a false gain in 2.5% of runs."""
    rng = random.Random(1)
    false = 0
    for _ in range(1000):
        points = []
        for name, sd in zip(("c1", "c32", "c96"), sds, strict=True):
            own = [100 * math.exp(rng.gauss(0, sd)) for _ in range(legs)]
            mean = sum(own) / legs
            sides = {f"v{i}": {"ratio": {"output_tok_s": 100 * math.exp(rng.gauss(0, sd)) / mean}, "errors": 0}
                     for i in range(5)}  # fmt: skip
            sides["own"] = {"ratio": {"output_tok_s": 1.0}, "errors": 0}
            points.append({"name": name, "own_tok_s": own, "noise": (max(own) - min(own)) / mean, "sides": sides})
        run = {"points": points, "variants": {f"v{i}": {"changes_answers": False} for i in range(5)}}
        false += len(rank.proposals(run))
    assert false / 3000 < 0.035  # 2.5% are wanted; 3,000 loads


@given(ratio=st.floats(min_value=0.1, max_value=3), noise=st.floats(min_value=0, max_value=0.5))
def test_the_words_of_a_ratio_agree_with_the_rule(ratio: float, noise: float) -> None:
    margin = rank.margins(record({"own": 1.0, "v": ratio}, noise))["c1"]
    assert (rank.judge(ratio, margin) == "faster") == bool(proposed(ratio, noise))


def test_failed_requests_of_the_own_options_prove_no_gain() -> None:
    run = record({"own": 0.8, "v": 1.25}, 0.0)
    assert proposed(1.25, 0.0) == ["v"]
    run["points"][0]["sides"]["own"]["errors"] = 18
    assert rank.margins(run) == {"c1": None} and rank.proposals(run) == []


def test_failed_requests_of_servers_at_once_give_no_efficiency() -> None:
    load = LOADS[1]
    bad = [row | {"error": "503"} for row in leg(1, load)[:3]] + leg(1, load)[3:]
    found = scaling.point(load, 2, [leg(1, load)] * 2, {"0": bad, "1": leg(1, load)}, [leg(2, load)])
    assert found["together"]["errors"] == 3 and found["efficiency"]["cells"] is None
    half = scaling.point(load, 2, [leg(1, load)] * 2, {"0": leg(1, load)}, [[]])
    assert half["efficiency"]["cells"] is None  # the other GPU's leg is not there yet


def test_words_of_a_ratio() -> None:
    asked = ((None, 0.1), (1.1, 0.01, 2), (1.1, None), (0.9, 0.12), (0.985, 0.0), (0.9, 0.0))
    said = [rank.judge(*a) for a in asked]
    assert said == ["not measured", "failed requests", "noise not known", "within noise", "too little", "slower"]


@given(speed=SPEED, scale=SPEED)
def test_ratios_do_not_depend_on_the_unit_of_speed(speed: float, scale: float) -> None:
    load = LOADS[1]
    plain = rank.point(load, {"own": [leg(1, load), leg(1.02, load)], "v": [leg(speed, load)]})
    scaled = rank.point(load, {"own": [leg(scale, load), leg(1.02 * scale, load)], "v": [leg(speed * scale, load)]})
    assert scaled["noise"] == pytest.approx(plain["noise"], rel=1e-3)
    for key in ("output_tok_s", "tpot_ms"):
        assert scaled["sides"]["v"]["ratio"][key] == pytest.approx(plain["sides"]["v"]["ratio"][key], rel=1e-3)
    assert plain["sides"]["own"]["ratio"]["output_tok_s"] == 1
    assert plain["sides"]["v"]["ratio"]["output_tok_s"] == pytest.approx(speed / 1.01, rel=1e-3)


def test_one_own_leg_has_no_noise_and_two_have_their_distance() -> None:
    load = LOADS[0]
    assert rank.point(load, {"own": [leg(1, load)]})["noise"] is None
    assert rank.point(load, {"own": [leg(0.9, load), leg(1.1, load)]})["noise"] == pytest.approx(0.2, rel=1e-3)
    assert rank.point(load, {"own": [leg(0.9, load), leg(1.1, load)]})["own_tok_s"] == pytest.approx([14.4, 17.6])


@given(st.lists(st.text("abc", min_size=1), max_size=9))
def test_own_legs_stand_first_last_and_evenly_between(variants: list[str]) -> None:
    found = rank.order(variants)
    assert [name for name in found if name != "own"] == variants
    at = [i for i, name in enumerate(found) if name == "own"]
    assert len(at) == rank.OWN_LEGS and at[0] == 0 and at[-1] == len(found) - 1
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert max(gaps) - min(gaps) <= 1


def test_a_load_is_judged_by_the_spread_of_its_own_legs() -> None:
    run = record({"own": 1.0, "v": 1.1}, 0.05)
    load = run["points"][0]
    quiet, loud = load | {"own_tok_s": [99, 100, 100, 101]}, load | {"name": "c256", "own_tok_s": [80, 100, 110, 90]}
    found = rank.margins(run | {"points": [quiet, loud]})
    assert found["c1"] == rank.margins(run | {"points": [quiet]})["c1"]
    assert found["c1"] == pytest.approx(3.18245 * (2 / 3) ** 0.5 / 100 * 1.25**0.5, rel=1e-4)
    assert found["c256"] > 0.4  # type: ignore[operator]
    assert [p.point for p in rank.proposals(run | {"points": [quiet, loud]})] == ["c1"]


def test_perfect_scaling_is_one_and_what_is_missing_is_none() -> None:
    load = LOADS[1]
    found = scaling.point(load, 2, [leg(1, load)] * 2, {"0": leg(1, load), "1": leg(1, load)}, [leg(2, load)])
    assert found["efficiency"] == {"cells": pytest.approx(1), "tensor_parallel": pytest.approx(1)}
    assert found["speedup"]["tensor_parallel"]["tpot_ms"] == pytest.approx(0.5)
    half = scaling.point(load, 2, [leg(1, load)] * 2, {"0": leg(1, load), "1": leg(0.5, load)}, [leg(1, load)])
    assert half["efficiency"] == {"cells": pytest.approx(0.75), "tensor_parallel": pytest.approx(0.5)}
    lacks = scaling.point(load, 2, [leg(1, load)], {"0": leg(1, load), "1": []}, [[]])
    assert lacks["efficiency"] == {"cells": None, "tensor_parallel": None} and lacks["together"]["output_tok_s"] is None


def test_a_variant_is_something_and_is_not_called_own() -> None:
    with pytest.raises(ValidationError, match="a variant needs options, variables or a recipe"):
        Variant()
    for name, says in (("own", "is the cell as it is"), ("Bad Name", "should match pattern")):
        with pytest.raises(ValidationError, match=says):
            Tuning.model_validate({"workload": "w", "variants": {name: {"recipe": "fp8"}}})
    with pytest.raises(ValidationError, match="with dashes: max-num-seqs"):
        Variant(options={"max_num_seqs": 4, "stream-interval": 2})
    with pytest.raises(ValidationError, match="with dashes: max-num-seqs"):
        Tuning.model_validate({"workload": "w", "options": {"max_num_seqs": 4}, "variants": {"a": {"recipe": "fp8"}}})
    with pytest.raises(ValidationError, match="at least 1"):
        Tuning.model_validate({"workload": "w", "variants": {}})


TUNED = "llama-8b-random.fp8-dynamic.vllm.h200"


@pytest.mark.parametrize(
    ("cell", "change", "says"),
    [
        ("llama-8b-random.fp8-dynamo.vllm.h100", {}, "fp8-dynamic"),
        (TUNED, {"workload": "tune-512-12"}, "tune-512-128"),
        (TUNED, {"workload": "closed-mixed"}, "is a mix or a soak"),
        (TUNED, {"workload": "soak-512-256"}, "is a mix or a soak"),
        (TUNED, {"variants": {"v": {"recipe": "gptq"}}}, "recipe that is measured there"),
        (TUNED, {"variants": {r: {"recipe": r} for r in ("bf16", "int8-rtn", "fp8", "fp8-block")}}, "can be tried"),
    ],
)  # fmt: skip
def test_each_wrong_entry_is_named(cell: str, change: dict[str, Any], says: str) -> None:
    params = load_params(ROOT / "params.yaml")
    check_tuning(params, "params.yaml")
    entry = {"workload": "tune-512-128", "variants": {"v": {"options": {"a": 1}}}} | change
    wrong = params.model_copy(update={"tuning": {cell: Tuning.model_validate(entry)}})
    assert isinstance(wrong, Params)
    with pytest.raises(InputError, match=re.escape(says)) as error:
        check_tuning(wrong, "params.yaml")
    assert f"params.yaml (tuning.{cell})" in str(error.value)


def test_a_tuned_cell_that_the_matrix_leaves_out_is_no_error() -> None:
    """Who narrows the matrix for a day keeps the rest of params.yaml."""
    params = load_params(ROOT / "params.yaml")
    narrow = params.model_copy(update={"matrix": params.matrix[:1]})
    check_tuning(narrow, "params.yaml")
    assert make_plan(narrow, {})["on_target"]["tune"] == {}
    assert TUNED in make_plan(params, {})["on_target"]["tune"]


def test_options_of_one_start_override_add_and_take_away(tmp_path: Path) -> None:
    serve, log = tmp_path / "serve.yaml", tmp_path / "logs/server.v.log"
    serve.write_text("a: 1\nb: 2\nc: 3\n", encoding="utf-8")
    words = ["python", "--config", serve.as_posix()]
    assert changed(words, serve, {}, log) == words
    file = Path(changed(words, serve, {"a": 9, "b": None, "d": [1, 2]}, log)[-1])
    assert yaml.safe_load(file.read_text(encoding="utf-8")) == {"a": 9, "c": 3, "d": [1, 2]}
    assert file == log.with_suffix(".serve.yaml") and serve.read_text(encoding="utf-8") == "a: 1\nb: 2\nc: 3\n"
    with pytest.raises(InputError, match=r"reads no .*serve\.yaml; its options cannot be tried"):
        changed(["trtllm-serve", "engine"], serve, {"a": 1}, log)


def put(root: Path, data: Any, name: str = "tune", digest: str | None = DIGEST) -> None:
    """Write a cell's record, and the manifest of its package."""
    path = root / f"artifacts/results/{CELL}/{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(data if isinstance(data, str) else json.dumps(data), encoding="utf-8")
    if digest:
        manifest = root / f"artifacts/packages/{CELL}/deploy/manifest.json"
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"checkpoint": {"digest": digest}}), encoding="utf-8")


def test_a_proposal_has_its_measurement_and_the_lines_to_write(tmp_path: Path) -> None:
    speeds = {"short-steps": 1.2, "other-checkpoint": 1.3, "by-variable": 1.0}
    put(tmp_path, tune_json(CELL, DIGEST, speeds))
    said = propose.proposed(tmp_path, ["toy-135m.bf16.vllm.cpu", CELL])
    assert "vllm 0.26.0 on Synthetic GPU, smoke-64-16, every server with kv-cache-memory-bytes 1000" in said
    assert "short-steps: 1.20x tokens/s at c1 (chance gives up to 3.1%)" in said
    assert (
        "other-checkpoint: 1.30x tokens/s at c4 (chance gives up to 3.1%); it changes answers, so evaluate it first"
        in said
    )
    assert "serving:\n          vllm-cpu:\n            max-num-batched-tokens: 2048\n" in said
    assert "take no-enable-prefix-caching out of `serving: vllm-cpu`" in said
    assert "serve cell toy-135m.int4.vllm.cpu instead" in said and "the client limited the load at c1" in said
    assert "the server's front end limited the cell's own options at c4, whatever the precision" in said
    assert "by-variable" not in said and "broken" not in said


def test_variables_have_no_place_in_params(tmp_path: Path) -> None:
    put(tmp_path, tune_json(CELL, DIGEST, {"by-variable": 1.2}))
    assert "start the server with VLLM_X=1 in its environment" in propose.proposed(tmp_path, [CELL])


def test_without_a_gain_or_a_run_nothing_is_proposed(tmp_path: Path) -> None:
    assert propose.proposed(tmp_path, [CELL]) == ""
    put(tmp_path, tune_json(CELL, DIGEST, {"short-steps": 1.01}))
    assert propose.proposed(tmp_path, [CELL]).endswith(propose.NOTHING)


def test_another_checkpoint_makes_a_run_stale(tmp_path: Path) -> None:
    put(tmp_path, tune_json(CELL, DIGEST, {"short-steps": 1.2}), digest="ee" * 32)
    said = propose.proposed(tmp_path, [CELL])
    assert "proposes nothing: stale:" in said and "the package now has eeeeeeeeeeee" in said and "1.20x" not in said
    assert "--model toy-135m --recipe int8 --runtime vllm --target cpu" in said


def test_other_options_or_another_tried_package_make_a_run_stale(tmp_path: Path) -> None:
    deploy = tmp_path / f"artifacts/packages/{CELL}/deploy"
    served = {
        "int8": {"digest": DIGEST, "options": {"max-num-seqs": 16}},
        "int4": {"digest": "aa" * 32, "options": None},
    }
    put(tmp_path, tune_json(CELL, DIGEST, {"short-steps": 1.2}) | {"served": served})
    (deploy / "serve.yaml").write_text("max-num-seqs: 16\n", "utf-8")
    assert "1.20x" in propose.proposed(tmp_path, [CELL])
    (deploy / "serve.yaml").write_text("max-num-seqs: 8\nseed: 0\n", "utf-8")
    said = propose.proposed(tmp_path, [CELL])
    assert "measured on max-num-seqs 16, now 8, seed absent, now 0; tune it again" in said and "1.20x" not in said
    (deploy / "serve.yaml").write_text("max-num-seqs: 16\n", "utf-8")
    other = tmp_path / "artifacts/packages/toy-135m.int4.vllm.cpu/deploy"
    other.mkdir(parents=True)
    (other / "manifest.json").write_text(json.dumps({"checkpoint": {"digest": "bb" * 32}}), "utf-8")
    assert "measured on int4, which it tried, checkpoint aaaaaaaaaaaa, the package now has bbbbbbbbbbbb" in (
        propose.proposed(tmp_path, [CELL])
    )


def drop(data: dict[str, Any], *keys: Any) -> dict[str, Any]:
    """Return a record without what stands under `keys`."""
    node: Any = data
    for key in keys[:-1]:
        node = node[key]
    del node[keys[-1]]
    return data


LACKS: list[tuple[Any, ...]] = [
    ("points",), ("points", 1, "noise"), ("points", 0, "sides", "own"), ("variants",), ("server",), ("host",),
    ("points", 0, "sides", "short-steps", "ratio", "output_tok_s"), ("variants", "short-steps"), ("failed",),
    ("package_digest",),
]  # fmt: skip


@pytest.mark.parametrize("keys", LACKS)
def test_a_partial_run_says_what_it_lacks(tmp_path: Path, keys: tuple[Any, ...]) -> None:
    put(tmp_path, drop(tune_json(CELL, DIGEST, {"short-steps": 1.2}), *keys))
    said = propose.proposed(tmp_path, [CELL])
    assert "tune.json cannot be read: " in said and "1.20x" not in said
    assert str(keys[-1]) in said


@pytest.mark.parametrize("text", ["", "{", "[]", '{"schema": "quantpress.tune/2"}', '{"schema": "quantpress.tune/1"}'])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: str) -> None:
    put(tmp_path, text)
    assert f"artifacts/results/{CELL}/tune.json cannot be read" in propose.proposed(tmp_path, [CELL])


def test_a_record_of_another_cell_is_not_shown() -> None:
    assert fault(tune_json(CELL, DIGEST, {}), CELL) is None
    assert fault(scaling_json(CELL), CELL) is None
    assert "it is of toy-135m.int8.vllm.cpu" in str(fault(scaling_json(CELL), "toy-135m.int4.vllm.cpu"))

"""Which tasks a tier runs, and that items are chosen by nothing but their ids."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import InputError
from pipeline.evidence.tiers import choose, digest, kv_quantized, runs
from pipeline.params import load_params
from pipeline.specs import Params, Recipe

ROOT = Path(__file__).parents[2]


def _params(tier: str, **tasks: dict[str, Any]) -> Params:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    raw["evaluation"] |= {"tier": tier, "tasks": list(tasks)}
    raw["tasks"] = tasks | {"other": {"lm_eval": "mmlu", "hub": True}}
    return Params.model_validate(raw)


INT8 = Recipe(format="int8-w8a8", algorithm="rtn", backend="llmcompressor")


@given(st.lists(st.text(min_size=1), unique=True, min_size=1, max_size=60), st.integers(1, 70), st.randoms())
def test_the_choice_depends_on_the_ids_alone_and_grows(ids: list[str], count: int, rng: random.Random) -> None:
    chosen = {ids[i] for i in choose(ids, count)}
    shuffled = list(ids)
    rng.shuffle(shuffled)
    assert {shuffled[i] for i in choose(shuffled, count)} == chosen
    assert chosen <= {ids[i] for i in choose(ids, count + 1)}
    assert len(chosen) == min(count, len(ids))
    assert digest(list(chosen)) == digest(sorted(chosen))


def test_the_choice_is_not_the_first_items() -> None:
    ids = [f"subject-{i // 100}/{i}" for i in range(1000)]
    subjects = {ids[i].split("/")[0] for i in choose(ids, 100)}
    assert len(subjects) == 10
    assert choose(ids, None) == list(range(1000))


@pytest.mark.parametrize(("tier", "runs_now", "items", "repeats"), [
    ("canary", set(), None, None),
    ("fidelity", set(), None, None),
    ("smoke", {"facts"}, 100, 1),
    ("release", {"facts", "maths"}, None, 1),
])  # fmt: skip
def test_a_tier_runs_its_tasks(tier: str, runs_now: set[str], items: int | None, repeats: int | None) -> None:
    maths = {"lm_eval": "aime25", "tier": "release", "repeats": 8, "temperature": 0.6}
    params = _params(tier, facts={"lm_eval": "qp_facts", "smoke_items": 100}, maths=maths)
    chosen, not_run = runs(params, INT8, {})
    assert set(chosen) == runs_now
    assert set(chosen) | set(not_run) == {"facts", "maths", "other"}
    if "facts" in chosen:
        assert (chosen["facts"].items, chosen["facts"].repeats) == (items, repeats)
    if tier == "release":
        assert (chosen["maths"].items, chosen["maths"].repeats) == (None, 8)
    else:
        assert not_run["maths"] == f"not measured (tier release; evaluation.tier is {tier})"
    assert not_run["other"].startswith("not measured (needs data from the hub")


def test_long_context_runs_only_where_the_cache_is_quantized() -> None:
    params = _params("release", long={"lm_eval": "qp_long", "tier": "release", "when": "kv-cache-quantized"})
    assert "here it is not" in runs(params, INT8, {})[1]["long"]
    assert set(runs(params, INT8, {"kv-cache-dtype": "fp8_e4m3"})[0]) == {"long"}
    assert set(runs(params, INT8.model_copy(update={"kv_cache": "fp8"}), {})[0]) == {"long"}
    assert not kv_quantized(INT8, {"kv-cache-dtype": "auto"})


@pytest.mark.parametrize(("change", "message"), [
    ({"limit": 5}, "unknown key 'tasks.facts.limit'"),
    ({"tier": "nightly"}, "tasks.facts.tier"),
    ({"repeats": 4}, "give a temperature"),
    ({"smoke_item": 4}, "Did you mean 'smoke_items'?"),
    ({"when": "always"}, "tasks.facts.when"),
])  # fmt: skip
def test_a_wrong_task_is_one_sentence(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    raw["tasks"]["facts"] |= change
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        load_params(path)


def test_a_wrong_key_of_the_noise_floor_names_the_nearest(tmp_path: Path) -> None:
    raw = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
    raw["evaluation"]["noise_floor"] = {"item": 100}
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump(raw), encoding="utf-8")
    with pytest.raises(InputError, match="Did you mean 'items'"):
        load_params(path)

"""Power, McNemar, Tango, Holm and the three verdicts, against numbers computed another way."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.stats import binom, norm

from pipeline.evidence import power, verdicts
from pipeline.evidence.items import holm, mcnemar_mid_p, score_bound, score_z
from pipeline.evidence.resample import Estimate, cluster_mean, ratio_of_sums
from pipeline.evidence.verdicts import FAIL, INCONCLUSIVE, PASS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("flips", "margin", "items"), [
    (0.02, 0.01, 1237), (0.05, 0.005, 12366), (0.05, 0.01, 3092), (0.05, 0.02, 773),
    (0.10, 0.03, 687), (0.15, 0.05, 371),
])  # fmt: skip
def test_items_needed_is_the_normal_approximation(flips: float, margin: float, items: int) -> None:
    assert power.items_needed(flips, margin) == items
    assert power.smallest_damage(items, flips) == pytest.approx(margin, rel=2e-3)


def test_the_promised_power_is_reached_and_half_the_items_do_not_reach_it() -> None:
    rng = np.random.default_rng(0)
    share = {}
    for items in (3092, 1546):
        rows = rng.multinomial(items, [0.025, 0.025, 0.95], size=2000)
        found = [verdicts.of_items(items, int(b), int(c), 0.01).p_pass <= 0.05 for b, c, _ in rows]
        share[items] = float(np.mean(found))
    assert share[3092] == pytest.approx(0.80, abs=0.03)
    assert share[1546] < 0.6


@pytest.mark.parametrize(("worse", "better"), [(0, 0), (3, 3), (5, 2), (2, 5), (20, 8), (0, 7)])
def test_mid_p_is_exact_p_less_half_the_point(worse: int, better: int) -> None:
    flips, less = worse + better, min(worse, better)
    tail = sum(math.comb(flips, k) for k in range(less)) / 2**flips
    expected = min(1.0, 2 * (tail + 0.5 * math.comb(flips, less) / 2**flips))
    assert mcnemar_mid_p(worse, better) == pytest.approx(expected)


@pytest.mark.parametrize(("items", "worse", "better", "damage"), [
    (400, 13, 9, 0.02), (400, 44, 8, 0.02), (50, 0, 3, 0.1), (200, 7, 0, 0.01), (1319, 30, 31, 0.005),
])  # fmt: skip
def test_the_score_statistic_uses_the_constrained_maximum_likelihood(
    items: int, worse: int, better: int, damage: float
) -> None:
    """The closed form of the rarer cell against a numerical maximum of the trinomial likelihood."""
    same = items - worse - better

    def loss(rare: float) -> float:
        cells = (rare + damage, rare, 1 - 2 * rare - damage)
        return -sum(n * math.log(max(p, 1e-300)) for n, p in zip((worse, better, same), cells, strict=True))

    rare = minimize_scalar(loss, bounds=(0, (1 - damage) / 2), method="bounded", options={"xatol": 1e-12}).x
    expected = (worse - better - items * damage) / math.sqrt(items * (2 * rare + damage * (1 - damage)))
    assert score_z(items, worse, better, damage) == pytest.approx(expected, abs=1e-4)


@settings(max_examples=80, deadline=None)
@given(st.integers(5, 2000), st.floats(0, 1), st.floats(0, 1), st.sampled_from([0.05, 0.5, 0.95, 0.975]))
def test_the_bound_is_where_the_statistic_says_so(items: int, a: float, b: float, level: float) -> None:
    worse = int(a * items)
    better = int(b * (items - worse))
    bound = score_bound(items, worse, better, level)
    assert -1 <= bound <= 1
    wider = score_bound(items, worse, better, 0.99)
    assert level >= 0.99 or wider >= bound - 1e-9
    if -0.999 < bound < 0.999:
        assert norm.cdf(score_z(items, worse, better, bound)) == pytest.approx(1 - level, abs=1e-4)


def test_the_score_interval_is_the_same_seen_from_the_other_model() -> None:
    low, high = score_bound(50, 1, 8, 0.025), score_bound(50, 1, 8, 0.975)
    assert low < -0.14 < high < 0
    assert score_bound(50, 8, 1, 0.025) == pytest.approx(-high, abs=1e-6)


def test_no_flip_at_all_is_no_proof_in_a_small_sample() -> None:
    assert verdicts.judge({"t": verdicts.of_items(40, 0, 0, 0.02)})["t"]["verdict"] == INCONCLUSIVE
    found = verdicts.judge({"t": verdicts.of_items(400, 0, 0, 0.02)})["t"]
    assert found["verdict"] == PASS
    assert found["detectable"] > 0


def test_clear_damage_fails_and_equal_answers_of_few_items_are_inconclusive() -> None:
    made = {
        "broken": verdicts.of_items(400, 44, 8, 0.02),
        "equal": verdicts.of_items(400, 11, 11, 0.02),
        "sound": verdicts.of_items(4000, 110, 110, 0.02),
    }
    found = verdicts.judge(made)
    assert [found[k]["verdict"] for k in made] == [FAIL, INCONCLUSIVE, PASS]
    assert found["equal"]["needed"] > 400
    assert found["equal"]["detectable"] == pytest.approx(0.0296, abs=0.001)
    assert found["equal"]["fails_from"] == pytest.approx(0.02 + found["equal"]["detectable"] + 0.5 / 400)


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_between_the_raw_and_the_bonferroni_value_and_keeps_the_order(p: dict[str, float]) -> None:
    found = holm(p)
    assert list(found) == list(p)
    assert all(p[k] <= found[k] <= min(1.0, p[k] * len(p)) + 1e-12 for k in p)
    ordered = sorted(p, key=lambda k: p[k])
    assert all(found[a] <= found[b] + 1e-12 for a, b in itertools.pairwise(ordered))


def test_many_blocking_tasks_raise_the_bar_for_fail() -> None:
    one = verdicts.of_items(400, 31, 9, 0.02)
    assert verdicts.judge({"a": one})["a"]["verdict"] == FAIL
    sound = {str(i): verdicts.of_items(400, 10, 10, 0.02) for i in range(20)}
    assert verdicts.judge({"a": one, **sound})["a"]["verdict"] == INCONCLUSIVE


def test_a_mean_over_few_windows_or_without_spread_gives_no_test() -> None:
    assert verdicts.of_mean(Estimate(0.0, 0.001, 7), 0.1, "windows") is None
    assert verdicts.of_mean(Estimate(0.0, None, 1), 0.1, "windows") is None
    assert verdicts.of_mean(Estimate(float("nan"), 0.1, 20), 0.1, "windows") is None
    still = verdicts.of_mean(Estimate(0.0, 0.0, 64), 0.1, "windows")
    assert still is not None
    assert verdicts.judge({"k": still})["k"]["verdict"] == PASS


def test_a_mean_is_judged_by_its_bound() -> None:
    near = verdicts.of_mean(Estimate(0.045, 0.004, 64), 0.05, "windows")
    far = verdicts.of_mean(Estimate(0.030, 0.004, 64), 0.05, "windows")
    over = verdicts.of_mean(Estimate(0.060, 0.004, 64), 0.05, "windows")
    assert near and far and over
    found = verdicts.judge({"near": near, "far": far, "over": over})
    assert [v["verdict"] for v in found.values()] == [INCONCLUSIVE, PASS, FAIL]
    assert near.needed_as_seen and near.needed_as_seen > 64


def test_the_cluster_bootstrap_agrees_with_the_textbook_error_and_is_seeded() -> None:
    rng = np.random.default_rng(4)
    values = rng.normal(size=200)
    found = cluster_mean(values, np.arange(200))
    assert found.se == pytest.approx(values.std(ddof=1) / math.sqrt(200), rel=0.03)
    assert found == cluster_mean(values, np.arange(200))
    assert found != cluster_mean(values, np.arange(200), seed=1)
    assert cluster_mean(np.ones(5), np.arange(5)).se == 0
    assert cluster_mean(np.ones(5), np.zeros(5)).se is None


def test_repeats_of_one_question_do_not_count_as_more_questions() -> None:
    rng = np.random.default_rng(5)
    once = rng.normal(size=60)
    eight = np.repeat(once, 8)
    assert cluster_mean(eight, np.repeat(np.arange(60), 8)).se == pytest.approx(cluster_mean(once, np.arange(60)).se)


def test_the_interval_of_a_ratio_covers_it_at_the_promised_rate() -> None:
    rng = np.random.default_rng(6)
    hits = 0
    for seed in range(60):
        below = rng.gamma(4, 10, size=24)
        above = below * np.exp(rng.normal(0.1, 0.3, size=24))
        found = ratio_of_sums(above, below, seed, log=True).interval()
        assert found
        hits += found[0] <= 0.1 + 0.3**2 / 2 <= found[1]
    assert hits >= binom.ppf(0.01, 60, 0.95)


def _power(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline", "power", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_power_answers_in_words_and_as_json() -> None:
    assert "3,092 items" in _power("--flips", "0.05", "--margin", "0.01").stdout
    found = json.loads(_power("--flips", "0.05", "--margin", "0.01", "--json").stdout)
    assert found["items"] == 3092
    assert found["alpha_one_sided"] == 0.05
    small = json.loads(_power("--flips", "0.05", "--margin", "0.01", "--items", "400", "--json").stdout)
    assert small["smallest_damage"] == pytest.approx(0.0278, abs=1e-4)


@pytest.mark.parametrize(("arguments", "message"), [
    (["--flips", "5", "--margin", "0.01"], "For 5% write 0.05"),
    (["--flips", "nan", "--margin", "0.01"], "a share between 0 and 1"),
    (["--flips", "0.05", "--margin", "0"], "--margin is a share"),
    (["--flips", "0.05", "--margin", "0.01", "--damage", "0.01"], "nothing to pass"),
    (["--flips", "0.01", "--margin", "0.05", "--damage", "0.03"], "more than --flips"),
    (["--flips", "0.05", "--margin", "0.01", "--power", "0.01"], "--alpha must be below"),
    (["--flips", "0.05", "--margin", "0.01", "--items", "0"], "at least 1"),
    (["--flips", "0.05", "--margin", "1e-9"], "too near the margin"),
    (["--flips", "x", "--margin", "0.01"], "invalid float value"),
])  # fmt: skip
def test_power_says_what_is_wrong_with_its_arguments(arguments: list[str], message: str) -> None:
    done = _power(*arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr

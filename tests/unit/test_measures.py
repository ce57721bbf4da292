"""The arithmetic of measures: fidelity, paired accuracy, the canary."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.canary import fault, judge
from pipeline.fidelity import Logprobs, bootstrap_by_window, bucketed_kl, perplexity, summarize
from pipeline.paired import compare_items

VOCAB, K = 40, 8


def _top_k(probabilities: np.ndarray, k: int = K) -> Logprobs:
    """Cut full distributions `[n, vocab]` to what a server would return."""
    order = np.argsort(-probabilities, axis=1, kind="stable")[:, :k]
    logs = np.log(np.take_along_axis(probabilities, order, axis=1))
    n = len(probabilities)
    return Logprobs(order, logs, np.log(probabilities[:, 0]), np.arange(n) // 4)


def _distributions(weights: np.ndarray) -> np.ndarray:
    shifted = np.exp(weights)
    return shifted / shifted.sum(axis=1, keepdims=True)


logits = arrays(np.float64, (6, VOCAB), elements=st.floats(-6, 6))


@settings(max_examples=60, deadline=None)
@given(logits, logits)
def test_bucketed_kl_is_a_lower_bound_of_the_true_kl(a: np.ndarray, b: np.ndarray) -> None:
    p, q = _distributions(a), _distributions(b)
    true = (p * np.log(p / q)).sum(axis=1)
    bound = bucketed_kl(_top_k(p), _top_k(q))
    assert (bound >= 0).all()
    assert (bound <= true + 1e-6).all()


@given(logits)
def test_kl_of_a_run_with_itself_is_zero_and_everything_agrees(a: np.ndarray) -> None:
    run = _top_k(_distributions(a))
    found = summarize(run, run, K)
    assert found["kl_max"] == pytest.approx(0, abs=1e-9)
    assert found["top1_agreement_pct"] == 100
    assert found["perplexity_ratio"] == pytest.approx(1)


def test_kl_with_all_tokens_kept_is_the_true_kl() -> None:
    rng = np.random.default_rng(1)
    p, q = _distributions(rng.normal(size=(5, VOCAB))), _distributions(rng.normal(size=(5, VOCAB)))
    true = (p * np.log(p / q)).sum(axis=1)
    assert bucketed_kl(_top_k(p, VOCAB), _top_k(q, VOCAB)) == pytest.approx(true, rel=1e-6)


def test_a_reordered_candidate_is_paired_by_token_id_not_by_rank() -> None:
    p = np.array([[0.6, 0.3, 0.1]])
    q = np.array([[0.3, 0.6, 0.1]])
    expected = 0.6 * math.log(2) + 0.3 * math.log(0.5)
    assert bucketed_kl(_top_k(p, 2), _top_k(q, 2))[0] == pytest.approx(expected)


def test_perplexity_of_a_uniform_model_is_the_vocabulary() -> None:
    assert perplexity(np.full(10, -math.log(VOCAB))) == pytest.approx(VOCAB)


def test_runs_over_different_text_are_refused() -> None:
    rng = np.random.default_rng(0)
    one, two = (
        _top_k(_distributions(rng.normal(size=(8, VOCAB)))),
        _top_k(_distributions(rng.normal(size=(6, VOCAB)))),
    )
    with pytest.raises(ValueError, match="not read on the same text: 8 against 6"):
        summarize(one, two, K)


def test_the_interval_is_wider_when_windows_differ_than_when_positions_do() -> None:
    rng = np.random.default_rng(3)
    window = np.repeat(np.arange(20), 50)
    by_window = rng.normal(size=20)[window]
    mixed = rng.permutation(by_window)
    wide, narrow = bootstrap_by_window(by_window, window), bootstrap_by_window(mixed, window)
    assert wide[1] - wide[0] > 3 * (narrow[1] - narrow[0])


def test_paired_accuracy_counts_flips_in_each_direction() -> None:
    base = {str(i): float(i < 60) for i in range(100)}
    cand = dict(base) | {"0": 0.0, "1": 0.0, "99": 1.0}
    found = compare_items(base, cand)
    assert (found["flips_right_to_wrong"], found["flips_wrong_to_right"]) == (2, 1)
    assert found["delta_pp"] == pytest.approx(-1.0)
    assert found["recovery_pct"] == pytest.approx(100 * 59 / 60)
    low, high = found["delta_pp_ci95"]
    assert low < -1 < high


def test_other_items_are_refused() -> None:
    with pytest.raises(ValueError, match="different items: 2 differ"):
        compare_items({"a": 1.0, "b": 0.0}, {"a": 1.0, "c": 0.0})


@pytest.mark.parametrize(("text", "reason"), [
    ("", "empty"),
    ("the sea " * 30, "repeated"),
    ("the " * 11, "repeated"),
    ("a" * 40, "repeated"),
    ("日本語の文章です、これは英語ではありません", "not English"),
])  # fmt: skip
def test_canary_sees_broken_text(text: str, reason: str) -> None:
    assert (fault(text) or "").startswith(reason)


def test_canary_passes_sound_text_and_needs_two_known_answers() -> None:
    prompts = [{"id": str(i), "prompt": "?", "max_tokens": 8, "known_answers": ["Paris"]} for i in range(3)]
    good = [{"text": "It is Paris.", "finish_reason": "stop"}] * 3
    assert judge(prompts, good)["passed"]
    wrong = [good[0], *[{"text": "It is Rome, comparison.", "finish_reason": "stop"}] * 2]
    found = judge(prompts, wrong)
    assert not found["passed"]
    assert found["failures"][-1]["reason"] == "only 1 of 3 known answers are right"


def test_canary_fails_when_nothing_ever_ends() -> None:
    prompts = [{"id": "a", "prompt": "?", "max_tokens": 8}]
    found = judge(prompts, [{"text": "on and on", "finish_reason": "length"}])
    assert found["failures"][0]["reason"].startswith("endless")


def test_canary_fails_when_all_but_one_answer_run_on() -> None:
    prompts = [{"id": str(i), "prompt": "?", "max_tokens": 8} for i in range(24)]
    answers = [{"text": "The sea is wide and blue.", "finish_reason": "length"}] * 23
    found = judge(prompts, [*answers, {"text": "It ends.", "finish_reason": "stop"}])
    assert found["failures"][0]["reason"] == "endless: 1 answers ended by themselves"


def test_one_item_has_no_interval_and_no_nan() -> None:
    found = compare_items({"a": 1.0}, {"a": 0.0})
    assert found["delta_pp_ci95"] is None
    assert found["stderr"] is None

"""The arithmetic of measures: fidelity, paired accuracy, the canary."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.canary import fault, judge, of_canary
from pipeline.evidence.answers import Answer, compare_answers
from pipeline.evidence.resample import cluster_mean
from pipeline.fidelity import Logprobs, bucketed_kl, perplexity, summarize
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
    wide, narrow = cluster_mean(by_window, window), cluster_mean(mixed, window)
    assert wide.se and narrow.se
    assert wide.se > 3 * narrow.se


def test_paired_accuracy_counts_flips_in_each_direction() -> None:
    base = {str(i): float(i < 60) for i in range(100)}
    cand = dict(base) | {"0": 0.0, "1": 0.0, "99": 1.0}
    found = compare_items(base, cand)
    assert (found["flips_right_to_wrong"], found["flips_wrong_to_right"]) == (2, 1)
    assert found["delta_pp"] == pytest.approx(-1.0)
    assert found["recovery_pct"] == pytest.approx(100 * 59 / 60)
    low, high = found["delta_pp_ci95"]
    assert low < -1 < high


def test_a_binary_comparison_carries_mcnemar_and_the_score_interval() -> None:
    base = {str(i): 1.0 for i in range(100)}
    found = compare_items(base, base | {"0": 0.0, "1": 0.0, "2": 0.0})
    assert found["binary"]
    assert found["mcnemar_mid_p"] == pytest.approx(2 * (0.5 * 0.5**3))
    assert found["flips_pct"] == 3
    low, high = found["delta_pp_ci95"]
    # Zero is inside, as the p-value of 0.125 says, and the interval is not symmetric: nothing was won.
    assert low == pytest.approx(-8.45, abs=0.1)
    assert 0 < high < 1


def test_equal_answers_still_have_an_interval_with_a_width() -> None:
    base = {str(i): float(i % 2) for i in range(400)}
    low, high = compare_items(base, base)["delta_pp_ci95"]
    assert low == pytest.approx(-high)
    assert 0.5 < high < 1.5


def test_fractions_are_compared_by_a_bootstrap_over_items() -> None:
    rng = np.random.default_rng(8)
    base = {str(i): float(x) for i, x in enumerate(rng.uniform(0, 1, 200))}
    found = compare_items(base, {key: value - 0.1 for key, value in base.items()})
    assert not found["binary"]
    assert found["mcnemar_mid_p"] is None
    assert found["delta_pp"] == pytest.approx(-10)
    assert found["delta_pp_se"] == pytest.approx(0, abs=1e-9)
    noisy = compare_items(base, {key: value + float(rng.normal(0, 0.2)) for key, value in base.items()})
    assert noisy["delta_pp_se"] == pytest.approx(20 / math.sqrt(200), rel=0.15)


def test_no_items_is_an_error() -> None:
    with pytest.raises(ValueError, match="no item was answered"):
        compare_items(None, {})


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


def test_another_chat_template_is_seen_by_the_lengths_of_the_prompts() -> None:
    prompts = [{"id": str(i), "prompt": "?", "max_tokens": 8} for i in range(4)]
    mine = [{"text": "Fine, thanks.", "finish_reason": "stop", "tokens": 4, "prompt_tokens": 31}] * 4
    theirs = of_canary(prompts, mine)
    assert judge(prompts, mine, theirs)["passed"]
    swapped = [*mine[:3], mine[3] | {"prompt_tokens": 24}]
    found = judge(prompts, swapped, theirs)
    assert not found["passed"]
    assert found["failures"][0]["reason"].startswith("another chat template or tokenizer: 1 prompts")
    assert judge(prompts, [a | {"prompt_tokens": None} for a in mine], theirs)["passed"]


def test_lengths_and_faults_of_answers_are_counted() -> None:
    prompts = [{"id": str(i), "prompt": "?", "max_tokens": 8} for i in range(3)]
    texts = [("", "stop", 0), ("ha " * 20, "length", 8), ("Fine, thanks.", "stop", 4)]
    answers = [{"text": t, "finish_reason": f, "tokens": n, "prompt_tokens": 9} for t, f, n in texts]
    found = judge(prompts, answers)["lengths"]
    assert (found["empty"], found["repeated"], found["cut"], found["tokens_mean"]) == (1, 1, 1, 4)
    assert found["length_ratio"] is None


def test_the_length_ratio_is_of_the_same_prompts_with_an_interval() -> None:
    rng = np.random.default_rng(2)
    base = [Answer(str(i), int(n), False, False, False, False) for i, n in enumerate(rng.integers(50, 150, 60))]
    longer = [a._replace(tokens=int(a.tokens * 1.2 + rng.integers(-5, 6))) for a in base]
    found = compare_answers(base, longer)
    low, high = found["length_ratio_ci95"]
    assert low < 1.2 < high < 1.25
    with pytest.raises(ValueError, match="different prompts"):
        compare_answers(base, longer[1:])


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

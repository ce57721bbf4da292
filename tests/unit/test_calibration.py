"""Frozen token sets: exact rows, no held-out text, templates first, the same for the same seed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.calibration import OVERLAP_TOKENS, draw_rows, make_card, paragraphs, runs
from pipeline.errors import InputError
from pipeline.specs import CalibSet

TEMPLATE = list(range(9000, 9000 + OVERLAP_TOKENS + 6))


def _spec(**changes: object) -> CalibSet:
    base = {"sources": ["stdlib:x"], "samples": 8, "tokens_per_sample": 64, "license": "x", "seed": 1}
    return CalibSet.model_validate(base | changes)


def _documents(count: int, length: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(8000) for _ in range(length)] for _ in range(count)]


@given(st.integers(0, 50), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_rows_are_exact_and_repeatable(seed: int, share: float) -> None:
    plain = _documents(8, 400)
    chat = [TEMPLATE + d for d in plain]
    spec = _spec(seed=seed, chat_share=share)
    rows, _ = draw_rows(plain, chat, spec, [])
    assert len(rows) == 8
    assert {len(r) for r in rows} == {64}
    assert len({tuple(r) for r in rows}) == 8
    assert sum(row[:3] == TEMPLATE[:3] for row in rows) == min(round(8 * share), 4 if share < 1 else 8)
    assert draw_rows(plain, chat, spec, [])[0] == rows


def test_windows_that_share_text_with_the_held_out_set_are_left_out() -> None:
    plain = _documents(8, 640)
    spec = _spec(chat_share=0.0)
    held_out = [plain[2][70:170]]
    rows, dropped = draw_rows(plain, [], spec, held_out)
    banned = {run for row in held_out for run in runs(row)}
    assert dropped == 2
    assert all(banned.isdisjoint(runs(row)) for row in rows)


def test_a_shared_chat_template_is_not_shared_text() -> None:
    plain = _documents(8, 400)
    chat = [TEMPLATE + d for d in plain]
    rows, dropped = draw_rows(plain, chat, _spec(chat_share=1.0), [TEMPLATE + _documents(1, 60, seed=9)[0]])
    assert dropped == 0
    assert len(rows) == 8


def test_too_little_text_is_an_error_with_the_numbers() -> None:
    with pytest.raises(InputError, match="give 1 plain and 0 chat rows of 64 tokens; 8 and 0 are wanted"):
        draw_rows(_documents(1, 100), [], _spec(), [])


def test_an_empty_document_list_is_an_error() -> None:
    with pytest.raises(InputError, match="give 0 plain"):
        draw_rows([], [], _spec(), [])


def test_the_card_warns_of_few_samples_and_of_no_template() -> None:
    rows = _documents(8, 64)
    card = make_card("s", "m", _spec(), rows, {"x": "1"}, template=False)
    assert card["warnings"] == ["8 samples, fewer than the usual 128", "no row went through a chat template"]
    assert card["tokens"] == 8 * 64
    assert make_card("s", "m", _spec(split="held-out"), rows, {}, template=False)["warnings"] == []


def test_markup_is_dropped_and_prose_is_joined() -> None:
    text = "Title\n=====\n\nA first line of a paragraph that is\nbroken over two lines.\n\n.. note:: x\n\n+---+\n"
    assert paragraphs(text) == "A first line of a paragraph that is broken over two lines."

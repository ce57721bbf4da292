"""The verdicts are tested themselves: how often they are wrong, and how often planted damage is found.

The runs of a real checkpoint are recorded by tests/calibration/planted.py; here they are judged again by today's code.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import binom

from pipeline.evidence.power import ALPHA, POWER
from tests.calibration import rates

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    """The recorded runs."""
    return rates.recorded()


def most(nominal: float, draws: int) -> float:
    """The highest share that chance alone gives in 99.9% of cases."""
    return float(binom.ppf(0.999, draws, nominal)) / draws


@pytest.mark.parametrize("share", [0.02, 0.05, 0.10])
@pytest.mark.parametrize("items", [200, 400, 3000])
def test_without_damage_fail_is_rarer_than_its_level(items: int, share: float) -> None:
    for margin in rates.MARGINS:
        assert rates.simulated(items, share, 0.0, margin)["fail"] <= most(ALPHA, rates.SIMULATED)


@pytest.mark.parametrize(("items", "share", "margin"), [
    (100, 0.05, 0.03), (200, 0.02, 0.01), (400, 0.05, 0.03), (400, 0.02, 0.02), (1000, 0.10, 0.03),
])  # fmt: skip
def test_even_damage_of_exactly_the_margin_fails_no_more_than_its_level(
    items: int, share: float, margin: float
) -> None:
    found = rates.simulated(items, share, margin, margin, seed=4)
    assert found["fail"] <= most(ALPHA, rates.SIMULATED)
    # PASS there is false too. It has no correction, so that the power statement holds: up to 6% with few flips.
    assert found["pass"] <= most(0.06, rates.SIMULATED)


def test_the_correction_for_continuity_is_needed() -> None:
    """Plant the fault: without it, few flips fail too often."""
    rng = np.random.default_rng(5)
    rows = rng.multinomial(100, [0.04, 0.01, 0.95], size=4000)
    plain = [rates.norm.sf(rates.score_z(100, int(b), int(c), 0.03)) <= ALPHA for b, c, _ in rows]
    assert np.mean(plain) > 0.08
    assert rates.fail_rate(100, rows, 0.03) <= most(ALPHA, 4000)


@pytest.mark.parametrize("windows", [8, 16, 64])
def test_means_over_windows_keep_their_level_and_reach_their_power(windows: int) -> None:
    assert rates.window_rates(0.0, windows) <= most(ALPHA, rates.SIMULATED)
    factor = rates.t.isf(ALPHA, windows - 1) + rates.t.ppf(POWER, windows - 1)
    assert rates.window_rates(float(factor), windows) >= POWER - 0.04


def test_a_real_checkpoint_against_itself_does_not_fail(record: dict[str, Any]) -> None:
    runs = rates.real_aa(record)
    assert len(runs) >= 20
    # Another order of additions is not the same run again: each differs from the base in its distributions.
    assert sum(run["kl_mean"] > 0 for run in runs) >= 19
    failed = sum(bool(run["fails"]) or run["perplexity_fails"] for run in runs)
    assert failed <= binom.ppf(0.95, len(runs), ALPHA)


def test_planted_damage_is_found_from_the_promised_size_at_the_promised_rate(record: dict[str, Any]) -> None:
    beyond = [row for row in rates.found_rates(record) if row["damage"] >= row["promised"]]
    assert len(beyond) >= 20
    assert {row["kind"] for row in beyond} >= {"noise", "scale"}
    slack = 3.1 * math.sqrt(POWER * (1 - POWER) / rates.DRAWS)
    assert min(row["fail"] for row in beyond) >= POWER - slack


def test_every_broken_checkpoint_is_seen_and_the_sound_one_is_not(record: dict[str, Any]) -> None:
    rows = rates.whole(record)
    broken = [row for row in rows if row["kind"] in ("zeroed", "scale")]
    assert len(broken) >= 5
    for row in rows:
        if row["kind"] == "none":
            assert not row["task_fails"]
            assert row["perplexity_passes"]
        if row["damage_pp"] >= row["fails_from_pp"]:
            assert row["task_fails"] or row["perplexity_fails"], row["name"]
    assert all(row["task_fails"] or row["perplexity_fails"] for row in broken)


def test_a_swapped_chat_template_fails_the_canary(record: dict[str, Any]) -> None:
    assert record["template"]["own"]["passed"]
    assert not record["template"]["swapped"]["passed"]
    assert record["template"]["swapped"]["prompt_tokens_differ"] > 0


def test_the_page_shows_what_the_code_gives(record: dict[str, Any]) -> None:
    shown = json.loads((DOCS / "verdict-calibration.json").read_text(encoding="utf-8"))
    assert shown["whole"] == json.loads(json.dumps(rates.whole(record)))
    assert shown["real_aa"] == json.loads(json.dumps(rates.real_aa(record)))

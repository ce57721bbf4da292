"""Two load generators on one server: how each one's numbers are read, and when they agree."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from pipeline.errors import WorkError
from pipeline.speed import instruments
from pipeline.speed.workloads import Point, Workload

WORKLOAD = Workload(prompt_tokens=128, output_tokens=4, points=[Point(concurrency=2, requests=2, warmup=1)])
POINT = WORKLOAD.points[0]
# As `vllm bench serve` 0.26 writes it, shortened.
RESULT: dict[str, Any] = {
    "completed": 2, "total_output_tokens": 8, "output_throughput": 8.0, "mean_ttft_ms": 100.0, "median_ttft_ms": 100.0,
    "mean_tpot_ms": 200.0, "median_tpot_ms": 200.0,
}  # fmt: skip


def _row(start_s: float, end_s: float, **more: Any) -> dict[str, Any]:
    fixed = {"output_tokens": 4, "ttft_ms": 100.0, "tpot_ms": 200.0, "error": None}
    return fixed | {"start_ns": int(start_s * 1e9), "end_ns": int(end_s * 1e9)} | more


def test_ours_counts_the_whole_run_as_theirs_does() -> None:
    found = instruments.ours([_row(0, 0.7), _row(0.1, 1.0)])
    assert found["output_tok_s"] == 8.0
    assert found == instruments.theirs(RESULT, POINT, WORKLOAD)


def test_a_failed_request_is_no_measurement() -> None:
    with pytest.raises(WorkError, match="1 of 2 requests failed"):
        instruments.ours([_row(0, 1), _row(0, 1, error="timeout")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"completed": 1}, "completed 1 of 2 requests"),
        ({"total_output_tokens": 7}, "7 of 8 tokens"),
        ({"output_throughput": None}, "no output_throughput"),
    ],
)
def test_what_is_not_whole_is_refused(change: dict[str, Any], message: str) -> None:
    result = {k: v for k, v in (RESULT | change).items() if v is not None}
    with pytest.raises(WorkError, match=message):
        instruments.theirs(result, POINT, WORKLOAD)


def test_agreement_is_within_five_percent_and_shows_the_spread() -> None:
    def leg(speed: float) -> dict[str, float]:
        return dict.fromkeys(instruments.FIELDS, 10.0) | {"output_tok_s": speed}

    found = instruments.agreement([leg(100), leg(104)], [leg(98), leg(98)])
    assert found["output_tok_s"] == {
        "ours": 102, "theirs": 98, "ratio": 1.0408, "spread": 0.0392, "within_5_percent": True,
    }  # fmt: skip
    assert not instruments.agreement([leg(106)], [leg(100)])["output_tok_s"]["within_5_percent"]


def test_the_other_client_gets_the_same_load() -> None:
    words = instruments.command("http://x", "m", "artifacts/models/m", WORKLOAD, POINT, 3, "o.json")
    pairs = dict(pairwise(words))
    assert (pairs["--random-input-len"], pairs["--random-output-len"]) == ("128", "4")
    assert (pairs["--num-prompts"], pairs["--max-concurrency"], pairs["--seed"]) == ("2", "2", "3")
    assert "--ignore-eos" in words

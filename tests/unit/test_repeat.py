"""Intervals of speed ratios come from whole legs: how far they repeat, and what no spread is known of."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.evidence.repeat import NO_SPREAD, leg_marks, read_bench, spread, widened
from pipeline.report.sources import Doc

ROOT = Path(__file__).parents[2]
RATES = st.lists(st.floats(min_value=1, max_value=1e5), min_size=2, max_size=6)


def bench(cell: str, baseline: list[float], candidate: list[float], is_baseline: bool = False) -> dict[str, Any]:
    """A bench.json of one load whose legs made so many tokens/s."""
    point = {
        "name": "c4", "concurrency": 4, "candidate": {"repeats": {"output_tok_s": candidate}},
        "baseline": {"repeats": {"output_tok_s": baseline}},
        "ratio": {"output_tok_s": float(np.mean(candidate) / np.mean(baseline))},
        "ratio_ci95": {"output_tok_s": [1.19, 1.21]},
    }  # fmt: skip
    return {
        "schema": "quantpress.bench/1", "cell": cell, "baseline": "m.bf16.vllm.cpu", "is_baseline": is_baseline,
        "server": {"baseline": {"version": "1"}}, "client": {"tool": "t"}, "host": {"cpu": "c", "cores": 2},
        "workloads": {"w": {"points": [point]}},
    }  # fmt: skip


def put(root: Path, cell: str, record: dict[str, Any], csv: str = "") -> None:
    folder = root / "artifacts/results" / cell
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(record), encoding="utf-8")
    if csv:
        (folder / "requests.csv").write_text(csv, encoding="utf-8")


def point(root: Path, cell: str) -> dict[str, Any]:
    return dict(read_bench(root, cell).items("workloads", "w", "points")[0])


def test_one_leg_in_one_run_has_no_interval(tmp_path: Path) -> None:
    put(tmp_path, "m.int8.vllm.cpu", bench("m.int8.vllm.cpu", [100.0], [120.0]))
    found = point(tmp_path, "m.int8.vllm.cpu")
    assert found["ratio_ci95"]["output_tok_s"] is None
    assert found["repeats"]["not_measured"]["output_tok_s"] == NO_SPREAD


def test_the_baseline_of_other_runs_says_how_far_one_leg_repeats(tmp_path: Path) -> None:
    put(tmp_path, "m.int8.vllm.cpu", bench("m.int8.vllm.cpu", [100.0], [120.0]))
    put(tmp_path, "m.int4.vllm.cpu", bench("m.int4.vllm.cpu", [104.0], [60.0]))
    put(tmp_path, "m.gptq.vllm.cpu", bench("m.gptq.vllm.cpu", [96.0], [60.0]))
    found = point(tmp_path, "m.int8.vllm.cpu")
    low, high = found["ratio_ci95"]["output_tok_s"]
    sd = float(np.std(np.log([100.0, 104.0, 96.0]), ddof=1))
    factor = math.exp(4.302653 * sd * 2**0.5)  # Student's t of 2 degrees, 97.5%
    assert (low, high) == pytest.approx((1.2 / factor, 1.2 * factor))
    assert found["repeats"]["output_tok_s"] | {"sd_pct": 0, "noise_pct": 0} == {
        "sd_pct": 0, "noise_pct": 0, "df": 2, "legs": 3, "runs": 3,
    }  # fmt: skip


@pytest.mark.parametrize("other", [
    {"server": {"baseline": {"version": "2"}}}, {"client": {"tool": "u"}}, {"host": {"cpu": "d", "cores": 2}},
    {"baseline": "n.bf16.vllm.cpu"}, {"schema": "other"},
])  # fmt: skip
def test_a_run_of_another_kind_does_not_count(tmp_path: Path, other: dict[str, Any]) -> None:
    put(tmp_path, "m.int8.vllm.cpu", bench("m.int8.vllm.cpu", [100.0], [120.0]))
    put(tmp_path, "m.int4.vllm.cpu", bench("m.int4.vllm.cpu", [50.0], [60.0]) | other)
    assert point(tmp_path, "m.int8.vllm.cpu")["ratio_ci95"]["output_tok_s"] is None


def test_the_baseline_against_itself_counts_with_both_sides(tmp_path: Path) -> None:
    put(tmp_path, "m.int8.vllm.cpu", bench("m.int8.vllm.cpu", [100.0], [120.0]))
    put(tmp_path, "m.bf16.vllm.cpu", bench("m.bf16.vllm.cpu", [104.0], [96.0], is_baseline=True))
    found = point(tmp_path, "m.int8.vllm.cpu")["repeats"]["output_tok_s"]
    assert (found["legs"], found["runs"], found["df"]) == (3, 2, 2)


def test_a_candidate_that_does_not_repeat_has_a_wide_interval(tmp_path: Path) -> None:
    """Seen on an H200: two legs of one server 10% apart under an interval over requests of 1%."""
    put(tmp_path, "m.a.vllm.cpu", bench("m.a.vllm.cpu", [13_249.0, 13_192.0], [15_962.0, 17_494.0]))
    low, high = point(tmp_path, "m.a.vllm.cpu")["ratio_ci95"]["output_tok_s"]
    assert low < 1.05 and high > 1.5


def test_latencies_are_read_leg_by_leg(tmp_path: Path) -> None:
    head = "workload,point,side,leg,sent_s,steady,ttft_ms,tpot_ms,e2e_ms,output_tokens\n"
    rows = [("A", 1, 10.0), ("A", 1, 20.0), ("B", 2, 30.0), ("B", 3, 34.0), ("A", 4, 16.0)]
    csv = head + "".join(f"w,c4,{side},{leg},0.0,1,{ms},,{10 * ms},16\n" for side, leg, ms in rows)
    record = bench("m.a.vllm.cpu", [100.0, 100.0], [120.0, 120.0])
    record["workloads"]["w"]["points"][0]["ratio"]["ttft_ms"] = 2.0
    put(tmp_path, "m.a.vllm.cpu", record, csv + "w,c4,B,3,0.0,0,999,,999,16\nw,c4,B,3,0.0,error,,,,\n")
    found = point(tmp_path, "m.a.vllm.cpu")
    legs = [math.log(15.0), math.log(16.0)], [math.log(30.0), math.log(34.0)]
    sd = math.sqrt(sum(np.var(x, ddof=1) for x in legs) / 2)
    assert found["repeats"]["ttft_ms"]["sd_pct"] == pytest.approx(100 * sd)
    assert found["ratio_ci95"]["ttft_ms"][0] < 2 < found["ratio_ci95"]["ttft_ms"][1]
    assert found["ratio_ci95"]["tpot_ms"] is None


def test_an_open_loop_has_no_interval(tmp_path: Path) -> None:
    record = bench("m.a.vllm.cpu", [100.0, 101.0], [120.0, 121.0])
    record["workloads"]["w"]["points"][0]["concurrency"] = None
    put(tmp_path, "m.a.vllm.cpu", record)
    assert point(tmp_path, "m.a.vllm.cpu")["ratio_ci95"]["output_tok_s"] is None


def test_legs_that_lie_further_apart_than_the_sides_are_marked() -> None:
    entry = bench("x", [100.0, 101.0], [100.0, 108.0])["workloads"]["w"]["points"][0]
    assert leg_marks(Doc("x", entry)) == ["the candidate's own legs lie 8.0% apart, more than the two sides do"]
    assert leg_marks(Doc("x", bench("x", [100.0, 101.0], [150.0, 151.0])["workloads"]["w"]["points"][0])) == []


@given(RATES, RATES, st.floats(min_value=0.1, max_value=10))
def test_the_unit_of_a_leg_does_not_matter(baseline: list[float], candidate: list[float], unit: float) -> None:
    one = spread([baseline], candidate)
    other = spread([[x * unit for x in baseline]], [x * unit for x in candidate])
    assert one is not None and other is not None
    assert other.sd == pytest.approx(one.sd, abs=1e-9)


@given(
    st.floats(min_value=0.2, max_value=5), st.floats(min_value=0, max_value=0.1), st.floats(min_value=1, max_value=3)
)
def test_an_interval_is_never_narrower_than_the_one_over_requests(ratio: float, half: float, factor: float) -> None:
    low, high = widened(ratio, [ratio - half, ratio + half], factor)
    assert low <= min(ratio - half, ratio / factor) and high >= max(ratio + half, ratio * factor)
    assert widened(ratio, None, factor) == [ratio / factor, ratio * factor]


def test_intervals_cover_a_known_ratio_as_often_as_they_say() -> None:
    """Two legs a side, 1.3 true, legs 4% apart (sd): 95% of intervals hold it. Those over requests held a few."""
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(2000):
        base = 100 * np.exp(0.04 * rng.standard_normal(2))
        own = 130 * np.exp(0.04 * rng.standard_normal(2))
        found = spread([list(base)], list(own))
        assert found is not None
        ratio = math.exp(np.log(own).mean() - np.log(base).mean())
        low, high = widened(ratio, None, found.factor(2, 2))
        held += low <= 1.3 <= high
    assert 0.935 < held / 2000 < 0.965


def test_the_committed_results_have_intervals_from_legs() -> None:
    known = 0
    for path in sorted((ROOT / "artifacts/results").glob("*.h200/bench.json")):
        for load in read_bench(ROOT, path.parent.name).mapping("workloads").values():
            for entry in load["points"]:
                if entry["ratio_ci95"]["output_tok_s"] is None:  # timed in one leg of one run
                    assert load["order"] == "AB" and "nothing says" in entry["repeats"]["not_measured"]["output_tok_s"]
                    continue
                low, high = entry["ratio_ci95"]["output_tok_s"]
                assert low < entry["ratio"]["output_tok_s"] < high
                known += 1
    assert known

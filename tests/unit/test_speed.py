"""The arithmetic of speed: percentiles, the steady window, ratios, drift, loads and prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import InputError, WorkError
from pipeline.speed import gpu, load, results, watch
from pipeline.speed.leg import Leg, need_plugin, read_export
from pipeline.speed.points import compare, drift, ratios, side, statistic
from pipeline.speed.steady import settled, tokens_between, window
from pipeline.speed.workloads import Lengths, Point, Workload, out_of_reach


def rows(e2e_ms: list[float], concurrency: int = 1, tokens: int = 8, start_ns: int = 0) -> list[dict[str, Any]]:
    """Requests of a closed loop: each slot sends its next one when its last has ended."""
    slots, found = [start_ns] * concurrency, []
    for i, value in enumerate(e2e_ms):
        slot = min(range(concurrency), key=lambda s: slots[s])
        begin = slots[slot]
        slots[slot] = begin + int(value * 1e6)
        gaps = [value / tokens] * (tokens - 1)
        found.append({"id": f"q{i}", "start_ns": begin, "end_ns": slots[slot], "ttft_ms": value / tokens,
                      "tpot_ms": value / tokens, "e2e_ms": value, "output_tokens": tokens, "expected_tokens": tokens,
                      "inter_chunk_ms": gaps, "error": None})  # fmt: skip
    return found


@pytest.mark.parametrize(("n", "shown"), [(28, []), (29, ["p90"]), (59, ["p90", "p95"]), (298, ["p90", "p95"]),
                                          (299, ["p90", "p95", "p99"])])  # fmt: skip
def test_percentiles_need_samples(n: int, shown: list[str]) -> None:
    found = statistic([float(i) for i in range(n)])
    assert [p for p in ("p90", "p95", "p99") if found[p] is not None] == shown
    for name, reason in found["not_measured"].items():
        assert found[name] is None
        assert reason.startswith(f"{n} samples, {name} needs")


def test_throughput_is_tokens_over_the_steady_window() -> None:
    found = side([rows([1000.0] * 5)], 1)
    assert found["output_tok_s"] == pytest.approx(8.0)
    assert found["request_s"] == pytest.approx(1.0)
    assert found["output_tokens_ok"]


def test_ramp_and_drain_of_a_closed_loop_are_left_out() -> None:
    found = window(rows([100.0] * 40, concurrency=4), 4)
    assert found is not None
    assert (found.ramp, found.drain) == (4, 0)  # equal lengths: the last four end together
    uneven = rows([100.0 + i % 7 for i in range(40)], concurrency=4)
    found = window(uneven, 4)
    assert found is not None
    assert (found.ramp, found.drain) == (4, 3)
    last = max(r["start_ns"] for r in uneven)
    assert found.end_ns == min(r["end_ns"] for r in uneven if r["end_ns"] > last)
    assert window(uneven[:4], 4) is None


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(50, 150), min_size=20, max_size=60), st.integers(1, 6))
def test_a_closed_loop_is_full_in_its_window(latencies: list[float], concurrency: int) -> None:
    leg = rows(latencies, concurrency)
    found = window(leg, concurrency)
    assert found is not None
    middle = (found.start_ns + found.end_ns) // 2
    for moment in (found.start_ns + 1, middle, found.end_ns - 1):
        assert sum(r["start_ns"] <= moment < r["end_ns"] for r in leg) == concurrency


def test_a_slow_drain_does_not_make_the_throughput_look_lower() -> None:
    leg = rows([100.0] * 36 + [3000.0], concurrency=4)
    assert side([leg], 4)["output_tok_s"] == pytest.approx(4 * 8 / 0.1, rel=0.02)


def test_an_open_loop_counts_slow_requests_that_end_late() -> None:
    leg = [r | {"start_ns": i * 10**8, "end_ns": i * 10**8 + int(2e8)} for i, r in enumerate(rows([200.0] * 20))]
    leg[18] |= {"e2e_ms": 9000.0, "end_ns": leg[18]["start_ns"] + int(9e9)}
    found = window(leg, None)
    assert found is not None
    assert any(r["e2e_ms"] == 9000.0 for r in found.kept)
    assert found.ramp == 2
    assert side([leg], None)["request_s"] == pytest.approx(10.0, rel=0.15)


def test_tokens_are_counted_when_they_arrive() -> None:
    (row,) = rows([800.0])
    assert tokens_between(row, 0, int(400e6)) == pytest.approx(4.0)
    row |= {"ttft_ms": None, "inter_chunk_ms": None}
    assert tokens_between(row, 0, int(200e6)) == pytest.approx(2.0)


def test_a_warm_up_that_had_not_settled_is_seen_and_noise_is_not() -> None:
    rng = random.Random(3)
    flat = [100 + rng.gauss(0, 5) for _ in range(60)]
    assert settled(rows(flat))["settled"] is True
    cold = [x * 1.4 if i < 12 else x for i, x in enumerate(flat)]
    found = settled(rows(cold))
    assert found["settled"] is False
    assert found["first_quarter_pct"] > 20
    assert settled(rows([1.0] * 5))["settled"] is None


def test_short_answers_and_errors_are_seen() -> None:
    leg = rows([10.0] * 4)
    leg[0]["output_tokens"] = 7
    assert not side([leg], 1)["output_tokens_ok"]
    leg[1]["error"] = "500"
    found = side([leg], 1)
    assert found["errors"] == 1
    with pytest.raises(WorkError, match="1 requests failed at here"):
        results.check_point(found, "here")


def test_twice_as_fast_is_a_ratio_of_two() -> None:
    rng = random.Random(5)
    slow = [1000 + rng.gauss(0, 20) for _ in range(40)]
    found = compare([rows([x / 2 for x in slow])], [rows(slow)], 1)
    assert found["ratio"]["output_tok_s"] == pytest.approx(2.0)
    assert found["ratio"]["e2e_ms"] == pytest.approx(0.5)
    low, high = found["ratio_ci95"]["output_tok_s"]
    assert low < 2.0 < high
    assert high - low < 0.2
    assert "one baseline leg" in found["drift"]["not_measured"]["pct"]


def test_ratios_of_nothing_are_null_not_numbers() -> None:
    assert ratios([], rows([1.0]))["ratio"] == {"ttft_ms": None, "tpot_ms": None, "e2e_ms": None}


def test_the_same_server_in_abba_order_has_a_ratio_of_one() -> None:
    legs = [rows([100.0, 110.0, 90.0, 105.0, 95.0, 100.0], start_ns=n * 10**10) for n in range(4)]
    found = compare([legs[1], legs[2]], [legs[0], legs[3]], 1)
    assert found["ratio"]["output_tok_s"] == pytest.approx(1.0)
    low, high = found["ratio_ci95"]["output_tok_s"]
    assert low < 1.0 < high
    assert found["baseline"]["output_tok_s"] == pytest.approx(8 * 5 / 0.5, rel=0.02)
    assert found["drift"] == {"pct": pytest.approx(0.0), "exceeds_difference": False}
    assert found["baseline"]["repeats"]["spread_pct"] == pytest.approx(0.0)


def test_a_drift_beyond_the_difference_is_marked() -> None:
    """A host that slows by 30% through an A B B A run of two equal servers: the ratio is 1, and the drift says why."""
    legs = [rows([100.0 * slow] * 20, start_ns=n * 10**11) for n, slow in enumerate((1.0, 1.1, 1.2, 1.3))]
    found = compare([legs[1], legs[2]], [legs[0], legs[3]], 1)
    assert found["ratio"]["output_tok_s"] == pytest.approx(1.0, abs=0.01)
    assert found["drift"]["pct"] == pytest.approx(30.0)
    assert found["drift"]["exceeds_difference"] is True
    assert drift([100.0, 101.0], 0.5)["exceeds_difference"] is False


def test_answers_that_are_not_streamed_have_no_first_token() -> None:
    leg = [r | {"ttft_ms": None, "tpot_ms": None, "inter_chunk_ms": None} for r in rows([100.0] * 10)]
    found = compare([rows([100.0] * 10)], [leg], 1)
    assert found["baseline"]["ttft_ms"]["not_measured"]["mean"] == "answers were not streamed"
    assert found["ratio"]["e2e_ms"] == pytest.approx(1.0)
    assert found["ratio"]["ttft_ms"] is None


POOL = [[random.Random(i).randrange(50_000) for _ in range(257)] for i in range(8)]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(8, 300), min_size=1, max_size=80), st.integers(0, 6), st.integers(0, 10**6))
def test_prompts_have_their_length_and_share_no_start(lengths: list[int], shared: int, seed: int) -> None:
    found = load.prompts(POOL, lengths, random.Random(seed), shared)
    assert [len(p) for p in found] == lengths
    starts = {tuple(p[shared : shared + load.MARK_TOKENS]) for p in found if len(p) - shared >= load.MARK_TOKENS}
    assert len(starts) == sum(len(p) - shared >= load.MARK_TOKENS for p in found)
    assert len({tuple(p[:shared]) for p in found}) == 1
    assert found == load.prompts(POOL, lengths, random.Random(seed), shared)


def test_a_pool_without_words_is_refused() -> None:
    with pytest.raises(InputError, match="1 distinct ids"):
        load.prompts([[5, 5]], [8, 8], random.Random(0))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 200))
def test_a_mix_is_met_to_within_one_request(weights: list[int], count: int) -> None:
    mix = [Lengths(prompt_tokens=i + 1, output_tokens=2, share=w / sum(weights)) for i, w in enumerate(weights)]
    drawn = load.shares(mix, count)
    assert len(drawn) == count
    for entry in mix:
        assert abs(sum(d is entry for d in drawn) - entry.share * count) < 1


MIXED = Workload(
    mix=[Lengths(prompt_tokens=10, output_tokens=4, share=0.5), Lengths(prompt_tokens=20, output_tokens=8, share=0.5)],
    points=[Point(concurrency=2, requests=6, warmup=2), Point(rate=2.5, duration_s=4, warmup=2)],
)


def test_every_phase_gets_its_own_requests_of_forced_length() -> None:
    made = load.make_requests(MIXED, MIXED.points, POOL, "w.0A")
    assert len(made) == 2 + 6 + 2 + 10
    assert sum(len(r.prompt) == 10 for r in made[2:8]) == 3
    body = load.payloads(made, "m", streaming=True)["data"][0]["payloads"][0]
    assert body["max_tokens"] == body["min_tokens"] == made[0].output_tokens
    assert body["ignore_eos"] and body["stream"] and body["stream_options"] == {"include_usage": True}
    assert "stream" not in load.payloads(made, "m", streaming=False)["data"][0]["payloads"][0]
    other = load.make_requests(MIXED, MIXED.points, POOL, "w.1B")
    assert not {tuple(r.prompt) for r in made} & {tuple(r.prompt) for r in other}


def test_closed_and_open_loops_have_other_names_and_phases() -> None:
    config = load.aiperf_config(MIXED.points, "http://x", "m", "out", True, "tok", cores=64)["benchmark"]
    names = [(p["name"], p["kind"], p["type"], p["requests"]) for p in config["phases"]]
    assert names == [("warm-c2", "warmup", "concurrency", 2), ("c2", "profiling", "concurrency", 6),
                     ("warm-r2p5", "warmup", "poisson", 2), ("r2p5", "profiling", "poisson", 10)]  # fmt: skip
    assert config["phases"][2]["rate"] == 2.5
    assert MIXED.sides == "AB"


@pytest.mark.parametrize(("server", "why"), [
    ({"max_num_seqs": 8}, "at most 8 requests at once"),
    ({"kv_cache_tokens": 500}, "need 688 tokens of KV cache, the server has 500"),
    ({"max_model_len": 40}, "a request has 43 tokens, the server's context is 40"),
    ({"max_num_seqs": 16, "kv_cache_tokens": 10_000, "max_model_len": None}, None),
    ({}, None),
])  # fmt: skip
def test_a_point_beyond_the_server_is_left_out_with_the_reason(server: dict[str, Any], why: str | None) -> None:
    workload = Workload(prompt_tokens=40, output_tokens=3, points=[Point(concurrency=16, requests=1, warmup=1)])
    found = out_of_reach(workload.points[0], workload, server)
    assert (why in found) if why and found else found is why


def _leg(hit: float | None) -> Leg:
    beside = {"prefix_cache": {"hit_rate": hit}, "client": {"c1": {"bound": True, "why": "busy"}}, "wall_s": 1.0,
              "front_end": {"c1": watch.front_end_load([(0.0, 1.0), (10.0, 10.5)])}}  # fmt: skip
    return Leg({"c1": rows([100.0] * 8)}, beside, Path("."))


def test_a_shared_prefix_fails_a_workload_that_did_not_ask_for_it() -> None:
    plain = Workload(prompt_tokens=8, output_tokens=8, points=[Point(concurrency=1, requests=8, warmup=1)])
    asked = plain.model_copy(update={"shared_prefix_tokens": 4})
    assert results.check_sharing("w", plain, [_leg(0.0), _leg(None)]) == 0.0
    assert results.check_sharing("w", plain, [_leg(None)]) is None
    assert results.check_sharing("w", asked, [_leg(0.5)]) == 0.5
    with pytest.raises(WorkError, match=r"w: the server found 1\.5% of the prompt tokens in its prefix cache"):
        results.check_sharing("w", plain, [_leg(0.0), _leg(0.015)])


def test_a_workload_becomes_points_and_a_table_of_requests() -> None:
    workload = Workload(prompt_tokens=8, output_tokens=8, points=[Point(concurrency=1, requests=8, warmup=1)])
    timed = results.Timed()
    timed.leave_out("w", Point(concurrency=64, requests=1, warmup=1), "too many")
    timed.add("w", workload, workload.points, [("A", _leg(0.0)), ("B", _leg(0.0))])
    found = timed.workloads["w"]
    assert found["points"][0]["client_bound"] is True
    assert found["points"][0]["front_end_bound"] is True
    assert [f["busy_pct"] for f in found["points"][0]["front_end"]] == [95.0, 95.0]
    assert found["points"][0]["name"] == "c1"
    assert found["left_out"] == [{"name": "c64", "reason": "too many"}]
    assert results.summary(timed.workloads)["w"]["c1"]["speedup"] == 1.0
    assert results.speed_csv(timed.workloads).splitlines()[1].startswith("w c1,80.0,1.0,12.5,12.5,100.0")
    lines = results.requests_csv(timed).splitlines()
    assert lines[0] == ",".join(results.COLUMNS)
    assert len(lines) == 1 + 16
    assert lines[1].split(",") == ["w", "c1", "A", "1", "0.0", "0", "12.5", "12.5", "100.0", "8"]


def test_a_soak_reports_errors_and_drift_instead_of_failing() -> None:
    leg = rows([100.0] * 50 + [150.0] * 50)
    leg[3]["error"] = "503"
    found = results.soak(leg)
    assert found["error_rate"] == pytest.approx(0.01)
    assert found["e2e_ms"]["drift_pct"] == pytest.approx(50.0, abs=10)


def test_memory_growth_is_the_last_quarter_against_the_first() -> None:
    assert watch.span([100.0] * 4 + [110.0] * 4)["growth_pct"] == pytest.approx(10.0)  # type: ignore[index]
    assert watch.span([]) is None


def test_the_prefix_cache_is_read_between_two_pages() -> None:
    page = 'vllm:prefix_cache_queries_total{{engine="0"}} {0}\nvllm:prefix_cache_hits_total{{engine="0"}} {1}\n'
    assert watch.prefix_cache(page.format(400.0, 100.0), page.format(500.0, 150.0))["hit_rate"] == 0.5
    assert watch.prefix_cache("x 1", "x 1")["not_measured"]["hit_rate"].endswith("have no vllm:prefix_cache_hits")
    assert watch.prefix_cache(None, None)["hit_rate"] is None


def test_a_busy_client_is_marked_as_the_limit() -> None:
    cpu = [(float(t), {1: 0.95 * t, 2: 0.1 * t}) for t in range(6)]
    found = watch.client_load(cpu, [0.1] * 300)
    assert found["bound"] is True
    assert found["why"] == "a client process used 95% of its core"
    assert found["cores_mean"] == pytest.approx(1.05)
    assert watch.client_load([(t, {1: 0.5 * t}) for t, _ in cpu], [0.1])["bound"] is False
    assert watch.client_load(cpu[:1], [])["bound"] is None


def test_aiperfs_own_warnings_of_a_held_loop_are_read() -> None:
    line = "18:53 WARNING  Event loop for worker_9155e66c is taking too long to run. Overhead: 1,031.25ms (x.py:1)"
    assert watch.AIPERF_LAG.findall(line) == [("worker", "1,031.25")]


SMI = """\
0, NVIDIA H200, 1980, 1980, 3201, 412.51, 700.00, 51, 100, 120345, 143771, Enabled, Disabled, 0x0000000000000004
0, NVIDIA H200, 1755, 1980, 3201, [N/A], 700.00, 55, 98, 120400, 143771, Enabled, Disabled, 0x0000000000000001
"""


def test_the_gpu_is_read_and_throttling_is_named() -> None:
    samples = [[row] for row in gpu.parse(SMI)]
    apps = [{"pid": "7", "name": "python", "memory_mib": "120000"}, {"pid": "9", "name": "x", "memory_mib": "1"}]
    found = gpu.summarize(samples, {"7"}, apps)
    (one,) = found["gpus"]
    assert one["clocks.sm"] == {"min": 1755.0, "mean": 1867.5, "max": 1980.0}
    assert one["power.draw"]["max"] == 412.51
    assert one["throttled"] == ["software power cap"]
    assert one["reasons_pct"] == {"software power cap": 50.0, "idle": 50.0}
    assert found["other_processes"] == [apps[1]]
    assert found["shared"] is True
    assert gpu.summarize(samples, {"1234"}, apps)["shared"] is None
    assert gpu.summarize(samples, {"7"}, apps[:1])["shared"] is False
    assert gpu.summarize([[]], set(), [])["not_measured"] == "nvidia-smi is not there"
    assert gpu.parse("garbage\n") == []


@pytest.mark.parametrize(
    ("chosen", "asked"), [("1", ["-i", "1"]), ("0,1", ["-i", "0,1"]), ("", []), ("GPU-8f2a", []), (None, [])]
)
def test_only_the_gpus_of_this_cell_are_watched(chosen: str | None, asked: list[str], monkeypatch: Any) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert gpu.visible() == asked


def test_the_clients_export_is_checked_for_units_and_streaming(tmp_path: Any) -> None:
    def record(**changes: Any) -> dict[str, Any]:
        metrics = {k: {"value": 5.0, "unit": "ms"} for k in
                   ("time_to_first_token", "inter_token_latency", "request_latency")}  # fmt: skip
        metrics["inter_chunk_latency"] = {"value": [1.0, 2.0], "unit": "ms"}
        metrics["output_sequence_length"] = {"value": 8, "unit": "tokens"}
        meta = {"phase_kind": "profiling", "phase_name": "c1", "conversation_id": "q000001",
                "request_start_ns": 1, "request_end_ns": 2}  # fmt: skip
        return {"metadata": meta, "metrics": {k: v for k, v in (metrics | changes).items() if v}}

    path = tmp_path / "profile_export.jsonl"
    warm = record()
    warm["metadata"]["phase_kind"] = "warmup"
    path.write_text("\n".join(json.dumps(r) for r in (warm, record())), encoding="utf-8")
    (row,) = read_export(path, {"q000001": 8}, streaming=True)["c1"]
    assert (row["expected_tokens"], row["output_tokens"], row["ttft_ms"]) == (8, 8, 5.0)
    path.write_text(json.dumps(record(time_to_first_token=None)), encoding="utf-8")
    with pytest.raises(WorkError, match="did the server stream"):
        read_export(path, {}, streaming=True)
    assert read_export(path, {}, streaming=False)["c1"][0]["ttft_ms"] is None
    whole = json.dumps(record(inter_chunk_latency=None))
    path.write_text("\n".join([json.dumps(record())] * 200 + [whole]), encoding="utf-8")
    found = read_export(path, {}, streaming=True)["c1"]
    assert found[-1]["ttft_ms"] is None and found[-1]["e2e_ms"] == 5.0 and found[0]["tpot_ms"] == 5.0
    path.write_text("\n".join([json.dumps(record())] * 50 + [whole]), encoding="utf-8")
    with pytest.raises(WorkError, match="1 of 51 answers .* came as one chunk"):
        read_export(path, {}, streaming=True)
    path.write_text(json.dumps(record(request_latency={"value": 1, "unit": "s"})), encoding="utf-8")
    with pytest.raises(WorkError, match="gives request_latency in s, milliseconds"):
        read_export(path, {}, streaming=True)


def test_every_closed_loop_must_have_said_that_it_waits() -> None:
    points = [Point(concurrency=2, requests=6, warmup=2), Point(rate=2.5, duration_s=4, warmup=2)]
    need_plugin(f"{load.PLUGIN_SAYS} (x.py:1)\n" * 2, points, Path("aiperf.log"))
    need_plugin("", points[1:], Path("aiperf.log"))
    with pytest.raises(WorkError, match="ran 2 closed loops and 1 of them with this project's plugin"):
        need_plugin(load.PLUGIN_SAYS, points, Path("aiperf.log"))


def test_the_plugin_says_what_the_leg_looks_for() -> None:
    source = (Path(__file__).parents[2] / load.PLUGIN / "quantpress_aiperf/strategy.py").read_text(encoding="utf-8")
    assert f'SAYS = "{load.PLUGIN_SAYS}"' in source

"""Results of other benchmark tools: units, definitions, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main
from pipeline.errors import InputError
from pipeline.speed import imported
from pipeline.speed.definitions import DEFINITIONS

PERCENTILES = {"minimum": 1.0, "maximum": 9.0, "average": 5.0, "p50": 4.0, "p90": 8.0, "p95": 8.5, "p99": 9.0}
TRTLLM: dict[str, Any] = {
    "engine": {"model": "m", "version": "1.2.1", "backend": "PyTorch", "dtype": "bfloat16", "kv_cache_dtype": "FP8",
               "quantization": "FP8"},
    "world_info": {"tp_size": 2, "pp_size": 1, "world_size": 2},
    "request_info": {"num_requests": 100, "avg_num_concurrent_requests": 7.5, "avg_input_length": 128.0,
                     "avg_output_length": 64.0},
    "performance": {"total_latency_ms": 1e4, "avg_request_latency_ms": 800.0, "request_throughput_req_s": 10.0,
                    "system_output_throughput_tok_s": 640.0, "system_total_throughput_tok_s": 1920.0,
                    "request_latency_percentiles_ms": PERCENTILES},
    "streaming_metrics": {"avg_ttft_ms": 30.0, "avg_tpot_ms": 12.0, "tpot_percentiles": PERCENTILES,
                          "ttft_percentiles": PERCENTILES},
}  # fmt: skip
VLLM: dict[str, Any] = {
    "model_id": "m", "backend": "vllm", "num_prompts": 100, "completed": 100, "failed": 0, "duration": 10.0,
    "total_input_tokens": 12800, "total_output_tokens": 6400, "request_throughput": 10.0, "output_throughput": 700.0,
    "total_token_throughput": 2000.0, "mean_ttft_ms": 33.0, "median_ttft_ms": 30.0, "p99_ttft_ms": 50.0,
    "mean_tpot_ms": 11.0, "median_tpot_ms": 10.0, "p99_tpot_ms": 20.0, "mean_itl_ms": 11.0, "median_itl_ms": 10.0,
    "p99_itl_ms": 20.0,
}  # fmt: skip


def _file(folder: Path, content: Any, name: str = "result.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(content))
    return path


def test_trtllm_bench_is_read_with_its_units_and_meanings(tmp_path: Path) -> None:
    made = imported.import_result(_file(tmp_path, TRTLLM), "trtllm-bench", "m")
    assert made["metrics"]["e2e_ms"]["mean"] == 800.0
    assert made["metrics"]["ttft_ms"]["definition"] == "ttft-in-process/1"
    assert made["metrics"]["tpot_ms"]["p95"] == 8.5
    assert made["metrics"]["output_tok_s"] == {
        "definition": "output-throughput-whole-run/1", "unit": "tok/s", "mean": 640.0,
        "text": "output tokens / time from the first send to the last token, ramp and drain included",
    }  # fmt: skip
    assert made["facts"]["version"] == "1.2.1"
    assert "not measured by this project" in made["note"]


def test_a_percentile_without_its_samples_is_not_a_number(tmp_path: Path) -> None:
    made = imported.import_result(_file(tmp_path, TRTLLM), "trtllm-bench")
    assert made["metrics"]["e2e_ms"]["p99"] == "not measured (100 samples, p99 needs 299)"


def test_without_streaming_there_is_no_first_token(tmp_path: Path) -> None:
    content = {k: v for k, v in TRTLLM.items() if k != "streaming_metrics"}
    made = imported.import_result(_file(tmp_path, content), "trtllm-bench")
    assert made["metrics"]["ttft_ms"]["mean"] == "not measured (trtllm-bench ran without --streaming)"


def test_seconds_become_milliseconds(tmp_path: Path) -> None:
    content = {"avg_latency": 1.5, "latencies": [1.5] * 40, "percentiles": {"50": 1.4, "90": 1.9, "99": 2.0}}
    made = imported.import_result(_file(tmp_path, content), "vllm-bench-latency")["metrics"]["batch_ms"]
    assert (made["mean"], made["p50"], made["p90"], made["unit"]) == (1500.0, 1400.0, 1900.0, "ms")
    assert made["p99"] == "not measured (40 samples, p99 needs 299)"


@pytest.mark.parametrize(("content", "tool", "message"), [
    (TRTLLM, "trtlm-bench", "Did you mean 'trtllm-bench'"),
    (TRTLLM, "vllm-bench-serve", "is no result of vllm bench serve.*It looks like trtllm-bench's"),
    ([1, 2], "trtllm-bench", "is no result of trtllm-bench"),
    (VLLM | {"failed": 3}, "vllm-bench-serve", "3 requests failed"),
    (VLLM | {"mean_ttft_ms": -1}, "vllm-bench-serve", "mean_ttft_ms is -1, which is no time"),
    (VLLM | {"mean_ttft_ms": "fast"}, "vllm-bench-serve", "is 'fast', which is no time"),
])  # fmt: skip
def test_what_is_no_such_result_is_refused(content: Any, tool: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=message):
        imported.import_result(_file(tmp_path, content), tool)


def test_like_definitions_are_compared_and_unlike_ones_refused(tmp_path: Path) -> None:
    a = imported.import_result(_file(tmp_path, TRTLLM), "trtllm-bench")
    b = imported.import_result(_file(tmp_path, VLLM), "vllm-bench-serve")
    rows = {(r.metric, r.statistic): r for r in imported.compare(a, b)}
    assert rows["output_tok_s", "mean"].ratio == pytest.approx(640 / 700)
    ttft = rows["ttft_ms", "mean"]
    assert ttft.ratio is None
    assert ttft.why == "unlike definitions: ttft-in-process/1 and ttft-text/1"
    with pytest.raises(InputError, match="Not compared: tpot_ms: unlike definitions"):
        imported.need_comparable(list(rows.values()), "tpot_ms")
    imported.need_comparable(list(rows.values()), None)


def test_tpot_with_the_first_token_is_never_compared_with_tpot_without_it() -> None:
    def record(definition: str) -> dict[str, Any]:
        return {"metrics": {"tpot_ms": {"definition": definition, "unit": "ms", "mean": 10.0}}}

    rows = list(imported.compare(record("tpot-excl-first/1"), record("tpot-incl-first/1")))
    assert rows[0].ratio is None
    with pytest.raises(InputError, match="tpot-excl-first/1 and tpot-incl-first/1"):
        imported.need_comparable(rows, None)


def _bench(folder: Path) -> Path:
    side = {"tpot_ms": {"n": 40, "mean": 10.0, "p50": 9.0, "p90": 12.0, "p99": None}, "output_tok_s": 700.0,
            "ttft_ms": {"n": 40, "mean": 30.0}}  # fmt: skip
    definitions = {name: {"id": d.id, "unit": d.unit, "text": d.text} for name, d in DEFINITIONS.items()}
    point = {"concurrency": 8, "candidate": side, "baseline": side}
    content = {
        "schema": "quantpress.bench/2",
        "cell": "c",
        "definitions": definitions,
        "workloads": {"w": {"points": [point]}},
    }
    return _file(folder, content, "bench.json")


def test_our_own_bench_json_is_compared_by_its_definitions(tmp_path: Path) -> None:
    own = imported.read(Path(f"{_bench(tmp_path)}#w/8"))
    theirs = imported.import_result(_file(tmp_path, VLLM), "vllm-bench-serve")
    rows = {(r.metric, r.statistic): r for r in imported.compare(theirs, own)}
    assert rows["tpot_ms", "mean"].ratio == pytest.approx(1.1)
    assert "unlike definitions" in str(rows["ttft_ms", "mean"].why)
    assert "unlike definitions" in str(rows["output_tok_s", "mean"].why)  # steady windows against the whole run
    with pytest.raises(InputError, match="no load '9'"):
        imported.read(Path(f"{tmp_path}/bench.json#w/9"))
    with pytest.raises(InputError, match="no workload 'v'"):
        imported.read(Path(f"{tmp_path}/bench.json#v/8"))
    with pytest.raises(InputError, match="neither an imported result nor a bench.json"):
        imported.read(_file(tmp_path, {}, "other.json"))


def test_the_command_prints_keeps_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = _file(tmp_path, TRTLLM), tmp_path / "imported.json"
    with pytest.raises(SystemExit) as caught:
        main(["import-bench", str(path), "--tool", "trtllm-bench", "--out", str(out)])
    assert caught.value.code == 0
    assert "ttft-in-process/1" in capsys.readouterr().out
    other = _file(tmp_path, VLLM, "vllm.json")
    asked = ["import-bench", str(other), "--tool", "vllm-bench-serve", "--against", str(out), "--metric", "ttft_ms"]
    with pytest.raises(SystemExit) as caught:
        main(asked)
    assert caught.value.code == 2
    assert "Not compared: ttft_ms: unlike definitions" in capsys.readouterr().err

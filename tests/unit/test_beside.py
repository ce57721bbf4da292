"""The baseline's own numbers where it was only timed beside others, and which engine served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.choice.timed import read_points
from pipeline.evidence.beside import REFERENCE, beside
from pipeline.report.engine import engine, engine_line, engine_warnings
from pipeline.report.sources import Doc

ROOT = Path(__file__).parents[2]
BF16, FP8 = "m.bf16.vllm.g", "m.fp8.vllm.g"
CSV = "workload,point,side,leg,sent_s,steady,ttft_ms,tpot_ms,e2e_ms,output_tokens\n"


def put(root: Path, cell: str, tok_s: float, finished: str) -> None:
    side = {"output_tok_s": tok_s, "errors": 0, "output_tokens_ok": True, "steady": {"seconds": 9.0}}
    point = {"name": "c4", "concurrency": 4, "candidate": side | {"output_tok_s": 2 * tok_s}, "baseline": side}
    load = {"against": "baseline", "points": [point | {"ratio": {"output_tok_s": 2.0}}], "output_tokens": 16}
    record = {
        "schema": "quantpress.bench/1", "cell": cell, "baseline": BF16, "finished_at": finished,
        "server": {"baseline": {"version": "0.26.0", "kv_cache_tokens": 99}}, "workloads": {"w": load},
    }  # fmt: skip
    folder = root / "artifacts/results" / cell
    folder.mkdir(parents=True)
    (folder / "bench.json").write_text(json.dumps(record), encoding="utf-8")
    rows = f"w,c4,A,1,0,1,{tok_s},5,99,16\nw,c4,B,2,0,1,7,3,50,16\nw,c4,A,1,0,0,1,1,1,16\n"
    (folder / "requests.csv").write_text(CSV + rows, encoding="utf-8")


def test_the_latest_run_that_timed_the_baseline_gives_its_numbers(tmp_path: Path) -> None:
    put(tmp_path, FP8, 100.0, "2026-01-02")
    put(tmp_path, "m.int8.vllm.g", 50.0, "2026-01-01")
    found = beside(tmp_path, BF16)
    assert found is not None
    doc, whose = found
    assert whose == FP8 and doc.raw("beside") == FP8
    (point,) = doc.items("workloads", "w", "points")
    assert point["candidate"]["output_tok_s"] == 100.0
    assert doc.raw("server", "candidate", "kv_cache_tokens") == 99
    assert point["elsewhere"] == [{"cell": "m.int8.vllm.g", "output_tok_s": 50.0}]
    assert Doc("x", point).fact("ratio", "output_tok_s")["not_measured"] == REFERENCE
    assert beside(tmp_path, "m.other.vllm.g") is None


def test_its_requests_are_judged_by_objectives(tmp_path: Path) -> None:
    put(tmp_path, FP8, 100.0, "2026-01-02")
    (point,), _ = read_points(tmp_path, BF16)
    assert point.tok_s == 100.0 and point.ratio is None
    assert [row["ttft_ms"] for row in point.rows] == [100.0]
    (own,), _ = read_points(tmp_path, FP8)
    assert [row["ttft_ms"] for row in own.rows] == [7.0]


def test_the_committed_baseline_of_the_h200_has_numbers() -> None:
    points, doc = read_points(ROOT, "llama-8b-random.bf16.vllm.h200")
    assert doc.data is not None and all(point.tok_s for point in points) and points


def test_the_engine_is_named_with_what_was_not_the_locks() -> None:
    brought = {
        "numpy": "2.5.2 on the host, 2.3.5 in the lock", "torch": "2.11.0 on the host, 2.11.0 in the lock",
        "ninja": "unknown version on the host, 1.13.2 in the lock",
    }  # fmt: skip
    data: dict[str, Any] = {
        "host": {"gpus": [{"driver": "580.1"}, {"driver": "580.1"}]},
        "server": {"version": "0.26.0", "installation": {"from_host": brought}},
    }
    found = engine(Doc("x", data), "server")
    assert found == {"version": "0.26.0", "driver": "580.1", "torch": "2.11.0",
                     "differs": ["numpy 2.5.2 (lock: 2.3.5)"], "unknown": 1}  # fmt: skip
    cells = [{"server": {"engine": found}}, {"server": {"engine": engine(Doc("y", {}), "server")}}]
    assert engine_line(cells) == "0.26.0, torch 2.11.0, driver 580.1"
    (warning,) = engine_warnings(cells)
    assert "numpy 2.5.2 (lock: 2.3.5); 1 package that the host brought does not say its version" in warning
    assert engine_warnings(cells[1:]) == [] and engine_line(cells[1:]) == ""

"""What the report marks: who else was on the GPU, and which model a warning is of."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

from report_results import MODEL, build_results

from pipeline.choice.timed import read_points
from pipeline.report.apart import gpu_marks
from pipeline.report.card import card_text
from pipeline.report.collect import collect
from pipeline.report.html import page
from pipeline.report.sources import Doc


def test_the_other_sides_server_is_no_stranger_on_the_gpu() -> None:
    def legs(**strangers: list[str]) -> Doc:
        rows = [
            {"side": side, "gpu": {"shared": bool(pids), "other_processes": [{"pid": pid} for pid in pids], "gpus": []}}
            for side, pids in strangers.items()
        ]
        return Doc("bench.json", {"legs": rows})

    assert gpu_marks(legs(A=["7"], B=["9"])) == []
    assert gpu_marks(legs(A=["7", "5"], B=["9", "5"])) == ["other processes used the GPU"]
    assert gpu_marks(legs(A=["5"])) == ["other processes used the GPU"]
    assert gpu_marks(legs(A=[], B=[])) == []


def test_warnings_stand_with_their_own_model(tmp_path: Path) -> None:
    report = collect(build_results(tmp_path))
    assert all({"target", "runtime", "model"} <= set(w) for w in report["warnings"] if w["target"] is not None)


def changed(root: Path, recipe: str, name: str, change: Any) -> None:
    path = root / f"artifacts/results/{MODEL}.{recipe}.vllm.cpu/{name}.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def test_a_card_says_which_engine_served_and_where_it_was_not_the_locks(tmp_path: Path) -> None:
    root = build_results(tmp_path)
    brought = {"numpy": "2.5.2 on the host, 2.3.5 in the lock", "torch": "2.11.0 on the host, 2.11.0 in the lock"}
    changed(root, "int8", "eval",
            lambda d: d["server"].update(version="0.32.0", installation={"from_host": brought}))  # fmt: skip
    report = collect(root)
    group = report["targets"][0]
    (cell,) = [c for c in group["cells"] if c["recipe"] == "int8"]
    card = card_text(report, cell, group)
    assert "0.32.0, torch 2.11.0 |" in card
    assert "| not the lock's | numpy 2.5.2 (lock: 2.3.5) |" in card


def test_a_marked_timing_stands_unmarked_nowhere(tmp_path: Path) -> None:
    """At a glance, in the table of an objective, and among the points that cells are chosen by."""
    root = build_results(tmp_path)

    def mark(data: Any) -> None:
        (load,) = data["workloads"].values()
        load["points"][-1]["client_bound"] = True
        load["points"][-1]["front_end_bound"] = True
        load["points"][-1]["candidate"]["steady"] = {"legs": [{"settled": False}]}
        load["legs"] = [{"side": "B", "gpu": {"gpus": [{"throttled": ["software power cap"]}]}}]

    changed(root, "int8", "bench", mark)
    points, _ = read_points(root, f"{MODEL}.int8.vllm.cpu")
    for words in ("the client limited", "the server's front end limited", "had not settled", "software power cap"):
        assert any(words in m for m in points[-1].marks)
    html = page(collect(root))
    glance = html[html.index("<h3>At a glance") :].split("</table>")[0]
    (row,) = [r for r in glance.split("<tr>") if 'scope="row"' in r and "int8" in r]
    assert 'class="ci mark wrap"' in row and "software power cap" in row
    assert glance.count('class="ci mark wrap">the client limited the load') == 1
    box = html[: html.index("<h3>At a glance")]
    assert "int8 (the GPU was held back: software power cap; the client limited the load; the server" in box
    assert "front end limited the load; latencies had not" in box


def test_open_loads_and_marks_of_a_timing_are_shown(tmp_path: Path) -> None:
    root = build_results(tmp_path)
    path = root / f"artifacts/results/{MODEL}.int8.vllm.cpu/bench.json"
    bench = json.loads(path.read_text(encoding="utf-8"))
    point = bench["workloads"]["chat-64-32"]["points"][1]
    point |= {"concurrency": None, "rate": 2.5, "client_bound": True}
    point["baseline"]["repeats"]["output_tok_s"] = [40.0, 60.0]
    gpu = {"shared": True, "gpus": [{"throttled": ["software power cap"]}]}
    bench["workloads"]["chat-64-32"]["legs"] = [{"side": "A", "gpu": gpu}, {"side": "B", "gpu": gpu}]
    path.write_text(json.dumps(bench), encoding="utf-8")
    text = unescape(re.sub(r"<[^>]+>", "", page(collect(root))))
    assert "The GPU was held back: software power cap: int8 under chat-64-32." in text
    assert "Other processes used the GPU: int8 under chat-64-32." in text
    assert "2.5/s, open loop" in text
    assert "The client limited the load: int8 under chat-64-32 at 2.5/s, open loop." in text
    assert "the baseline's own legs lie 50.0% apart, more than the two sides do" in text

"""What the report marks: who else was on the GPU, and which model a warning is of."""

from __future__ import annotations

from pathlib import Path

from report_results import build_results

from pipeline.report.apart import gpu_marks
from pipeline.report.collect import collect
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

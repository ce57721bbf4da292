"""The report's table of recipes that were made twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeline.report.agreement import agreement_rows

KIND = {"tensors": 4, "identical": 1, "equal_share": 0.97, "largest_code_distance": 1, "largest_relative_rms": None}
SAME = KIND | {"identical": 4, "equal_share": 1.0, "largest_code_distance": 0}
RECORD = {
    "schema": "quantpress.compare/1", "first": "a/m.int4", "second": "a/m.int4.h200", "tensors": 9,
    "identical_tensors": 5, "only_in_first": [], "only_in_second": [], "unlike": [],
    "kinds": {"weight_packed": KIND, "embed_tokens.weight": SAME},
}  # fmt: skip


def rows(tmp_path: Path, record: dict[str, Any] | str) -> list[dict[str, Any]]:
    """The rows of one compare.json with this content."""
    folder = tmp_path / "artifacts/results/m.int4.h200"
    folder.mkdir(parents=True, exist_ok=True)
    text = record if isinstance(record, str) else json.dumps(record)
    (folder / "compare.json").write_text(text, encoding="utf-8")
    return agreement_rows(tmp_path)


def test_only_what_differs_is_named(tmp_path: Path) -> None:
    assert agreement_rows(tmp_path) == []
    (row,) = rows(tmp_path, RECORD)
    assert (row["artifact"], row["identical"], row["tensors"], row["missing"]) == ("m.int4.h200", 5, 9, [])
    assert row["kinds"] == [{"kind": "weight_packed", "identical": 1, "tensors": 4, "equal_share": 0.97,
                             "code_distance": 1, "relative_rms": None}]  # fmt: skip


def test_a_tensor_in_one_alone_is_named(tmp_path: Path) -> None:
    (row,) = rows(tmp_path, RECORD | {"only_in_second": ["lm_head.weight"]})
    assert row["missing"] == ["lm_head.weight"]


def test_a_broken_file_is_a_problem_and_no_row_of_numbers(tmp_path: Path) -> None:
    for broken in ("{", RECORD | {"schema": "other/1"}, RECORD | {"kinds": {"weight": {"tensors": "four"}}}):
        (row,) = rows(tmp_path, broken)
        assert row["problem"], broken

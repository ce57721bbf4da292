"""Where the report finds what belongs to a cell. The results are synthetic, as in test_report.py."""

from __future__ import annotations

from pathlib import Path

import yaml
from report_results import MODEL, build_results

from pipeline.report.collect import collect


def test_a_checkpoint_made_on_its_target_is_read_where_it_stands(tmp_path: Path) -> None:
    project = build_results(tmp_path)
    plan_file = project / "pipeline/plan.yaml"
    plan = yaml.safe_load(plan_file.read_text(encoding="utf-8"))
    (cell,) = [c for c in plan["cells"] if c["recipe"] == "int8" and c["target"] == "cpu"]
    cell["checkpoint"] = f"{MODEL}.int8.cpu"
    plan_file.write_text(yaml.safe_dump(plan), encoding="utf-8")
    results = project / "artifacts/results"
    (results / f"{MODEL}.int8").rename(results / f"{MODEL}.int8.cpu")
    cells = {c["cell"]: c for group in collect(project)["targets"] for c in group["cells"]}
    assert cells[cell["cell"]]["checkpoint"] == f"{MODEL}.int8.cpu"
    assert cells[cell["cell"]]["size"]["weight_bytes"]["value"] > 0

"""The report's section of predicted memory and speed: beside what was measured, and never mixed with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_report import visible

from pipeline.report import write_report
from pipeline.report.collect import collect
from pipeline.report.html import page

ROOT = Path(__file__).parents[2]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This project's own params, plan and results in a folder of their own; pictures are left out."""
    drawn = {"quality_speed": None, "left_out": [], "speed": [], "size": None}
    monkeypatch.setattr("pipeline.report.figures.figures", lambda group: drawn)
    (tmp_path / "pipeline").mkdir()
    shutil.copy(ROOT / "params.yaml", tmp_path)
    shutil.copy(ROOT / "pipeline/plan.yaml", tmp_path / "pipeline")
    shutil.copytree(ROOT / "artifacts/results", tmp_path / "artifacts/results")
    return tmp_path


def section(root: Path) -> tuple[dict[str, Any], str]:
    """The section's data, and its text on the page."""
    text = visible(write_report(root, root / "artifacts/report").read_text(encoding="utf-8"))
    start = text.index("Memory and predicted speed")
    sizes = json.loads((root / "artifacts/report/report.json").read_text(encoding="utf-8"))["sizes"]
    return sizes, text[start : text.index("Refused", start)]


def set_cpu(root: Path, **values: Any) -> None:
    """Change the cpu target of a project's params.yaml."""
    raw = yaml.safe_load((root / "params.yaml").read_text(encoding="utf-8"))
    raw["targets"]["cpu"].update(values)
    (root / "params.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")


def test_predicted_stands_beside_what_was_found(project: Path) -> None:
    sizes, text = section(project)
    rows = {row["recipe"]: row for row in sizes["measured"][0]["rows"]}
    for recipe in ("bf16", "int8", "int4", "gptq", "awq"):
        row = rows[recipe]
        assert row["sizes"]["kv_cache_tokens"] == pytest.approx(row["kv_cache_tokens"], rel=0.1)
        assert row["sizes"]["fit"]["weight_bytes"] == pytest.approx(row["weight_bytes"], rel=0.02)
    assert rows["fp8"]["problem"] == "not served on cpu"
    assert "not predicted (the target gives no bandwidth_gb_s)" in text
    assert {table["target"] for table in sizes["planned"]} == {
        cell["target"] for cell in collect(project)["planned"]
    }  # fmt: skip


def test_many_loads_do_not_drown_the_page(project: Path) -> None:
    sizes, _ = section(project)
    for table in sizes["planned"]:
        assert 1 <= len(table["loads"]) <= 2
        assert all(len(row["loads"]) == len(table["loads"]) for row in table["rows"] if row["sizes"])


def test_what_is_predicted_and_what_was_measured_share_a_column(project: Path) -> None:
    """Twelve columns of a target with six loads were twice as wide as the page."""
    table = page(collect(project)).split("<h2>Memory and predicted speed")[1].split("</table>")[0]
    loads = collect(project)["sizes"]["measured"][0]["loads"]
    assert table.split("</thead>")[0].count("<th") - 1 == 4 + len(loads)
    row = next(r for r in table.split("<tr>") if 'scope="row">int8<' in r)
    assert row.count("predicted ") >= 1 and row.count("as made ") == 1 and row.count("logged ") == 1


def test_reasons_of_serving_parameters_are_told_once(project: Path) -> None:
    """A list of reasons in every row of every planned table was most of the page."""
    html = page(collect(project)).split("<h2>Memory and predicted speed")[1].split("</section>")[0]
    assert html.count("Serving parameters: ") <= html.count("<table>")
    assert "python -m pipeline serving --cell CELL" in html


def test_with_a_bandwidth_measured_over_predicted_is_shown(project: Path) -> None:
    set_cpu(project, bandwidth_gb_s=30, source="invented for this test")
    row = next(r for r in collect(project)["sizes"]["measured"][0]["rows"] if r["recipe"] == "int8")
    first = row["loads"][0]
    path = project / "artifacts/results/smollm2-135m.int8.vllm.cpu/bench.json"
    bench = json.loads(path.read_text(encoding="utf-8"))
    point = next(iter(bench["workloads"].values()))["points"][0]
    point["concurrency"] = first["concurrency"]  # whatever the committed results were timed at
    bench["workloads"] = {first["workload"]: {"prompt_tokens": 64, "output_tokens": 16, "points": [point]}}
    path.write_text(json.dumps(bench), encoding="utf-8")
    sizes, text = section(project)
    load = next(r for r in sizes["measured"][0]["rows"] if r["recipe"] == "int8")["loads"][0]
    assert load["measured_tok_s"] == point["candidate"]["output_tok_s"]
    assert load["measured_over_predicted"] == pytest.approx(load["measured_tok_s"] / load["predicted_tok_s"])
    assert f"{100 * load['measured_over_predicted']:.0f}%" in text and "measured over predicted" in text


def test_a_measurement_never_changes_a_prediction(project: Path) -> None:
    before = collect(project)["sizes"]
    for path in (project / "artifacts/results").glob("*.*.*.*/bench.json"):
        path.unlink()
    after = collect(project)["sizes"]
    then = {group["target"]: [row["sizes"] for row in group["rows"]] for group in before["measured"]}
    # A target of which only speed was measured has nothing left.
    assert after["measured"]
    for group in after["measured"]:
        assert [row["sizes"] for row in group["rows"]] == then[group["target"]]


def test_without_whole_params_nothing_is_predicted(project: Path) -> None:
    set_cpu(project, bandwith_gb_s=3)
    sizes, text = section(project)
    assert sizes["measured"] == [] and "not predicted (params.yaml is not whole" in text


def test_a_users_wrong_option_is_a_reason_and_not_a_crash(project: Path) -> None:
    raw = yaml.safe_load((project / "params.yaml").read_text(encoding="utf-8"))
    raw["serving"]["vllm-cuda"] = {"tensor-parallel-size": 2}
    (project / "params.yaml").write_text(yaml.safe_dump(raw), encoding="utf-8")
    _, text = section(project)
    assert "2 does not divide the 9 attention heads" in text

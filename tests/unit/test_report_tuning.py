"""The report's tuning and scaling sections, and where each precision stops paying, over made-up results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from report_results import MODEL, build_results, put
from test_report import Reader, change, render, result, visible
from tuning_records import scaling_json, tune_json

from pipeline.choice.paying import FASTER, OPEN, SLOWER, Load, pays
from pipeline.memory.cells import CellIds
from pipeline.memory.moved import bytes_ratio
from pipeline.params import load_params
from pipeline.report.collect import collect
from pipeline.shapes import SPEED_ONLY, config_of

ROOT = Path(__file__).parents[2]
CELL, DIGEST = f"{MODEL}.int8.vllm.cpu", "d1" * 32
SPEEDS = {"short-steps": 1.2, "other-checkpoint": 1.3, "by-variable": 1.005}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up project with a tuning and a scaling run; pictures are left out."""
    drawn = {"quality_speed": None, "left_out": [], "speed": [], "size": None}
    monkeypatch.setattr("pipeline.report.figures.figures", lambda group: drawn)
    root = build_results(tmp_path)
    put(result(root, "int8", "tune"), tune_json(CELL, DIGEST, SPEEDS))
    put(result(root, "int8", "scaling"), scaling_json(CELL))
    return root


def part(root: Path, start: str, end: str) -> str:
    """The text of the page from one heading to another."""
    text = visible(render(root))
    return text[text.index(start) : text.index(end, text.index(start))]


def test_every_variant_is_shown_with_its_ratio_noise_and_mark(project: Path) -> None:
    text = part(project, "Serving options that were tried", "Scaling over GPUs")
    for words in (
        "max-num-batched-tokens 2048, without no-enable-prefix-caching", "recipe int4", "VLLM_X=1", "61 s",
        "Kernel-short-steps", "chance gives up to 3.1%; the client limited the load", "1.20×", "TPOT 0.83×",
        "TTFT 0.83×", "legs 1% apart", "front end 97% of a core", "front end 12% of a core", "front end 55% of a core",
        "other-checkpoint evaluate before use", "within noise", "failed: ValueError: no such backend.",
        "Proposed: short-steps", "1.20x tokens/s at c1 (chance gives up to 3.1%)", "max-num-batched-tokens: 2048",
        "every server with kv-cache-memory-bytes 1000",
    ):  # fmt: skip
        assert words in text
    assert "Proposed: by-variable" not in text and SPEED_ONLY not in text
    rows = {v["variant"]: v for v in collect(project)["tuning"]["tuned"][0]["variants"]}
    assert [load["verdict"] for load in rows["by-variable"]["loads"]] == ["within noise"] * 2
    assert [load["verdict"] for load in rows["short-steps"]["loads"]] == ["faster"] * 2


def test_how_it_was_measured_has_host_commit_and_commands(project: Path) -> None:
    text = part(project, "How it was measured", "Each artifact")
    for words in (f"Tuning of {CELL}", f"Scaling of {CELL}", "Synthetic GPU", "beef" * 10, "serve --short-steps"):
        assert words in text


def test_scaling_is_shown_load_by_load(project: Path) -> None:
    text = part(project, "Scaling over GPUs", "Memory and predicted speed")
    assert "98%" in text and "1.50×" in text and "75%" in text and "0.67×" in text and "GPU 0:" in text


def test_without_a_gain_the_section_says_so(project: Path) -> None:
    put(result(project, "int8", "tune"), tune_json(CELL, DIGEST, {"short-steps": 1.0}))
    text = part(project, "Serving options that were tried", "Scaling over GPUs")
    assert "Nothing is shown to beat the cell's own options" in text


def test_random_weights_keep_their_mark_and_what_was_not_tried_is_named(project: Path) -> None:
    params = yaml.safe_load((project / "params.yaml").read_text(encoding="utf-8"))
    params["models"] = {MODEL: {"source": "random:llama-3.1-8b@0"}}
    params["tuning"] = {f"{MODEL}.awq.vllm.cpu": {"workload": "w", "variants": {}}}
    (project / "params.yaml").write_text(yaml.safe_dump(params), encoding="utf-8")
    text = part(project, "Serving options that were tried", "Scaling over GPUs")
    assert f"{CELL} {SPEED_ONLY}" in text
    assert f"not measured (artifacts/results/{MODEL}.awq.vllm.cpu/tune.json is missing; python -m pipeline" in text


@pytest.mark.parametrize(
    ("name", "content"),
    [(n, c) for n in ("tune", "scaling") for c in ("", "[1]", '{"schema": 3}', f'{{"schema": "quantpress.{n}/1"}}')],
)  # fmt: skip
def test_a_broken_run_is_named_where_it_would_stand_and_under_not_measured(
    project: Path, name: str, content: str
) -> None:
    result(project, "int8", name).write_text(content, encoding="utf-8")
    says = f"artifacts/results/{CELL}/{name}.json cannot be read"
    text = visible(render(project))
    assert text.count(says) >= 2
    assert f"{name}.json cannot be read" in (project / f"artifacts/packages/{CELL}/CARD.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("tune", ("points", 0, "noise"), "much"), ("tune", ("points", 1, "sides", "short-steps", "errors"), None),
        ("tune", ("host", "gpus"), "two"), ("tune", ("server", "own", "kernels"), 3), ("tune", ("client_bound",), None),
        ("tune", ("variants", "short-steps", "options"), []), ("scaling", ("points", 0, "efficiency"), {}),
        ("scaling", ("points", 0, "together", "each_tok_s"), [1]), ("scaling", ("gpus",), "2"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_kind_is_named(project: Path, name: str, keys: tuple[Any, ...], value: Any) -> None:
    change(result(project, "int8", name), *keys, value=value)
    where = ".".join(map(str, keys))
    assert f"{name}.json cannot be read: {where}" in visible(render(project))


def test_a_stale_run_shows_no_number(project: Path) -> None:
    put(project / f"artifacts/packages/{CELL}/deploy/manifest.json", {"checkpoint": {"digest": "ee" * 32}})
    text = part(project, "Serving options that were tried", "Scaling over GPUs")
    assert "Not shown: stale:" in text and "1.20×" not in text


def test_names_of_a_run_are_escaped(project: Path) -> None:
    change(result(project, "int8", "tune"), "failed", value={"<script>x</script>": "<script>y</script>"})
    change(result(project, "int8", "tune"), "server", "own", "kernels", value=["<script>z</script>"])
    html = render(project)
    assert "<script>" not in html
    reader = Reader()
    reader.feed(html)


def test_the_card_has_proposals_scaling_and_where_it_pays(project: Path) -> None:
    render(project)
    card = (project / f"artifacts/packages/{CELL}/CARD.md").read_text(encoding="utf-8")
    assert "- short-steps (max-num-batched-tokens 2048" in card and "**Evaluate before use.**" in card
    assert "| c4 |" in card and "- chat-64-32: pays at every load timed, 1.36x [1.33, 1.39] at 4." in card


def test_the_report_names_where_each_precision_pays(project: Path) -> None:
    change(result(project, "int4", "bench"), "workloads", "chat-64-32", "points", 1, "ratio", "output_tok_s", value=0.9)
    band = ("workloads", "chat-64-32", "points", 1, "ratio_ci95", "output_tok_s")
    change(result(project, "int4", "bench"), *band, value=[0.88, 0.92])
    text = part(project, "Where each precision stops paying", "Refused")
    assert "int8 chat-64-32 pays at every load timed, 1.36x [1.33, 1.39] at 4" in text
    assert "stops paying between 1 and 4 requests in flight: 1.41x [1.38, 1.44] at 1, 0.90x [0.88, 0.92] at 4" in text
    assert "not predicted" in text
    assert [row["recipe"] for row in collect(project)["targets"][0]["paying"]] == ["int8", "int4", "gptq", "awq"]


def test_a_gain_within_the_noise_of_the_baseline_is_none(project: Path) -> None:
    legs = ("workloads", "chat-64-32", "points", 0, "candidate", "repeats", "output_tok_s")
    change(result(project, "bf16", "bench"), *legs, value=[23.4, 44.0])
    rows = {row["recipe"]: row for row in collect(project)["targets"][0]["paying"]}
    assert [load["state"] for load in rows["int8"]["loads"]] == [OPEN, FASTER]
    assert "below that not faster: 1.24x [0.85, 1.81] at 1" in rows["int8"]["text"]


def load(at: int, ratio: float, half: float | None = 0.01) -> Load:
    return Load(at, ratio, None if half is None else [ratio - half, ratio + half])


@pytest.mark.parametrize(
    ("loads", "says"),
    [
        ([], "not measured"),
        ([load(1, 1.4)], "pays at the one load timed, 1.40x [1.39, 1.41] at 1"),
        ([load(256, 1.21), load(1, 1.4)], "pays at every load timed, 1.21x [1.20, 1.22] at 256"),
        ([load(1, 1.4), load(64, 1.1), load(256, 0.9)], "stops paying between 64 and 256 requests in flight: 1.10x"),
        ([load(1, 0.7), load(4, 1.2)], "at 4; below that not faster: 0.70x [0.69, 0.71] at 1"),
        ([load(1, 1.4), load(16, 1.0), load(64, 0.8)], "1.40x [1.39, 1.41] at 1, 1.00x [0.99, 1.01] at 16, 0.80x"),
        ([load(1, 1.4), load(256, 1.005)], "is not shown to pay any more between 1 and 256 requests in flight"),
        ([load(1, 1.0), load(4, 1.2)], "pays up to the highest load timed, 1.20x [1.19, 1.21] at 4; below that"),
        ([load(1, 0.8), load(4, 0.7)], "slower from 1 to 4 in flight"),
        ([load(1, 1.0), load(4, 0.7)], "not shown to pay at any load from 1 to 4 in flight"),
        ([load(1, 1.3, None)], "not shown to pay at any load at the one timed: 1.30x (no interval: it was"),
    ],
)  # fmt: skip
def test_sentences_of_where_it_pays(loads: list[Load], says: str) -> None:
    assert says in pays(loads)


@given(st.floats(min_value=0.1, max_value=4), st.floats(min_value=0, max_value=1), st.floats(min_value=0, max_value=1))
def test_an_interval_that_holds_one_shows_no_difference(ratio: float, below: float, above: float) -> None:
    state = Load(1, ratio, [ratio - below, ratio + above]).state
    assert (state == FASTER) == (ratio - below > 1) and (state == SLOWER) == (ratio + above < 1)


def test_bytes_allow_more_for_fewer_bits_and_less_where_the_cache_counts() -> None:
    params = load_params(ROOT / "params.yaml")
    config = config_of(params.models["llama-8b-random"].source)
    assert config

    def allowed(recipe: str, workload: str, at: int) -> float:
        value, why = bytes_ratio(params, CellIds("llama-8b-random", recipe, "vllm", "h200"), config, workload, at)
        assert value is not None, why
        return value

    assert allowed("bf16", "brief-128-128", 1) == 1
    assert 1.7 < allowed("fp8-dynamic", "brief-128-128", 1) < 2 < allowed("int4-g128", "brief-128-128", 1) < 4
    assert allowed("fp8-dynamic", "brief-2048-512", 64) < allowed("fp8-dynamic", "brief-128-128", 64)


def test_the_same_number_is_in_the_json(project: Path) -> None:
    render(project)
    report = json.loads((project / "artifacts/report/report.json").read_text(encoding="utf-8"))
    (row,) = report["tuning"]["scaled"]
    assert row["loads"][0]["efficiency"]["cells"] == pytest.approx(0.98, rel=0.01)

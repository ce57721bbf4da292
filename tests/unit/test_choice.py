"""Objectives, operating points, cost, scaling and the recommendation. Every number is invented."""

from __future__ import annotations

import csv
import json
import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.choice.answers import answers, scaling
from pipeline.choice.candidates import NO_PRICE, Candidate, team_facts
from pipeline.choice.objective import MET, MISSED, OPEN, Slo, attained, missed_bounds, requests_needed
from pipeline.choice.recommend import pareto, recommend
from pipeline.choice.timed import (
    TimedPoint,
    knee,
    operating_point,
    read_requests,
    stops_being_faster,
    usd_per_million,
)
from pipeline.choice.words import overview
from pipeline.choice.words import text as recommendation_text
from pipeline.errors import InputError
from pipeline.params import load_params, load_yaml
from pipeline.specs import Target

ROOT = Path(__file__).parents[2]
CHAT = Slo(ttft_ms=200, tpot_ms=50, attainment=0.9, workloads=["w"], source="a test")
OFFLINE = Slo(workloads=["w"], source="a test")
GPU = Target(device="cuda", gpu="G", sm=90, memory_gib=80, price_usd_per_h=3.6)


def requests(n: int, ttft: float = 100.0, missed: int = 0) -> list[dict[str, Any]]:
    """n requests of which `missed` are too slow."""
    slow = [{"ttft_ms": 999.0, "tpot_ms": 10.0, "e2e_ms": 999.0, "failed": False}] * missed
    return slow + [{"ttft_ms": ttft, "tpot_ms": 10.0, "e2e_ms": 500.0, "failed": False}] * (n - missed)


def point(
    load: float, tok_s: float, ratio: float = 1.2, missed: int = 0, n: int = 100, loop: str = "closed"
) -> TimedPoint:
    """A load point whose interval is +-0.05 around `ratio`."""
    name = f"c{load:g}" if loop == "closed" else f"r{load:g}"
    return TimedPoint("w", name, loop, load, tok_s, 10.0, ratio, [ratio - 0.05, ratio + 0.05], 64.0,
                      rows=requests(n, missed=missed), latency={"e2e_ms": 1000 / ratio})  # fmt: skip


def candidate(recipe: str, points: list[TimedPoint], quality: str = "PASS", **changes: Any) -> Candidate:
    """A cell of recipe@vllm on target g."""
    made = Candidate(
        cell=f"m.{recipe}.vllm.g", recipe=recipe, runtime="vllm", target="g", is_baseline=recipe == "bf16",
        quality=quality, quality_why=[] if quality == "PASS" else [f"task: damage of {recipe}"], served=True,
        why_not_served="", points=points, bench_problem=None if points else "bench.json is missing", has_eval=True,
        weight_bytes=1e8, perplexity_ratio=1.0, startup_s=30.0, device=GPU, planned=True,
    )  # fmt: skip
    return replace(made, **changes)


def test_an_objective_needs_299_requests_to_be_shown_at_99_percent() -> None:
    assert [requests_needed(a) for a in (0.9, 0.95, 0.99)] == [29, 59, 299]
    strict = CHAT.model_copy(update={"attainment": 0.99})
    assert attained(requests(299), strict).verdict == MET
    found = attained(requests(298), strict)
    assert found.verdict == OPEN
    assert found.reason == "298 of 298 requests within the limits; 99% needs at least 299"
    assert attained(requests(300, missed=30), strict).verdict == MISSED
    assert attained(requests(300, missed=3), strict).verdict == OPEN


def test_failed_and_unstreamed_requests_do_not_meet_an_objective() -> None:
    rows = requests(100)
    assert attained([r | {"failed": True} for r in rows], CHAT).verdict == MISSED
    found = attained([r | {"ttft_ms": None} for r in rows], CHAT)
    assert (found.verdict, found.reason) == (OPEN, "ttft_ms was not measured (answers were not streamed)")
    assert attained([], CHAT).verdict == OPEN
    assert attained(rows, OFFLINE).verdict == MET


@given(st.integers(1, 400), st.data())
def test_bounds_of_a_share_hold_it(n: int, data: st.DataObject) -> None:
    missed = data.draw(st.integers(0, n))
    upper, lower = missed_bounds(missed, n)
    assert 0 <= lower <= missed / n <= upper <= 1


def test_mlperf_limits_are_marked_as_no_mlperf_result() -> None:
    params = load_params(ROOT / "params.yaml")
    marked = [slo for slo in params.slos.values() if slo.mlperf_style]
    assert len(marked) >= 4
    assert all("MLPerf-style, not an MLPerf result" in slo.words() for slo in marked)
    assert {"chat", "agent", "rag", "code-completion", "offline"} <= set(params.slos)
    assert all(slo.source for slo in params.slos.values())


def test_the_operating_point_is_the_highest_load_that_meets_the_objective() -> None:
    loads = [point(1, 50), point(2, 90), point(4, 150), point(8, 200, missed=40), point(16, 220)]
    best, why = operating_point(loads, CHAT)
    assert best is loads[2]
    assert why == "highest load that meets it; missed at c8: 40 of 100 requests beyond the limits"
    assert operating_point([point(1, 50, missed=90)], CHAT)[0] is None
    best, why = operating_point([point(1, 50), point(2, 90, n=5)], CHAT)
    assert best and best.name == "c1" and "not shown beyond (c2:" in why
    assert operating_point(loads, OFFLINE)[0] is loads[4]
    assert "so the limit may lie above" in operating_point([point(1, 50)], CHAT)[1]


def test_the_knee_is_where_gains_fade_or_the_objective_ends() -> None:
    loads = [point(1, 50), point(2, 95), point(4, 170), point(8, 180), point(16, 185)]
    found, why = knee(loads, OFFLINE)
    assert found is loads[2]
    assert why == "the next doubling adds 6% output tokens/s"
    assert knee([point(1, 50), point(4, 200)], OFFLINE)[1].startswith("throughput still grows")
    assert knee([point(1, 50), point(4, 51)], OFFLINE)[0].name == "c1"  # type: ignore[union-attr]
    assert knee([loads[0], loads[1], point(4, 170, missed=60)], CHAT)[0] is loads[1]
    assert knee([point(1, 50)], OFFLINE)[0] is None


@pytest.mark.parametrize(("ratios", "said"), [
    ((1.5, 1.3, 1.02, 0.9), "from c4 on"),
    ((1.5, 1.4, 1.3, 1.2), "faster up to the highest load that was timed (c8)"),
    ((0.9, 0.9, 1.0, 1.0), "not shown to be faster at any load (c1 to c8)"),
])  # fmt: skip
def test_where_a_cell_stops_being_faster(ratios: tuple[float, ...], said: str) -> None:
    assert stops_being_faster([point(2**i, 10, r) for i, r in enumerate(ratios)]) == said


def test_cost_is_price_over_tokens_and_never_invented() -> None:
    assert usd_per_million(3.6, 2, 1000.0) == pytest.approx(2.0)
    assert usd_per_million(None, 1, 1000.0) is None
    free = candidate("int8", [point(4, 100)], device=GPU.model_copy(update={"price_usd_per_h": None}))
    assert free.at(OFFLINE).cost == NO_PRICE == "not computed (no price given)"
    assert candidate("int8", [point(4, 1000)]).at(OFFLINE).cost == "1.000 USD/M output tokens"


def test_the_winner_is_proven_and_what_leads_unproven_is_named() -> None:
    cells = [
        candidate("bf16", [point(4, 100, 1.0)]),
        candidate("int8", [point(4, 130, 1.3)], weight_bytes=5e7, perplexity_ratio=1.01),
        candidate("fp8", [point(4, 150, 1.5)], "INCONCLUSIVE", weight_bytes=5e7, perplexity_ratio=1.02),
        candidate("int4", [point(4, 170, 1.7)], "FAIL", weight_bytes=3e7, perplexity_ratio=1.4),
        candidate("gptq", []),
    ]
    found = recommend(cells, "chat", CHAT, "throughput")
    assert (found["winner"], found["runner_up"]) == ("m.int8.vllm.g", "m.bf16.vllm.g")
    assert found["table"][0]["recipe"] == "int8"
    assert any("intervals over the same baseline do not overlap" in r for r in found["reasons"])
    changes = " | ".join(found["would_change"])
    assert "fp8 on vllm leads with 150.0 output tokens/s but is INCONCLUSIVE: task: damage of fp8" in changes
    assert "int4 on vllm leads with 170.0 output tokens/s but is FAIL" in changes
    assert "open-loop" in changes
    commands = [m["command"] for m in found["missing"]]
    assert "`uv run dvc repro benchmark@m.gptq.vllm.g`" in commands
    assert any("evaluation.tier: release" in c and "evaluate@m.fp8.vllm.g" in c for c in commands)
    assert not any("m.int4" in c for c in commands)
    assert set(found["pareto"]) == {"m.bf16.vllm.g", "m.int8.vllm.g", "m.fp8.vllm.g"}
    assert found["team"]["vllm"]["source"]
    assert "no cell" not in recommendation_text(found)


def test_aims_rank_differently_and_both_runtimes_compete() -> None:
    fast = candidate("fp8", [point(1, 50, 1.1), point(8, 300, 1.2)], weight_bytes=9e7)
    small = candidate("int4", [point(1, 80, 1.9), point(8, 200, 0.8)], weight_bytes=3e7)
    engine = candidate(
        "awq", [point(8, 400, 1.2)], runtime="trtllm-engine", cell="m.awq.trtllm-engine.g", weight_bytes=4e7
    )
    winners = {aim: recommend([fast, small, engine], "o", OFFLINE, aim)["winner"] for aim in
               ("throughput", "latency", "cost", "memory")}  # fmt: skip
    assert winners == {"throughput": "m.awq.trtllm-engine.g", "latency": "m.int4.vllm.g",
                       "cost": "m.awq.trtllm-engine.g", "memory": "m.int4.vllm.g"}  # fmt: skip
    team = recommend([fast, engine], "o", OFFLINE, "cost")["team"]
    assert "compiled on the target GPU" in team["trtllm-engine"]["first_deployment"]
    assert set(team_facts()) == {"vllm", "trtllm-bundle", "trtllm-engine"}


def test_without_evidence_there_is_no_winner_but_a_command() -> None:
    cells = [candidate("int8", [], "NOT MEASURED", has_eval=False, planned=False), candidate("fp8", [], served=False)]
    found = recommend(cells, "chat", CHAT, "throughput")
    assert found["winner"] is None
    assert found["decided"] is False
    (item,) = found["missing"]
    assert item["what"] == "anything on g: no cell was measured there"
    assert item["command"].startswith("set measure: on-target")
    assert "`uv run dvc repro --glob '*@*.g'` on that machine" in item["command"]
    assert "no cell is proven yet" in overview([found])
    known = [replace(c, on_target=True) for c in cells]
    assert recommend(known, "chat", CHAT, "throughput")["missing"][0]["command"].startswith("`uv run dvc repro --glob")
    half = [candidate("bf16", [point(4, 9)]), candidate("int8", [], on_target=True)]
    (item,) = recommend(half, "chat", CHAT, "throughput")["missing"]
    assert item["command"] == "`uv run dvc repro --glob 'benchmark@m.int8.vllm.g'` on a host that is g"
    other = candidate("int8", [replace(point(4, 9), workload="x")])
    (item,) = recommend([other], "chat", CHAT, "throughput")["missing"]
    assert item["what"] == "speed under w of int8"
    assert item["command"].startswith("add one to benchmark_gpu in params.yaml")
    own = replace(other, device=Target(device="cuda", gpu="G", sm=90, memory_gib=80, workloads=["x"]))
    (item,) = recommend([own], "chat", CHAT, "throughput")["missing"]
    assert item["command"].startswith("add one to targets.g.workloads in params.yaml")


def test_a_task_without_more_items_is_not_settled_by_a_larger_tier() -> None:
    open_ = candidate(
        "int8", [point(4, 9)], "INCONCLUSIVE", quality_why=["facts: about 883 would (400 items is all there is)"]
    )
    (item,) = recommend([open_], "chat", CHAT, "throughput")["missing"][:1]
    assert item["command"].startswith("another task (evaluation.tasks in params.yaml), or more items in this one")
    near = replace(open_, quality_why=["facts: damage 3 pp, not shown with 400 items; too near"])
    assert recommend([near], "chat", CHAT, "throughput")["missing"][0]["command"].startswith("another task")
    assert "stages/client/facts.yaml" in item["command"] and "stages.client.make_tasks" in item["command"]


def test_every_printed_command_finds_its_stages() -> None:
    """A pattern, and a stage of another dvc.yaml, need --glob and quotes: `dvc repro *@x` finds nothing."""
    for answer in answers(ROOT):
        for item in answer["missing"]:
            for command in re.findall(r"`([^`]*dvc repro[^`]*)`", item["command"]):
                words = shlex.split(command)
                assert words[:3] == ["uv", "run", "dvc"], command
                if "*" in command or ".h200" in command:
                    assert "--glob" in words and "'" in command, command


def test_random_weights_are_timed_and_never_recommended() -> None:
    cell = candidate("fp8", [point(4, 150)], "NOT MEASURED", has_eval=False, speed_only=True)
    found = recommend([replace(cell, quality_why=["random weights: speed only"])], "o", OFFLINE, "throughput")
    assert found["winner"] is None
    assert found["missing"] == []
    assert found["would_change"] == [
        "fp8 on vllm leads with 150.0 output tokens/s; quality not measured (random weights: speed only)"
    ]


def test_a_perplexity_ratio_that_nothing_gave_is_not_printed_as_one() -> None:
    random = candidate("fp8", [point(4, 150)], "NOT MEASURED", speed_only=True, perplexity_ratio=None)
    cells = [candidate("bf16", [point(4, 100)]), replace(random, quality_why=["random weights: speed only"])]
    lines = recommendation_text(recommend(cells, "o", OFFLINE, "throughput")).splitlines()
    (baseline,), (other,) = ([x for x in lines if x.startswith(f"  {name} ")] for name in ("bf16", "fp8"))
    assert "reference" in baseline and "1.000" not in baseline
    assert "not judged (random weights)" in other


def test_without_limits_the_best_of_all_workloads_counts_and_is_named() -> None:
    """The first workload of the list must not win in silence."""
    cell = candidate("fp8", [point(4, 50), replace(point(4, 150), workload="v"), replace(point(1, 9), workload="v")])
    at = cell.at(OFFLINE.model_copy(update={"workloads": ["w", "v"]}))
    assert (at.workload, at.point and at.point.tok_s) == ("v", 150)
    assert at.why == "most output tokens/s of all loads of w and v"
    assert cell.at(OFFLINE).workload == "w"
    assert cell.at(CHAT.model_copy(update={"workloads": ["w", "v"]})).workload == "w"


def test_without_a_winner_one_cell_leads_and_it_is_the_best() -> None:
    random = {"quality_why": ["random weights: speed only"], "speed_only": True}
    timed = (("bf16", 100), ("fp8", 150))
    cells = [candidate(name, [point(4, tok_s)], "NOT MEASURED", **random) for name, tok_s in timed]
    first, second = recommend(cells, "o", OFFLINE, "throughput")["would_change"]
    assert first.startswith("fp8 on vllm leads with 150.0 output tokens/s; quality not measured")
    assert second.startswith("bf16 on vllm has 100.0 output tokens/s; quality not measured")


def test_an_order_within_noise_is_not_called_settled() -> None:
    found = recommend([candidate("int8", [point(4, 130, 1.30)]), candidate("fp8", [point(4, 128, 1.28)])],
                      "o", OFFLINE, "throughput")  # fmt: skip
    assert any("is not settled" in r for r in found["reasons"])
    assert "a longer run in A B B A order may put the runner-up first" in found["would_change"]


@given(st.lists(st.tuples(*[st.integers(1, 5)] * 3), min_size=1, max_size=12))
def test_nothing_beats_a_cell_of_the_pareto_set(numbers: list[tuple[int, int, int]]) -> None:
    rows = []
    for i, (speed, size, ppl) in enumerate(numbers):
        cell = candidate(f"r{i}", [point(4, speed)], weight_bytes=float(size), perplexity_ratio=float(ppl))
        rows.append((cell, cell.at(OFFLINE)))
    best = pareto(rows)
    assert best
    chosen = {id(r[0]) for r in best}
    for i, (speed, size, ppl) in enumerate(numbers):
        beaten = any(s >= speed and z <= size and p <= ppl and (s, z, p) != (speed, size, ppl) for s, z, p in numbers)
        assert (id(rows[i][0]) in chosen) != beaten


def test_steady_requests_of_the_candidate_are_read(tmp_path: Path) -> None:
    path = tmp_path / "requests.csv"
    head = "workload,point,side,leg,sent_s,steady,ttft_ms,tpot_ms,e2e_ms,output_tokens"
    rows = [
        "w,c1,B,2,0.0,0,1,1,1,8",
        "w,c1,B,2,0.1,1,100.5,10,500,8",
        "w,c1,A,1,0.1,1,7,7,7,8",
        "w,c1,B,2,0.2,error,,,,",
    ]
    path.write_text("\n".join([head, *rows]) + "\n", encoding="utf-8")
    found = read_requests(path)[("w", "c1")]
    assert [r["failed"] for r in found] == [False, True]
    assert found[0]["ttft_ms"] == 100.5
    assert found[1]["ttft_ms"] is None
    assert read_requests(tmp_path / "none.csv") == {}


def test_the_projects_own_results_give_an_answer_for_every_target_and_objective() -> None:
    found = answers(ROOT)
    params = load_params(ROOT / "params.yaml")
    assert {a["target"] for a in found} == {c["target"] for c in load_yaml(ROOT / "pipeline/plan.yaml", "p")["cells"]}
    assert {a["slo"] for a in found} == set(params.slos)
    for answer in found:
        # Nothing is open where every cell that is served is shown to miss the objective or FAILs the policy.
        served = [row for row in answer["table"] if row["served"]]
        settled = all(row["meets_objective"] is False or row["quality"] == "FAIL" for row in served)
        assert answer["winner"] or answer["missing"] or answer["would_change"] or (settled and answer["reasons"])
    with pytest.raises(InputError, match="Did you mean 'h200'"):
        answers(ROOT, target="h20")
    with pytest.raises(InputError, match="Did you mean 'chat'"):
        answers(ROOT, slo="chta")


def _results(root: Path, cell: str, tok_s: float) -> None:
    folder = root / "artifacts/results" / cell
    folder.mkdir(parents=True)
    side = {"output_tok_s": tok_s, "errors": 0, "output_tokens_ok": True, "steady": {"seconds": 10.0}}
    load = {"against": "baseline", "points": [{"name": "c4", "concurrency": 4, "candidate": side, "ratio": {}}]}
    (folder / "bench.json").write_text(
        json.dumps({"schema": "quantpress.bench/1", "workloads": {"w": load}}), encoding="utf-8"
    )
    with (folder / "requests.csv").open("w", newline="") as file:
        csv.writer(file).writerow(["workload"])


def test_several_gpus_report_their_scaling_efficiency(tmp_path: Path) -> None:
    params = load_params(ROOT / "params.yaml")
    one = params.targets["h200"]
    both = {"h200": one, "h200x4": one.model_copy(update={"count": 4})}
    params = params.model_copy(update={"targets": both})
    entry = {"model": "m", "recipe": "bf16", "runtime": "vllm", "verdict": "native", "reason": ""}
    cells = [entry | {"cell": f"m.bf16.vllm.{t}", "target": t} for t in both]
    for cell, tok_s in zip(cells, (100.0, 320.0), strict=True):
        _results(tmp_path, str(cell["cell"]), tok_s)
    (row,) = scaling(tmp_path, params, {"cells": cells})
    assert row["efficiency"] == pytest.approx(0.8)
    assert (row["gpus"], row["load"]) == (4, "c4")
    shutil.rmtree(tmp_path / "artifacts/results/m.bf16.vllm.h200")
    (row,) = scaling(tmp_path, params, {"cells": cells})
    assert "were not timed at a common load" in row["not_measured"]
    lonely = params.model_copy(update={"targets": {"h200x4": both["h200x4"]}})
    (row,) = scaling(tmp_path, lonely, {"cells": cells})
    assert row["not_measured"] == "params.yaml has no target of one NVIDIA H200"

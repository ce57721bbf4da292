"""Which measurement would decide: what is not known of cells that nothing speaks against, with the command to type."""

from __future__ import annotations

from pipeline.cells import repro_on
from pipeline.choice.candidates import At, Candidate
from pipeline.choice.objective import Slo, requests_needed
from pipeline.evidence.verdicts import FAIL, PASS

# No tier asks so many items as a verdict needs; see pipeline/evidence/summary.py, needs.
NO_ITEMS_HELP = ("is all there is", "too near")

Row = tuple[Candidate, At]
MEASURE = "set measure: on-target in its matrix row of params.yaml, `uv run python -m pipeline plan`, then "


def missing(rows: list[Row], slo: Slo) -> list[dict[str, str]]:
    """Return {what, command}, cells that lack the same together; failed cells and missed objectives are settled."""
    live = [(c, at) for c, at in rows if c.served and c.quality != FAIL and at.met is not False]
    if live and not any(c.has_eval or c.points for c, _ in rows if c.served):
        cell = live[0][0]
        what = f"anything on {cell.target}: no cell was measured there"
        command = f"`uv run dvc repro --glob '*@*.{cell.target}'` on that machine"
        planned = any(c.planned or c.on_target for c, _ in live)
        return [{"what": what, "command": command if planned else MEASURE + command}]
    wanted: dict[tuple[str, str, str], list[Candidate]] = {}
    for cell, at in live:
        for key in [*_quality(cell), *_speed(cell, at, slo)]:
            wanted.setdefault(key, []).append(cell)
    return [_item(*key, cells) for key, cells in wanted.items()]


def _item(what: str, first: str, stage: str, cells: list[Candidate]) -> dict[str, str]:
    who = ", ".join(c.recipe if c.runtime == "vllm" else f"{c.recipe} ({c.runtime})" for c in cells)
    names = [f"{stage}@{c.cell}" for c in cells]
    if stage == "*" or any(c.on_target for c in cells):
        return {"what": f"{what} of {who}", "command": first + repro_on(cells[0].target, *names)}
    return {"what": f"{what} of {who}", "command": f"{first}`uv run dvc repro {' '.join(names)}`"}


def _quality(cell: Candidate) -> list[tuple[str, str, str]]:
    why = "; ".join(cell.quality_why) or cell.quality.lower()
    if not (cell.planned or cell.on_target or cell.has_eval):
        return [("quality and speed", MEASURE, "*")]
    if cell.speed_only:
        return []
    if not cell.has_eval:
        return [("quality", "", "evaluate")]
    if cell.quality == PASS:
        return []
    if "not measured" in why or "not known" in why:
        return [(f"quality ({why})", "", "evaluate")]
    if any(words in why for words in NO_ITEMS_HELP):
        first = "another task (evaluation.tasks in params.yaml), or more items in this one"
        first += " (facts: rows and `items` in stages/client/facts.yaml, `python -m stages.client.make_tasks`), then "
        return [(f"quality ({why})", first, "evaluate")]
    return [(f"quality ({why})", "more items (evaluation.tier: release in params.yaml), then ", "evaluate")]


def _speed(cell: Candidate, at: At, slo: Slo) -> list[tuple[str, str, str]]:
    if cell.bench_problem:
        return [("speed", "", "benchmark")] if cell.planned or cell.on_target else []
    if at.workload is None:
        own = "benchmark" if cell.device.device == "cpu" else "benchmark_gpu"
        where = f"targets.{cell.target}.workloads" if cell.device.workloads else own
        first = f"add one to {where} in params.yaml, then "
        return [(f"speed under {' or '.join(slo.workloads)}", first, "benchmark")]
    if at.met is None:
        first = f"{requests_needed(slo.attainment)} requests and 2 x concurrency more per point of {at.workload}, then "
        return [(f"whether the objective is met ({at.why})", first, "benchmark")]
    return []

"""Which measurement would decide: what is not known of cells that nothing speaks against, with the command to type."""

from __future__ import annotations

from pipeline.choice.candidates import At, Candidate
from pipeline.choice.objective import Slo, requests_needed
from pipeline.evidence.verdicts import FAIL, PASS

Row = tuple[Candidate, At]


def missing(rows: list[Row], slo: Slo) -> list[dict[str, str]]:
    """Return {what, command}, cells that lack the same together; failed cells and missed objectives are settled."""
    wanted: dict[tuple[str, str, str], list[str]] = {}
    for cell, at in rows:
        if not cell.served or cell.quality == FAIL or at.met is False:
            continue
        for key in [*_quality(cell), *_speed(cell, at, slo)]:
            wanted.setdefault(key, []).append(cell.cell)
    found = []
    for (what, first, stage), cells in wanted.items():
        if stage == "all":
            target = cells[0].rsplit(".", 1)[1]
            found.append({"what": what, "command": f"{first}`uv run dvc repro --glob '*@*.{target}'` on that machine"})
            continue
        named = " ".join(f"{stage}@{cell}" for cell in dict.fromkeys(cells))
        who = ", ".join(cell.split(".")[1] for cell in dict.fromkeys(cells))
        found.append({"what": f"{what} of {who}", "command": f"{first}`uv run dvc repro {named}`"})
    return found


def _quality(cell: Candidate) -> list[tuple[str, str, str]]:
    why = "; ".join(cell.quality_why) or cell.quality.lower()
    if not cell.planned and not cell.has_eval and cell.bench_problem:
        first = "set measure: true in its matrix row of params.yaml, `uv run python -m pipeline plan`, then "
        return [(f"anything on {cell.target}: no cell was measured there", first, "all")]
    if not cell.has_eval:
        return [("quality", "", "evaluate")]
    if cell.quality == PASS:
        return []
    if "not measured" in why or "not known" in why:
        return [(f"quality ({why})", "", "evaluate")]
    return [(f"quality ({why})", "more items (evaluation.tier: release in params.yaml), then ", "evaluate")]


def _speed(cell: Candidate, at: At, slo: Slo) -> list[tuple[str, str, str]]:
    if cell.bench_problem:
        return [("speed", "", "benchmark")] if cell.planned else []
    if at.workload is None:
        where = "benchmark" if cell.device.device == "cpu" else "benchmark_gpu"
        first = f"add one to {where} in params.yaml, then "
        return [(f"speed under {' or '.join(slo.workloads)}", first, "benchmark")]
    if at.met is None:
        first = f"{requests_needed(slo.attainment)} requests and 2 x concurrency more per point of {at.workload}, then "
        return [(f"whether the objective is met ({at.why})", first, "benchmark")]
    return []

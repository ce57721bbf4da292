"""Results of other benchmark tools, with the unit and the meaning of every number; unlike meanings are never compared.

The adapters are data (imported.yaml). What is imported was not measured by this project: it is kept as its own kind of
record, `quantpress.imported-bench/1`, and the report never shows it as a cell's speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline import jsonio, manifest
from pipeline.errors import InputError, unknown
from pipeline.speed.definitions import DEFINITIONS, SAMPLES_NEEDED

SCHEMA = "quantpress.imported-bench/1"
TO_MS = {"ms": 1.0, "s": 1000.0}


class Row(NamedTuple):
    """One number beside another's: `why` says why there is no ratio, None where there is one."""

    metric: str
    statistic: str
    a: float | None
    b: float | None
    ratio: float | None
    why: str | None


@cache
def _table() -> dict[str, Any]:
    return dict(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")))


def tools() -> list[str]:
    """Return the tools whose results can be imported."""
    return sorted(_table()["tools"])


def meaning(definition: str) -> str:
    """Return the text of a definition, of the imported ones or of this project's own."""
    own = {d.id: d.text for d in DEFINITIONS.values()}
    return str(_table()["definitions"].get(definition) or own[definition])


def look_up(content: Any, path: str) -> Any:
    """Return what a dotted path leads to, None where there is nothing."""
    for key in path.split("."):
        content = content.get(key) if isinstance(content, Mapping) else None
    return content


def import_result(path: Path, tool: str, model: str | None = None) -> dict[str, Any]:
    """Read the JSON of a benchmark tool.

    Args:
        path: of the result.
        tool: who wrote it, one of `tools`.
        model: this project's model id, if known.

    Raises:
        InputError: an unknown tool, not this tool's file, a number that cannot be, or failed requests.
    """
    if tool not in tools():
        raise unknown("benchmark tool", tool, tools(), "pipeline/speed/imported.yaml")
    entry, content = _table()["tools"][tool], jsonio.read_json(path)
    missing = [key for key in entry["needs"] if not isinstance(content, dict) or content.get(key) is None]
    if missing:
        also = [name for name in tools() if _looks_like(content, name)]
        hint = f" It looks like {also[0]}'s." if also else ""
        raise InputError(f"{path} is no result of {entry['about']}: it has no {', '.join(missing[:3])}.{hint}")
    failed = look_up(content, entry["failed"]) if "failed" in entry else 0
    if failed:
        raise InputError(f"{path}: {failed} requests failed; the speed of the others says little. Measure again.")
    samples = look_up(content, entry["samples"])
    samples = len(samples) if isinstance(samples, list) else samples
    metrics: dict[str, Any] = {}
    for name, statistic, where, unit, definition in entry["metrics"]:
        found = metrics.setdefault(name, {"definition": definition, "unit": _unit(unit), "text": meaning(definition)})
        found[statistic] = _number(content, where, unit, path, entry, statistic, samples)
    return {
        "schema": SCHEMA,
        "tool": tool,
        "source": entry["source"],
        "file": {"name": path.name, "sha256": manifest.sha256(path)},
        "model": model,
        "facts": {name: look_up(content, where) for name, where in entry["facts"].items()},
        "samples": samples,
        "metrics": metrics,
        "note": "imported: not measured by this project",
    }


def _looks_like(content: Any, tool: str) -> bool:
    return isinstance(content, dict) and all(content.get(k) is not None for k in _table()["tools"][tool]["needs"])


def _unit(unit: str) -> str:
    return "ms" if unit in TO_MS else unit


def _number(
    content: Any, where: str, unit: str, path: Path, entry: Mapping[str, Any], statistic: str, samples: Any
) -> float | str:
    """Return a value in our unit, or a text that says why there is none."""
    value = look_up(content, where)
    if value is None:
        section = where.split(".")[0]
        return f"not measured ({entry['absent'].get(section) or f'the file has no {where}'})"
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise InputError(f"{path}: {where} is {value!r}, which is no time and no rate.")
    needed = SAMPLES_NEEDED.get(statistic, 1)
    if isinstance(samples, int) and samples < needed:
        return f"not measured ({samples} samples, {statistic} needs {needed})"
    return float(value) * TO_MS.get(unit, 1.0)


def summary(made: Mapping[str, Any]) -> str:
    """Return every number of an imported record with its unit and definition, for a terminal."""
    lines = []
    for name, metric in made["metrics"].items():
        numbers = {key: value for key, value in metric.items() if key not in ("definition", "unit", "text")}
        shown = [f"{key} {value if isinstance(value, str) else round(value, 3)}" for key, value in numbers.items()]
        lines.append(f"{name:16} {metric['definition']:32} {metric['unit']:5} {', '.join(shown)}")
    return "\n".join(lines)


def read(path: Path) -> dict[str, Any]:
    """Read an imported record, or one load of this project's bench.json as `FILE#workload/point`.

    Raises:
        InputError: neither of them.
    """
    name, _, place = str(path).partition("#")
    content = jsonio.read_json(Path(name))
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema == SCHEMA:
        return dict(content)
    if isinstance(schema, str) and schema.startswith("quantpress.bench/"):
        return _own(content, place, name)
    raise InputError(f"{name} is neither an imported result nor a bench.json (schema {schema!r}). Import it first.")


def _own(content: Mapping[str, Any], place: str, name: str) -> dict[str, Any]:
    """Return one load of a bench.json with its definitions."""
    workload, _, load = place.partition("/")
    workloads = content["workloads"]
    if workload not in workloads:
        raise unknown("workload", workload, workloads, f"{name} (write it as {name}#WORKLOAD/CONCURRENCY)")
    points = {str(p.get("concurrency") or p.get("rate")): p for p in workloads[workload]["points"]}
    if load not in points:
        raise unknown("load", load, points, f"{name}#{workload}")
    side, definitions = points[load]["candidate"], content["definitions"]
    metrics: dict[str, Any] = {}
    for metric in ("ttft_ms", "tpot_ms", "e2e_ms", "inter_chunk_ms", "output_tok_s", "request_s"):
        said, value = definitions.get(metric), side.get(metric)
        if said is None or value is None:
            continue
        identity = said["id"] if isinstance(said, Mapping) else str(said).split(":")[0]
        known = value if isinstance(value, Mapping) else {"mean": value}
        metrics[metric] = {"definition": identity, "unit": "ms" if metric.endswith("_ms") else "tok/s"} | {
            key: known[key] for key in ("mean", "p50", "p90", "p95", "p99") if known.get(key) is not None
        }
    return {"schema": SCHEMA, "tool": "quantpress", "metrics": metrics, "facts": {"cell": content.get("cell")}}


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Row]:
    """Yield every statistic that both have: a ratio a / b for like definitions, the reason for unlike ones."""
    for metric, mine in a["metrics"].items():
        theirs = b["metrics"].get(metric)
        if theirs is None:
            continue
        for statistic in ("mean", "p50", "p90", "p95", "p99"):
            x, y = mine.get(statistic), theirs.get(statistic)
            if x is None or y is None:
                continue
            numbers = isinstance(x, int | float) and isinstance(y, int | float)
            left, right = (x if isinstance(x, int | float) else None), (y if isinstance(y, int | float) else None)
            why: str | None
            if mine["definition"] != theirs["definition"]:
                why = f"unlike definitions: {mine['definition']} and {theirs['definition']}"
            elif mine["unit"] != theirs["unit"]:
                why = f"unlike units: {mine['unit']} and {theirs['unit']}"
            else:
                why = None if numbers and y else str(x if left is None else y)
            yield Row(metric, statistic, left, right, x / y if why is None else None, why)


def need_comparable(rows: list[Row], metric: str | None) -> None:
    """Refuse a comparison of numbers that mean different things.

    Raises:
        InputError: the asked metric, or every metric, has unlike definitions or no numbers.
    """
    asked = [r for r in rows if metric in (None, r.metric)]
    if not asked:
        raise InputError(f"The two results share no {metric or 'metric'}.")
    if all(r.why for r in asked):
        said = "; ".join(dict.fromkeys(f"{r.metric}: {r.why}" for r in asked))
        raise InputError(f"Not compared: {said}. Measure both with one tool.")


def table(rows: list[Row]) -> str:
    """Return the comparison for a terminal."""
    lines = [f"{'METRIC':16} {'STAT':5} {'A':>12} {'B':>12} {'A/B':>8}  NOTE"]
    for row in rows:
        a, b = (f"{v:12.3f}" if v is not None else f"{'none':>12}" for v in (row.a, row.b))
        ratio = f"{row.ratio:8.3f}" if row.ratio is not None else f"{'none':>8}"
        lines.append(
            f"{row.metric:16} {row.statistic:5} {a} {b} {ratio}  {'not compared (' + row.why + ')' if row.why else ''}"
        )
    return "\n".join(lines)

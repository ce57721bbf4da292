"""Print the support matrix for a terminal, as JSON, and as docs/support.md (which a test keeps fresh)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import unknown
from pipeline.specs import Params, Target
from pipeline.support import device_of, runtimes
from pipeline.support.table import DEVICES, VERDICTS, Row, tables

DOCS = Path("docs/support.md")
MARKS = {"native": "native", "fallback": "fallback", "unknown": "?", "refused": "-"}
LEGEND = (
    "native: the format's own arithmetic; fallback: stored in one format, computed in another, so smaller and not "
    "faster; ?: no source says, refused until params.yaml names it under allow_unknown; -: refused, with a reason"
)
_WIDTH = 110


def names_of(row: Row) -> set[str]:
    """Return what `--format` may call a row: its format, its name, each of its methods."""
    return {row.format, row.name.lower().replace(" ", "-").replace(",", ""), *(row.methods or [])}


def entries(
    fmt: str | None = None, device: str | None = None, runtime: str | None = None, allowed: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return one dict for each row and device, in the order of the files; None filters nothing.

    Args:
        fmt: a format, a row's name with dashes ('awq-w4a16') or a method ('awq').
        device: 'cpu' or an SM number.
        runtime: one of `runtimes()`.
        allowed: `format.runtime.device` of unknown entries that params.yaml allows.

    Raises:
        InputError: no such format or runtime (nearest name given).
    """
    every = [(table, row) for table in tables().values() for row in table.rows]
    known = {name for _, row in every for name in names_of(row)}
    if fmt is not None and fmt not in known:
        raise unknown("format", fmt, known, "the support matrix")
    if runtime is not None and runtime not in runtimes():
        raise unknown("runtime", runtime, runtimes(), "the support matrix")
    found = []
    for table, row in every:
        if (fmt and fmt not in names_of(row)) or (runtime and runtime != table.runtime):
            continue
        for name in DEVICES if device is None else (device,):
            entry = table.entry(row, name)
            override = entry.verdict == "unknown" and f"{row.format}.{table.runtime}.{name}" in set(allowed)
            found.append({
                "runtime": table.runtime, "versions": row.versions, "format": row.format, "name": row.name,
                "methods": row.methods, "layouts": row.layouts, "group_sizes": row.group_sizes, "device": name,
                "verdict": entry.verdict, "reason": entry.reason, "sources": list(entry.sources), "allowed": override,
            })  # fmt: skip
    return found


def device_named(name: str, targets: Mapping[str, Target]) -> str:
    """Return the device of a target id, of 'cpu' or of an SM such as 'sm89'.

    Raises:
        InputError: it is none of these (nearest name given).
    """
    if name in targets:
        return device_of(targets[name])
    short = name.lower().removeprefix("sm")
    if short in DEVICES:
        return short
    raise unknown("target", name, [*targets, *(f"sm{d}" for d in DEVICES if d != "cpu")], "params.yaml")


def allowed_devices(params: Params) -> set[str]:
    """Return `format.runtime.device` for each `format.runtime.target` under allow_unknown."""
    found = set()
    for text in params.allow_unknown:
        fmt, runtime, target = text.split(".")
        found.add(f"{fmt}.{runtime}.{device_of(params.targets[target])}")
    return found


def label(row: dict[str, Any]) -> str:
    """Return how a row's on-disk forms and group sizes are printed."""
    stored = ", ".join(row["layouts"]) if row["layouts"] else "any checkpoint"
    return stored + (f", group size {' '.join(map(str, row['group_sizes']))}" if row["group_sizes"] else "")


def _rows(found: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Put the entries of one row together."""
    rows: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for entry in found:
        key = (entry["runtime"], entry["format"], entry["name"], str(entry["layouts"]), entry["versions"])
        rows.setdefault(key, []).append(entry)
    return list(rows.values())


def grid(found: list[dict[str, Any]]) -> str:
    """Return one line a row with a column a device, a block a runtime."""
    lines: list[str] = []
    runtime = None
    for row in _rows(found):
        first = row[0]
        if first["runtime"] != runtime:
            runtime = first["runtime"]
            heads = "".join(f"{d if d == 'cpu' else f'SM{d}':9}" for d in (e["device"] for e in row))
            lines += ["", f"{runtime:30} {heads}STORED AS"]
        marks = "".join(f"{MARKS[e['verdict']] + ('!' if e['allowed'] else ''):9}" for e in row)
        lines.append(f"  {first['name']:28} {marks}{label(first)}")
    return "\n".join([*lines, "", *_wrapped(LEGEND, "")]).strip("\n")


def _grouped(row: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Put the devices of a row that share verdict, reason and sources together: ('SM80, SM86', entry)."""
    groups: dict[str, tuple[list[str], dict[str, Any]]] = {}
    for entry in row:
        key = f"{entry['verdict']}|{entry['reason']}|{entry['sources']}|{entry['allowed']}"
        name = "CPU" if entry["device"] == "cpu" else f"SM{entry['device']}"
        groups.setdefault(key, ([], entry))[0].append(name)
    return [(", ".join(names), entry) for names, entry in groups.values()]


def details(found: list[dict[str, Any]]) -> str:
    """Return every verdict with its reason and sources."""
    lines: list[str] = []
    runtime = None
    for row in _rows(found):
        first = row[0]
        if first["runtime"] != runtime:
            runtime = first["runtime"]
            lines += ["", runtime]
        lines.append(f"  {first['name']} ({first['format']}; {label(first)}; {runtime} {first['versions']})")
        for devices, entry in _grouped(row):
            mark = ", allowed by params.yaml" if entry["allowed"] else ""
            lines += _wrapped(f"{devices}: {entry['verdict']}{mark}: {entry['reason']}", "    ")
            lines += _wrapped(f"source: {'; '.join(entry['sources']) or 'none'}", "      ")
    return "\n".join(lines).strip("\n")


def _wrapped(text: str, indent: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_long_words=False)


def docs() -> str:
    """Return docs/support.md."""
    lines = [
        "# What runs where", "",
        "Generated from `pipeline/support/*.yaml` by `uv run python -m pipeline support --write-docs`; a test fails",
        "when it is stale. Do not edit.", "",
        f"{LEGEND[0].upper()}{LEGEND[1:]}.", "",
        "`uv run python -m pipeline support --target l40s` prints one column with reasons, `--format awq` one format.",
        "",
    ]  # fmt: skip
    for table in tables().values():
        versions = ", ".join(f"{version} on {kind}" for kind, version in table.planned_version.items())
        lines += [f"## {table.runtime}", "", f"Planned for {versions}.", ""]
        heads = ["CPU" if d == "cpu" else f"SM{d}" for d in DEVICES]
        lines += [f"| format | stored as | versions | {' | '.join(heads)} |", "|---|---|---|" + "---|" * len(heads)]
        rows = _rows(entries(runtime=table.runtime))
        for row in rows:
            marks = " | ".join(MARKS[entry["verdict"]] for entry in row)
            lines.append(f"| {row[0]['name']} | {label(row[0])} | `{row[0]['versions']}` | {marks} |")
        lines += ["", f"Why, {table.runtime}:", ""]
        for row in rows:
            lines.append(f"- **{row[0]['name']}**, {label(row[0])}")
            for devices, entry in _grouped(row):
                keys = [key for key, text in table.sources.items() if text in entry["sources"]]
                lines.append(f"  - {devices}: {entry['verdict']}: {entry['reason']} [{', '.join(keys) or 'no source'}]")
        lines += ["", f"Sources, {table.runtime}:", ""]
        lines += [f"- [{key}] {text}" for key, text in table.sources.items()] + [""]
    assert set(MARKS) == set(VERDICTS)
    return "\n".join(lines)

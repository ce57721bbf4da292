"""What a tuning run proposes for a cell: each variant that paid, the measurement that shows why, the lines to write.

Nothing here changes a cell: a proposal is text, and the user's own hand puts it into params.yaml.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.report.sources import Doc, plain, read_doc
from pipeline.speed.definitions import BUSY_PCT
from pipeline.tuning.rank import SCHEMA, Proposal, judge, margins, proposals
from pipeline.tuning.served import changes, served_as
from pipeline.tuning.spec import OWN

NOTHING = "nothing is shown to beat the cell's own options"


class Offer(NamedTuple):
    """A variant that is proposed: where it won, what it did at the other loads, and how to have it.

    `lines` are for params.yaml, empty where a note says what to do instead.
    """

    variant: str
    what: str
    won: list[str]
    elsewhere: list[str]
    lines: list[str]
    notes: list[str]
    changes_answers: bool


class Tuned(NamedTuple):
    """A cell's tune.json as read: `problem` says why it proposes nothing, `measured` on what it was timed."""

    cell: str
    path: str
    problem: str | None
    measured: str
    offers: list[Offer]


def read_tune(root: Path, cell: str) -> Doc | None:
    """Return a cell's tune.json, its `problem` set where it is malformed or stale; None where there is none."""
    from pipeline.tuning.records import fault

    path = f"artifacts/results/{cell}/tune.json"
    if not (root / path).exists():
        return None
    doc = read_doc(root, path, SCHEMA)
    if doc.data is None:
        return doc
    if wrong := fault(doc.data, cell):
        return Doc(path, None, f"{path} cannot be read: {plain(wrong, 300)}")
    return Doc(path, None, stale) if (stale := staleness(root, doc, cell)) else doc


def staleness(root: Path, doc: Doc, cell: str) -> str | None:
    """Return why a tuning run says nothing of the packages as they are now; None where it does.

    Results of before 2026-12 have the cell's own checkpoint alone.
    """
    model, recipe, runtime, target = cell.split(".")
    own = {recipe: {"digest": doc.raw("package_digest"), "options": None}}
    for name, then in (doc.mapping("served") or own).items():
        now = served_as(root / f"artifacts/packages/{model}.{name}.{runtime}.{target}/deploy")
        if changed := changes(then, now):
            of = "" if name == recipe else f"{name}, which it tried, "
            return f"stale: {doc.path} was measured on {of}{changed}; tune it again: {command(cell)}"
    return None


def command(cell: str, program: str = "tune") -> str:
    """Return the command that makes a cell's record."""
    model, recipe, runtime, target = cell.split(".")
    return (
        f"python -m pipeline run client {program} --model {model} --recipe {recipe} "
        f"--runtime {runtime} --target {target}"
    )


def tuned(doc: Doc, cell: str) -> Tuned:
    """Return what a whole and fresh tune.json proposes; nothing, with the reason, where it is not."""
    if doc.data is None:
        return Tuned(cell, doc.path, doc.problem, "", [])
    record = doc.data
    wins: dict[str, list[Proposal]] = {}
    for proposal in proposals(record):
        wins.setdefault(proposal.variant, []).append(proposal)
    return Tuned(cell, doc.path, None, measured_on(record), [_offer(record, name, won) for name, won in wins.items()])


def measured_on(record: Mapping[str, Any]) -> str:
    """Return the run in a few words: engine and version, GPU, workload, and what every server of it shared."""
    own = record["server"].get(OWN, {})
    names = dict.fromkeys(str(gpu.get("name")) for gpu in record["host"].get("gpus") or [] if gpu.get("name"))
    text = f"{record['runtime']} {own.get('version') or 'of unknown version'} on {', '.join(names) or 'no GPU'}, "
    text += str(record["workload"])
    shared = said(record["common_options"])
    return f"{text}, every server with {shared}" if shared else text


def what_changes(variant: Mapping[str, Any]) -> str:
    """Return what a variant changes, in the server's own names: 'linear-backend marlin; recipe fp8'."""
    parts = [said(variant["options"])] if variant["options"] else []
    parts += [f"{name}={value}" for name, value in variant["variables"].items()]
    return "; ".join(parts + ([f"recipe {variant['recipe']}"] if variant["recipe"] else []))


def said(options: Mapping[str, Any]) -> str:
    """Return options as text; one of null is taken away."""
    return ", ".join(f"without {k}" if v is None else f"{k} {_value(v)}" for k, v in options.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _offer(record: Mapping[str, Any], name: str, won: list[Proposal]) -> Offer:
    variant = record["variants"][name]
    at = {proposal.point for proposal in won}
    elsewhere = []
    chance = margins(record)
    for load in record["points"]:
        side = load["sides"].get(name)
        if side is None or load["name"] in at:
            continue
        ratio = side["ratio"]["output_tok_s"]
        verdict = judge(ratio, chance[load["name"]], side["errors"])
        elsewhere.append(f"{load['name']}: {verdict}" + (f", {ratio:.2f}x" if ratio is not None else ""))
    lines, notes = how(record, variant)
    bound = [load for load in record["client_bound"] if load in at]
    if bound:
        notes.append(f"the client limited the load at {', '.join(bound)}, so the gain may be larger")
    busy = record.get("front_end_pct", {}).get(OWN, {})
    full = [load for load in sorted(at) if (busy.get(load) or 0) >= BUSY_PCT]
    if full:
        notes.append(
            f"the server's front end limited the cell's own options at {', '.join(full)}, whatever the precision"
        )
    return Offer(
        name, what_changes(variant), [p.text for p in won], elsewhere, lines, notes, bool(variant["changes_answers"])
    )


def how(record: Mapping[str, Any], variant: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the lines for params.yaml that give a variant, and notes on what no line can say."""
    where = f"{record['runtime']}-{record['target']}"
    given = {name: value for name, value in variant["options"].items() if value is not None}
    taken = [name for name, value in variant["options"].items() if value is None]
    lines, notes = [], []
    if given:
        lines = ["serving:", f"  {where}:", *(f"    {name}: {json.dumps(value)}" for name, value in given.items())]
        notes.append(f"`serving: {where}` holds for every cell of {record['runtime']} on {record['target']}")
    if taken:
        notes.append(f"take {', '.join(taken)} out of `serving: {where}`")
    if variant["variables"]:
        pairs = " ".join(f"{name}={value}" for name, value in variant["variables"].items())
        notes.append(f"start the server with {pairs} in its environment; params.yaml has no place for it")
    if variant["recipe"]:
        cell = ".".join((record["model"], variant["recipe"], record["runtime"], record["target"]))
        notes.append(f"serve cell {cell} instead")
    return lines, notes


def text(found: Tuned) -> str:
    """Return what a tuning run proposes, for a terminal."""
    if found.problem:
        return f"  {found.cell}: proposes nothing: {found.problem}"
    lines = [f"  {found.cell} ({found.measured}):"]
    if not found.offers:
        return f"{lines[0]} {NOTHING}"
    for offer in found.offers:
        lines += [f"    {won}" for won in offer.won]
        lines.append(f"      changes: {offer.what}")
        if offer.elsewhere:
            lines.append(f"      elsewhere: {'; '.join(offer.elsewhere)}")
        lines += ["      to use it, in params.yaml:"] * bool(offer.lines)
        lines += [f"        {line}" for line in offer.lines]
        lines += [f"      {note}" for note in offer.notes]
    return "\n".join(lines)


def proposed(root: Path, cells: Iterable[str]) -> str:
    """Return what the tuning runs of these cells propose, empty where none was made."""
    found = [tuned(doc, cell) for cell in cells if (doc := read_tune(root, cell))]
    if not found:
        return ""
    title = "proposed by tuning runs, never applied by themselves (docs/gpu.md tells how to read them):"
    return "\n".join([title, *map(text, found)])

"""Renders the Markdown card that lies beside an artifact."""

from __future__ import annotations

import re
from typing import Any

from pipeline.report import text
from pipeline.report.engine import engine_text, not_the_locks

# Characters that would start markup or a table column in Markdown, or markup in the HTML made from it.
_SPECIAL = {c: f"\\{c}" for c in "\\`*|"} | {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def card_text(report: dict[str, Any], cell: dict[str, Any], group: dict[str, Any] | None) -> str:
    """Return CARD.md of one cell.

    Args:
        report: the report dict (see collect.collect).
        cell: one cell of it, with all its facts.
        group: the group of measured cells it belongs to, or None if its target was not measured.
    """
    import jinja2

    from pipeline.report.html import words

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("pipeline.report", "templates"),
        autoescape=False,  # Markdown: `plain` escapes, and every value from a file goes through it
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["plain"] = plain
    environment.globals.update(show=text.show, span=text.span, missing=text.missing, words=words, lookup=text.lookup)
    environment.globals.update(engine_text=engine_text, not_the_locks=not_the_locks)
    noise = group["noise_floor"] if group else None
    launch = cell["package"]["launch"]
    mine = {key: [row for row in report["tuning"][key] if row["cell"] == cell["cell"]] for key in ("tuned", "scaled")}
    paying = [row for row in group["paying"] if row["cell"] == cell["cell"]] if group else []
    return environment.get_template("card.md.j2").render(
        tuned=[row for row in mine["tuned"] if not row["missing"]], scaled=mine["scaled"], paying=paying,
        report=report, cell=cell, model=report["models"][cell["model"]], noise=noise, launch=launch,
    )  # fmt: skip


def plain(value: Any) -> str:
    """Return a value as one line of Markdown text that starts no markup."""
    text = "".join(_SPECIAL.get(c, c) for c in " ".join(str(value).split()))
    # Inside a word `_` is no markup, nor are brackets without an address: less escaping reads better.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text).replace("](", "]\\(")

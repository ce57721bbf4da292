"""The report: every fact as JSON, one page from it, and a card beside every artifact."""

from __future__ import annotations

from pathlib import Path

from pipeline.jsonio import write_json, write_text


def write_report(root: Path, out: Path) -> Path:
    """Write `out`/report.json, `out`/index.html and artifacts/packages/<cell>/CARD.md below `root`.

    A card is written for each cell that has a package folder. The same results always give the same bytes.

    Args:
        root: the repository: params.yaml, pipeline/plan.yaml and artifacts/ are below it.
        out: the folder of the report, by custom artifacts/report.

    Returns:
        The path of the page.
    """
    from pipeline.report.card import card_text  # late: jinja2 and matplotlib cost the CLI's start-up
    from pipeline.report.collect import collect
    from pipeline.report.html import page

    report = collect(root)
    html = page(report)
    shown = [(cell, group) for group in report["targets"] for cell in group["cells"]]
    shown += [(cell, None) for cell in report["planned"]]
    cards = {
        root / cell["package"]["path"] / "CARD.md": card_text(report, cell, group)
        for cell, group in shown
        if cell["package"]["exists"]
    }
    write_json(out / "report.json", report)
    for path, text in cards.items():
        write_text(path, text)
    write_text(out / "index.html", html)
    return out / "index.html"

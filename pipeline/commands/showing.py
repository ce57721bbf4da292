"""report: the page and the facts behind it."""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline.commands import Add


def _report(args: argparse.Namespace) -> int:
    from pipeline.report import write_report

    page = write_report(Path("."), Path("artifacts/report"))
    print(f"report: {page}")
    if args.open:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())
    return 0


def register(add: Add) -> None:
    """Add the commands of this module."""
    report = add("report", _report, "write artifacts/report from the results")
    report.add_argument("--open", action="store_true", help="show it in the browser")

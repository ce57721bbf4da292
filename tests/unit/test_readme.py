"""README's tables are those of the committed report."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.readme import blocks, filled

ROOT = Path(__file__).parents[2]


def reports() -> list[str]:
    """The report of the work tree and the committed one: whoever runs the main job makes a new one, and not README."""
    path = "artifacts/report/report.json"
    committed = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=ROOT, capture_output=True, text=True)
    here = [(ROOT / path).read_text(encoding="utf-8")] if (ROOT / path).exists() else []
    return here + ([committed.stdout] if committed.returncode == 0 else [])


def test_the_tables_are_those_of_a_report() -> None:
    if not (found := reports()):
        pytest.skip("no report here; `dvc repro` makes one")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    if not any(filled(text, blocks(json.loads(report))) == text for report in found):
        pytest.fail("README.md has other numbers than artifacts/report/report.json. Run `python -m tests.readme`.")


def test_a_place_that_is_not_marked_is_named() -> None:
    with pytest.raises(ValueError, match="no place marked 'cpu'"):
        filled("# nothing", {"cpu": "| a |"})
    text = "<!-- cpu: python -m tests.readme -->\nold\n<!-- end -->\nrest"
    assert filled(text, {"cpu": "| 1 |"}) == text.replace("old", "| 1 |")

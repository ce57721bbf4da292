"""README's tables from artifacts/report/report.json: `python -m tests.readme` writes them, tests/unit/test_readme.py
holds README to them. Same facts, same rounding as the report.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pipeline.report.text import number, show, span

ROOT = Path(__file__).parents[1]
CPU = ("cpu", "smollm2-135m")
QUALITY = ("h200", "smollm2-135m")
SPEED = ("h200", "llama-8b-random")


def blocks(report: dict[str, Any]) -> dict[str, str]:
    """Return the table of every marked place of README."""
    groups = {(g["target"], g["model"]): g for g in report["targets"]}
    return {"cpu": _cpu(groups[CPU]), "quality": _quality(groups[QUALITY]), "speed": _speed(groups[SPEED])}


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---" for _ in head], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _served(cell: dict[str, Any]) -> bool:
    return not cell["status"].startswith("not ")


def _canary(cell: dict[str, Any]) -> str:
    return "passed" if cell["canary"]["passed"] else "**failed**" if cell["canary"]["passed"] is False else "-"


def _kernels(cell: dict[str, Any]) -> str:
    return ", ".join(k.removesuffix("LinearKernel") for k in cell["server"]["kernels"]) or "not named in the log"


def _cpu(group: dict[str, Any]) -> str:
    head = ["recipe", "made by", "MB", "perplexity ratio", "top-1 agreement", "facts, 400 items",
            "output tok/s at 4, over bf16", "canary", "kernel"]  # fmt: skip
    rows = []
    for cell in group["cells"]:
        mb = number(cell["size"]["weight_bytes"]["value"] / 1e6, "count")
        first = [cell["recipe"], cell["made"]["backend"] if cell["made"]["backend"] != "none" else "-", mb]
        if not _served(cell):
            rows.append([*first, "not served on cpu (no kernel; the report quotes the error)", "", "", "", "", ""])
            continue
        quality, task = cell["quality"]["fidelity"], cell["quality"]["tasks"]["facts"]
        point = next(p for w in cell["speed"]["workloads"] for p in w["points"] if p["concurrency"] == 4)
        speed = f"{number(point['candidate']['output_tok_s']['value'], 'count')}, {_ratio(point)}"
        if cell["is_baseline"]:
            rows.append([*first, "reference", "reference", show(task["accuracy"], "share"), f"{speed} (against itself)",
                         _canary(cell), _kernels(cell)])  # fmt: skip
            continue
        rows.append([*first, _plain(quality["perplexity_ratio"], "ratio3"), show(quality["top1_agreement_pct"], "pct"),
                     show(task["delta_pp"], "pp", True), speed, _canary(cell), _kernels(cell)])  # fmt: skip
    return _table(head, rows)


def _plain(fact: dict[str, Any], kind: str) -> str:
    return show(fact, kind, True).replace("×", "")


def _ratio(point: dict[str, Any]) -> str:
    fact = point["ratio"]["output_tok_s"]
    return f"{show(fact, 'speed')} {span(fact['ci95'], 'speed')}"


def _quality(group: dict[str, Any]) -> str:
    cells = [c for c in group["cells"] if _served(c) and not c["is_baseline"]]
    cells.sort(key=lambda c: float(c["quality"]["fidelity"]["perplexity_ratio"]["value"]))
    rows = [
        [c["recipe"], _plain(c["quality"]["fidelity"]["perplexity_ratio"], "ratio3"),
         show(c["quality"]["fidelity"]["top1_agreement_pct"], "pct"),
         show(c["quality"]["tasks"]["facts"]["delta_pp"], "pp", True), _canary(c), c["gate"]["verdict"], _kernels(c)]
        for c in cells
    ]  # fmt: skip
    return _table(
        ["recipe", "perplexity ratio", "top-1 agreement", "facts, 400 items", "canary", "gate", "kernel"], rows
    )


def _speed(group: dict[str, Any]) -> str:
    """Ratios alone stand beside tokens/s: every cell has a baseline of its own run."""
    cells = [c for c in group["cells"] if _served(c) and c["speed"]["workloads"] and not c["is_baseline"]]
    loads = [(w["workload"], p["concurrency"]) for w in cells[0]["speed"]["workloads"] for p in w["points"]]
    head = ["prompt/output tokens", "in flight"]
    for cell in cells:
        head += [f"{cell['recipe']} ({_kernels(cell)}): tok/s, over bf16", "its TTFT over bf16"]
    rows = []
    for workload, concurrency in loads:
        row = [workload.removeprefix("brief-").replace("-", "/"), str(concurrency)]
        for cell in cells:
            point = next(p for w in cell["speed"]["workloads"] if w["workload"] == workload
                         for p in w["points"] if p["concurrency"] == concurrency)  # fmt: skip
            tok_s = number(point["candidate"]["output_tok_s"]["value"], "count")
            row += [f"{tok_s}, {_ratio(point)}", show(point["ratio"]["ttft_ms"], "speed", True)]
        rows.append(row)
    return _table(head, rows)


def filled(text: str, tables: dict[str, str]) -> str:
    """Return README with every marked table replaced.

    Raises:
        ValueError: a mark is missing.
    """
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name}: python -m tests.readme -->\n).*?(\n<!-- end -->)", re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"README.md has no place marked '{name}'")
        text = pattern.sub(lambda found, table=table: f"{found[1]}{table}{found[2]}", text)
    return text


def main() -> None:
    """Write README.md anew."""
    report = json.loads((ROOT / "artifacts/report/report.json").read_text(encoding="utf-8"))
    path = ROOT / "README.md"
    path.write_text(filled(path.read_text(encoding="utf-8"), blocks(report)), encoding="utf-8")


if __name__ == "__main__":
    main()

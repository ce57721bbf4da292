"""What a server's front end costs a token: CPU of the process that answers requests, over the tokens that it sent.

    python -m tests.speed.front_end artifacts/results/CELL/front_end.json      # prints what was kept
    python -m tests.speed.front_end artifacts/results/CELL/front_end.json RAW  # makes it from a tuning run's raw files

RAW is artifacts/raw/CELL/tune as `raw.tar.gz` of a lent host has it; it is too large for git. The metrics pages before
and after a leg hold the CPU seconds of the process that serves them and the tokens that it generated, warm-up included.
Their quotient is a ceiling: one process on one core sends no more than its inverse, whatever the precision.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipeline import jsonio
from pipeline.speed.leg import read_export
from pipeline.speed.points import side
from pipeline.speed.watch import counter

COUNTERS = {"cpu_s": "process_cpu_seconds", "output_tokens": "vllm:generation_tokens"}


def kept(raw: Path) -> dict[str, Any]:
    """Return {leg: {cpu_s, output_tokens, output_tok_s by load}} of a tuning run's raw files."""
    legs = {}
    for folder in sorted(raw.glob("[0-9]*.*")):
        pages = [(folder / f"server_metrics.{when}.prom").read_text(encoding="utf-8") for when in ("before", "after")]
        moved = {}
        for key, name in COUNTERS.items():
            before, after = (counter(page, name) for page in pages)
            moved[key] = round((after or 0.0) - (before or 0.0), 3)
        rows = read_export(folder / "profile_export.jsonl", {}, True)
        rates = {load: round(side([found], int(load[1:]))["output_tok_s"], 1) for load, found in rows.items()}
        legs[folder.name] = moved | {"output_tok_s": rates}
    return {"schema": "quantpress.front_end/1", "legs": legs}


def main() -> None:
    """Print the cost of a token and the ceiling for every leg."""
    file = Path(sys.argv[1])
    if len(sys.argv) > 2:
        jsonio.write_json(file, kept(Path(sys.argv[2])))
    for name, leg in jsonio.read_json(file)["legs"].items():
        us = 1e6 * leg["cpu_s"] / leg["output_tokens"]
        rates = ", ".join(f"{load} {rate:,.0f}" for load, rate in leg["output_tok_s"].items())
        print(f"{name:16} {us:5.1f} us of CPU a token: at most {1e6 / us:7,.0f} tok/s; measured {rates}")


if __name__ == "__main__":
    main()

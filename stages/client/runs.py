"""What all timed runs share: where their files lie, and how a result says where it came from."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from pipeline import host, jsonio
from pipeline.package import Cell
from pipeline.program import lock_hashes, versions


def raw_folder(cell: Cell, kind: str) -> Path:
    """Return where the logs and raw exports of a run are kept."""
    return Path("artifacts/raw") / cell.name / kind


def begin(cell: Cell, kind: str) -> Path:
    """Return an empty scratch folder for a run; what an earlier one left there is gone."""
    scratch = Path(".quantpress/scratch") / f"{kind}.{cell.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    return scratch


def keep(cell: Cell, kind: str, scratch: Path) -> None:
    """Move a run's files to where they are kept, in place of an earlier run's."""
    raw = raw_folder(cell, kind)
    shutil.rmtree(raw, ignore_errors=True)
    raw.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(scratch, raw)


def client() -> str:
    """Return the load generator's name and version, and how it differs from what that version does by itself."""
    return f"aiperf {versions('aiperf').get('aiperf')}, waiting for slots"


def write(cell: Cell, kind: str, record: dict[str, Any], environment: str | None, start: float) -> dict[str, Any]:
    """Write a result with its cell and origin, and return it whole; `start` is a time.monotonic() value."""
    whole = {
        "cell": cell.name,
        **cell._asdict(),
        "package_digest": jsonio.read_json(cell.deploy / "manifest.json")["checkpoint"]["digest"],
        **record,
        "client": {"tool": client(), "endpoint": "/v1/completions"},
        "host": host.fingerprint(),
        "locks": lock_hashes("client", environment),
        "git_commit": host.git_commit(),
        "finished_at": host.now(),
        "wall_s": round(time.monotonic() - start, 1),
    }
    jsonio.write_json(Path("artifacts/results") / cell.name / f"{kind}.json", whole)
    return whole

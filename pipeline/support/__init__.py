"""Look up what a runtime does with a format on a device. The facts are data: one YAML file per runtime, see table.py.

What no source says is `unknown`, and unknown is refused until params.yaml names it under `allow_unknown`.
"""

from __future__ import annotations

from typing import NamedTuple

from pipeline.specs import Target
from pipeline.support.architectures import architectures, need_served_architecture
from pipeline.support.table import VERDICTS, Table, tables

__all__ = ["VERDICTS", "Verdict", "architectures", "device_of", "need_served_architecture", "runtimes", "verdict"]


class Verdict(NamedTuple):
    """`verdict` is one of VERDICTS; `reason` names the kernel or what is missing; `source` says how it is known."""

    verdict: str
    reason: str
    source: str


def runtimes() -> list[str]:
    """Return the runtimes that the matrix knows."""
    return sorted(tables())


def device_of(target: Target) -> str:
    """Return the column of the matrix for a target: 'cpu' or its SM number."""
    return "cpu" if target.device == "cpu" else str(target.sm)


def verdict(
    fmt: str,
    runtime: str,
    target: Target,
    *,
    method: str | None = None,
    layout: str | None = None,
    group_size: int | None = None,
    version: str | None = None,
) -> Verdict:
    """Return the verdict for `fmt` served by `runtime` on `target`; what the matrix does not say is `unknown`.

    Args:
        fmt: a format of a recipe, or a KV cache: kv-bf16, kv-fp8, kv-int8, kv-nvfp4.
        runtime: one of `runtimes()`.
        target: decides the device and, without `version`, the version asked about.
        method: the recipe's algorithm. None takes the row that serves best.
        layout: how the checkpoint is stored (quant_method, hf, modelopt-trtllm). None takes the row that serves best.
        group_size: of the recipe; None where the format has no groups.
        version: of the runtime; None takes the version that the matrix is planned for.
    """
    table, device = tables()[runtime], device_of(target)
    asked = version or table.version_for(device)
    rows = [row for row in table.rows if row.format == fmt]
    held = [row for row in rows if row.holds(method, layout, asked)]
    if not held:
        return Verdict("unknown", _nothing(table, fmt, method, layout, asked, bool(rows)), "")
    found = min(((table.entry(row, device), row) for row in held), key=lambda pair: VERDICTS.index(pair[0].verdict))
    entry, row = found
    if group_size and row.group_sizes and group_size not in row.group_sizes and entry.verdict != "refused":
        sizes = ", ".join(map(str, row.group_sizes))
        reason = f"{runtime} takes {row.name} with group size {sizes}, not {group_size}"
        return Verdict("refused", reason, "; ".join(entry.sources))
    return Verdict(entry.verdict, entry.reason, "; ".join(entry.sources))


def _nothing(table: Table, fmt: str, method: str | None, layout: str | None, version: str, known: bool) -> str:
    """Say what the matrix lacks."""
    if not known:
        return f"no source says what {table.runtime} does with {fmt}"
    stored = f" stored as {layout}" if layout else ""
    by = f" by {method}" if method else ""
    return f"no source says what {table.runtime} {version} does with {fmt}{by}{stored}"

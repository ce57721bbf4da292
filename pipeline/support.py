"""Look up what a runtime does with a format on a device. The facts are data: support.yaml."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline.errors import InputError
from pipeline.specs import Target

VERDICTS = ("native", "fallback", "refused", "unknown")


class Verdict(NamedTuple):
    """`verdict` is one of VERDICTS; `reason` names the kernel or what is missing; `source` says how it is known."""

    verdict: str
    reason: str
    source: str


@cache
def _rows() -> dict[tuple[str, str], dict[str, Any]]:
    raw = yaml.safe_load((Path(__file__).parent / "support.yaml").read_text(encoding="utf-8"))
    return {(row["format"], row["runtime"]): row for row in raw["rows"]}


def runtimes() -> list[str]:
    """Return the runtimes that the table knows."""
    return sorted({runtime for _, runtime in _rows()})


def verdict(fmt: str, runtime: str, target: Target) -> Verdict:
    """Return the verdict for `fmt` served by `runtime` on `target`; a combination not in the table is `unknown`."""
    row = _rows().get((fmt, runtime))
    device: str | int | None = "cpu" if target.device == "cpu" else target.sm
    if row is None or device not in row["devices"]:
        return Verdict("unknown", f"the support table has no entry for {fmt} on {runtime}, {device}", "support.yaml")
    kind, reason = row["devices"][device]
    return Verdict(kind, reason, row["source"])


@cache
def architectures() -> dict[str, list[str]]:
    """Return the architectures that each runtime serves, from architectures.yaml."""
    path = Path(__file__).parent / "architectures.yaml"
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def need_served_architecture(model: str, config: dict[str, Any]) -> None:
    """Refuse a model that no runtime serves, before it is quantized.

    Raises:
        InputError: the config names no architecture, or one that no runtime's registry has (nearest name given).
    """
    named = config.get("architectures") or []
    known = sorted({name for names in architectures().values() for name in names})
    if not named:
        raise InputError(f"The config.json of {model} names no architecture; no runtime can serve it.")
    if not set(named) & set(known):
        close = difflib.get_close_matches(str(named[0]), known, n=1, cutoff=0.5)
        hint = f" The nearest that is served is {close[0]}." if close else ""
        raise InputError(
            f"The config.json of {model} says {named[0]}, which no runtime here serves "
            f"({', '.join(architectures())}).{hint} `pipeline/architectures.yaml` lists them."
        )

"""Which engine a target's numbers were measured on, and where its installation was not what the lock says."""

from __future__ import annotations

import re
from typing import Any

from pipeline.report.sources import Doc

_DIFFERS = re.compile(r"^(?P<here>\S+) on the host, (?P<lock>\S+) in the lock$")


def engine(doc: Doc, *keys: str) -> dict[str, Any]:
    """Return {version, driver, differs, unknown} of the server that a result names under `keys`.

    differs: packages that the host brought in another version than the lock's, as text; unknown: how many it brought
    without saying which version.
    """
    gpus = [g for g in doc.items("host", "gpus") if isinstance(g, dict)]
    drivers = sorted({str(g["driver"]) for g in gpus if g.get("driver")})
    brought = doc.mapping(*keys, "installation", "from_host")
    differs = []
    for name, text in brought.items():
        found = _DIFFERS.match(str(text))
        if found and found["here"] != found["lock"]:
            differs.append(f"{name} {found['here']} (lock: {found['lock']})")
    unknown = sum(str(text).startswith("unknown version") for text in brought.values())
    return {"version": doc.raw(*keys, "version"), "driver": ", ".join(drivers) or None, "differs": differs,
            "unknown": unknown}  # fmt: skip


def engine_line(cells: list[dict[str, Any]]) -> str:
    """Return what served a group's measured cells: '0.26.0, driver 580.159.04'; several are all named."""
    found = [c["server"]["engine"] for c in cells if c["server"]["engine"]["version"]]
    versions = list(dict.fromkeys(str(e["version"]) for e in found))
    drivers = list(dict.fromkeys(e["driver"] for e in found if e["driver"]))
    return " and ".join(versions) + (f", driver {' and '.join(drivers)}" if drivers else "")


def engine_warnings(cells: list[dict[str, Any]]) -> list[str]:
    """Say once for a group in what its environment differed from the lock."""
    found = [c["server"]["engine"] for c in cells]
    differs = list(dict.fromkeys(text for e in found for text in e["differs"]))
    unknown = max((e["unknown"] for e in found), default=0)
    if not differs and not unknown:
        return []
    rest = f"{unknown} packages that the host brought do not say their version" if unknown else ""
    return [f"The environment that served was not the lock's in all: {'; '.join(filter(None, [*differs, rest]))}."]

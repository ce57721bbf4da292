"""Which engine a target's numbers were measured on, and where its installation was not what the lock says."""

from __future__ import annotations

import re
from typing import Any

from pipeline.report.sources import Doc

_DIFFERS = re.compile(r"^(?P<here>\S+) on the host, (?P<lock>\S+) in the lock$")


def engine(doc: Doc, *keys: str) -> dict[str, Any]:
    """Return {version, torch, driver, differs, unknown} of the server that a result names under `keys`.

    torch: where the host brought it; elsewhere it is the lock's. differs: packages that the host brought in another
    version than the lock's, as text; unknown: how many it brought without saying which version.
    """
    gpus = [g for g in doc.items("host", "gpus") if isinstance(g, dict)]
    drivers = sorted({str(g["driver"]) for g in gpus if g.get("driver")})
    brought = doc.mapping(*keys, "installation", "from_host")
    differs = []
    for name, text in brought.items():
        found = _DIFFERS.match(str(text))
        if found and found["here"] != found["lock"]:
            differs.append(f"{name} {found['here']} (lock: {found['lock']})")
    torch = _DIFFERS.match(str(brought.get("torch")))
    unknown = sum(str(text).startswith("unknown version") for text in brought.values())
    return {"version": doc.raw(*keys, "version"), "torch": torch["here"] if torch else None,
            "driver": ", ".join(drivers) or None, "differs": differs, "unknown": unknown}  # fmt: skip


def engine_text(found: dict[str, Any]) -> str:
    """Return one engine in words: '0.26.0, torch 2.11.0, driver 580.159.04'."""
    parts = [
        found["version"],
        found["torch"] and f"torch {found['torch']}",
        found["driver"] and f"driver {found['driver']}",
    ]
    return ", ".join(str(part) for part in parts if part)


def not_the_locks(found: dict[str, Any]) -> str:
    """Return in what an environment differed from its lock; empty where in nothing that is known."""
    many = found["unknown"] != 1
    rest = f"{found['unknown']} package{'s' * many} that the host brought {'do' if many else 'does'} not say "
    rest += "their version" if many else "its version"
    return "; ".join([*found["differs"], *([rest] if found["unknown"] else [])])


def engine_line(cells: list[dict[str, Any]]) -> str:
    """Return what served a group's measured cells: '0.26.0, torch 2.11.0, driver 580.159.04'; several are all named."""
    found = [c["server"]["engine"] for c in cells if c["server"]["engine"]["version"]]
    return " and ".join(dict.fromkeys(engine_text(e) for e in found))


def engine_warnings(cells: list[dict[str, Any]]) -> list[str]:
    """Say once for a group in what its environment differed from the lock."""
    texts = dict.fromkeys(filter(None, (not_the_locks(c["server"]["engine"]) for c in cells)))
    return [f"The environment that served was not the lock's in all: {text}." for text in texts]

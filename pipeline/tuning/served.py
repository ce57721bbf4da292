"""What a package serves, as a tuning run records it: when that changes, the run says nothing of it any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from pipeline.report.sources import read_doc


def served_as(deploy: Path) -> dict[str, Any]:
    """Return {digest, options} of a package: its checkpoint's digest and what its serve.yaml holds.

    None stands for what is not there or cannot be read, and for the options of a runtime that has no serve.yaml.
    """
    digest = read_doc(deploy, "manifest.json", None).raw("checkpoint", "digest")
    try:
        options = yaml.safe_load((deploy / "serve.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        options = None
    return {"digest": digest, "options": options if isinstance(options, dict) else None}


def changes(then: dict[str, Any], now: dict[str, Any]) -> str | None:
    """Return what differs between two of served_as; None where nothing does.

    What either does not know is not compared: no package here, or options that an older result did not record.
    """
    if not now["digest"]:
        return None
    if then["digest"] != now["digest"]:
        return f"checkpoint {str(then['digest'])[:12]}, the package now has {str(now['digest'])[:12]}"
    if then["options"] is None:
        return None
    old, new = then["options"], now["options"] or {}
    differ = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    said = ", ".join(f"{name} {old.get(name, 'absent')}, now {new.get(name, 'absent')}" for name in differ)
    return said or None

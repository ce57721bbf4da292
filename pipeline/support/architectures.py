"""Which model architectures a runtime serves. The facts are data: pipeline/architectures.yaml."""

from __future__ import annotations

import difflib
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import InputError


@cache
def architectures() -> dict[str, list[str]]:
    """Return the architectures that each runtime serves, from architectures.yaml."""
    path = Path(__file__).parents[1] / "architectures.yaml"
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

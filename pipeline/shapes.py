"""Published shapes of models, for weights that are made up: what they cost to serve is real, what they say is not."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

SPEED_ONLY = "random weights: speed only"


@cache
def shapes() -> dict[str, dict[str, Any]]:
    """Return config.json of each shape by name, each with `published_by`, the page that gives it."""
    return dict(yaml.safe_load((Path(__file__).parent / "shapes.yaml").read_text(encoding="utf-8")))


def is_random(source: str) -> bool:
    """Say whether a model's source has made-up weights, so that its quality means nothing."""
    return source.startswith("random:")

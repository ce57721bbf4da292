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


def config_of(source: str) -> dict[str, Any] | None:
    """Return the config.json that a `random:` source will have as far as its shape gives it, None for any other."""
    kind, _, rest = source.partition(":")
    shape = shapes().get(rest.partition("@")[0]) if kind == "random" else None
    return shape and shape | {"dtype": "bfloat16"}


def is_random(source: str) -> bool:
    """Say whether a model's source has made-up weights, so that its quality means nothing."""
    return source.startswith("random:")

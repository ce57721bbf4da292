"""The project's own params and plan, for tests that read them and change neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipeline import plan
from pipeline.params import load_params
from pipeline.specs import Params

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def params() -> Params:
    """params.yaml of this repository."""
    return load_params(ROOT / "params.yaml")


@pytest.fixture(scope="module")
def made(params: Params) -> dict[str, Any]:
    """The plan that it makes."""
    return plan.make_plan(params, plan.known_configs(ROOT, params))

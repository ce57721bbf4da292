"""A cell, model x recipe x runtime x target: its name and where its package lies."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import InputError, unknown
from pipeline.specs import Params, Target
from pipeline.support import runtimes


def repro_on(target: str, *stages: str) -> str:
    """Return the command for stages that run on their own target: only --glob searches their dvc.yaml."""
    return f"`uv run dvc repro --glob {' '.join(repr(stage) for stage in stages)}` on a host that is {target}"


class Cell(NamedTuple):
    """model x recipe x runtime x target."""

    model: str
    recipe: str
    runtime: str
    target: str

    @classmethod
    def parse(cls, name: str) -> Cell:
        """Return the cell of a name such as smollm2-135m.fp8.trtllm-engine.l40s.

        Raises:
            InputError: it has not four parts.
        """
        parts = name.split(".")
        if len(parts) != 4:
            raise InputError(
                f"'{name}' is no cell: MODEL.RECIPE.RUNTIME.TARGET is needed; `python -m pipeline plan` lists them."
            )
        return cls(*parts)

    @property
    def name(self) -> str:
        """The cell's id, as it stands in paths and stage names."""
        return ".".join(self)

    @property
    def deploy(self) -> Path:
        """The folder of the package."""
        return Path("artifacts/packages") / self.name / "deploy"

    @property
    def engine(self) -> Path:
        """The folder of the engine, beside the package; only `trtllm-engine` has one."""
        return Path("artifacts/packages") / self.name / "engine"

    def check(self, params: Params) -> Target:
        """Return the target; raise an InputError with the nearest name for an unknown id."""
        tables: list[tuple[str, str, dict[str, Any]]] = [
            ("model", self.model, params.models),
            ("recipe", self.recipe, params.recipes),
            ("target", self.target, params.targets),
        ]
        for kind, name, table in tables:
            if name not in table:
                raise unknown(kind, name, table, "params.yaml")
        if self.runtime not in runtimes():
            raise unknown("runtime", self.runtime, runtimes(), "pipeline/support")
        return params.targets[self.target]

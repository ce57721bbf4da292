"""Which sides of a tuning run start, and what becomes of one that does not. Servers are stand-ins: no model runs."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar

import pytest

from pipeline.cells import Cell
from pipeline.errors import WorkError
from pipeline.tuning.spec import OWN, Tuning
from stages.client import tune

CELL = Cell("m", "int8", "vllm", "g")
TUNING = Tuning.model_validate(
    {"workload": "w", "variants": {"good": {"recipe": "fp8"}, "late": {"options": {"a": 1}}}}
)


class Stand:
    """A server that says when it was started, for how long it was waited for, and whether it was stopped."""

    made: ClassVar[list[Stand]] = []
    late = "late"

    def __init__(self, cell: Cell, _params: Any, log: Path, _threads: int, change: Any) -> None:
        self.cell, self.name, self.change = cell, log.name, change
        self.startup_s, self.limit_s, self.stopped = 100.0, None, False
        self.made.append(self)

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped = True

    def wait_ready(self, limit_s: float | None = None) -> None:
        self.limit_s = limit_s
        if self.late in self.name:
            raise WorkError("was not ready in time")


@pytest.fixture
def stand(monkeypatch: pytest.MonkeyPatch) -> type[Stand]:
    monkeypatch.setattr(tune, "Server", Stand)
    monkeypatch.setattr(Stand, "made", [])
    return Stand


def start(stack: ExitStack) -> tuple[dict[str, Any], dict[str, str]]:
    params: Any = None
    found: Any = tune.start_all(CELL, params, TUNING, Path("scratch"), stack)
    return found


def test_a_variant_that_starts_far_too_late_is_ended_and_the_others_go_on(stand: type[Stand]) -> None:
    with ExitStack() as stack:
        ready, failed = start(stack)
        assert list(ready) == [OWN, tune.AGAIN, "good"] and failed == {"late": "was not ready in time"}
        assert [s.name for s in stand.made if s.stopped] == ["server.late.log"]
    own, again, good, late = stand.made
    assert own.limit_s is None and again.limit_s is None  # how long the cell as it is takes is what is measured
    assert good.limit_s == late.limit_s == tune.LATE * 100.0
    assert (own.cell.recipe, again.cell.recipe, good.cell.recipe) == ("int8", "int8", "fp8")
    assert all(server.stopped for server in stand.made)


@pytest.mark.parametrize("side", ["server.own.log", "server.own-again.log"])
def test_without_the_cell_as_it_is_there_is_no_run(
    side: str, stand: type[Stand], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand, "late", side)
    with ExitStack() as stack, pytest.raises(WorkError, match="not ready"):
        start(stack)
    assert all(server.stopped for server in stand.made)

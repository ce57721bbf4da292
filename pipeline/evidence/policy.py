"""policy.yaml as typed data: tiers, margins, floors, limits, and what must have been measured."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import InputError, nearest, unknown
from pipeline.params import load_yaml
from pipeline.specs import Params

PATH = Path("policy.yaml")
Tier = Literal["critical", "supporting", "advisory"]
Evidence = Literal["lint", "canary", "fidelity", "tasks", "speed"]
Metric = Literal["output_tok_s", "ttft_ms", "tpot_ms", "e2e_ms"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TaskRule(_Strict):
    """Largest loss of accuracy of a task, percentage points."""

    tier: Tier
    margin_pp: float = Field(gt=0, lt=100)


class Sound(_Strict):
    """Something that is passed or not."""

    tier: Tier = "critical"


class AtMost(_Strict):
    """An upper limit."""

    tier: Tier
    max: float


class Above(_Strict):
    """An upper limit of a ratio or a distance, which must be positive."""

    tier: Tier
    max: float = Field(gt=0)


class RatioAtMost(_Strict):
    """An upper limit of a ratio that is 1 without damage."""

    tier: Tier
    max: float = Field(gt=1)


class AtLeast(_Strict):
    """A lower limit."""

    tier: Tier
    min: float


class Share(_Strict):
    """A lower limit in percent."""

    tier: Tier
    min: float = Field(ge=0, lt=100)


class Between(_Strict):
    """Both limits of a ratio."""

    tier: Tier
    min: float = Field(gt=0)
    max: float = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Between:
        if self.min >= self.max:
            raise ValueError(f"min {self.min:g} is not below max {self.max:g}")
        return self


class Quality(_Strict):
    """Limits of quality; one that is left out is not judged."""

    canary: Sound | None = None
    perplexity_ratio: RatioAtMost | None = None
    kl_mean: Above | None = None
    top1_agreement_pct: Share | None = None
    length_ratio: Between | None = None
    broken_answers_pp: AtMost | None = None


class Floor(_Strict):
    """A limit of a speed ratio over the baseline: `min` for throughput, `max` for a latency.

    targets: shell patterns of the targets that it holds for, of those that time its workload.
    """

    tier: Tier
    targets: list[str] = Field(default=["*"], min_length=1)
    workload: str
    concurrency: int = Field(gt=0)
    metric: Metric
    min: float | None = Field(default=None, gt=0)
    max: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _one_side(self) -> Floor:
        if (self.min is None) == (self.max is None):
            raise ValueError("give one of min and max")
        return self

    @property
    def name(self) -> str:
        """How the check is called: metric, workload and load."""
        return f"{self.metric} {self.workload} c{self.concurrency}"


class Limits(_Strict):
    """Limits of size and memory; one that is left out is not judged."""

    weights_over_source: Above | None = None
    weight_gb: Above | None = None
    server_memory_gib: Above | None = None
    kv_cache_tokens: AtLeast | None = None


class Health(_Strict):
    """What a sound baseline keeps."""

    max_perplexity: float = Field(default=1000.0, gt=1)


class Policy(_Strict):
    """The whole of policy.yaml."""

    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    power: float = Field(default=0.80, gt=0.5, lt=1)
    ship: list[str] = Field(min_length=1)
    required: list[Evidence]
    tasks: dict[str, TaskRule] = Field(default_factory=dict)
    quality: Quality = Quality()
    speed: list[Floor] = Field(default_factory=list)
    limits: Limits = Limits()
    health: Health = Health()


SECTIONS: dict[str, type[BaseModel]] = {
    "tasks": TaskRule,
    "speed": Floor,
    "health": Health,
    "canary": Sound,
    "length_ratio": Between,
    "kv_cache_tokens": AtLeast,
    "top1_agreement_pct": Share,
    "quality": Quality,
    "limits": Limits,
}


def load_policy(path: Path, params: Params, cells: list[str]) -> Policy:
    """Read and check policy.yaml against params.yaml and the cells of the plan.

    Raises:
        InputError: missing file, wrong key or name (nearest given), a bad value, a pattern that matches no cell.
    """
    raw = load_yaml(path, "a policy with the keys " + ", ".join(Policy.model_fields))
    try:
        policy = Policy.model_validate(raw)
    except ValidationError as error:
        raise InputError(_explain(error, path)) from None
    for name in policy.tasks:
        if name not in params.tasks:
            raise unknown("task", name, params.tasks, f"params.yaml ({path} gives it a margin)")
    for floor in policy.speed:
        if floor.workload not in params.workloads:
            raise unknown("workload", floor.workload, params.workloads, f"params.yaml ({path} gives it a floor)")
        loads = [p.concurrency for p in params.workloads[floor.workload].points]
        if floor.concurrency not in loads:
            has = f"it has {', '.join(map(str, loads))}"
            raise InputError(f"{path}: workload {floor.workload} has no concurrency {floor.concurrency}; {has}.")
        _need_target(floor, params, path)
    for pattern in policy.ship:
        if not any(fnmatch(cell, pattern) for cell in cells):
            raise InputError(f"{path}: ship '{pattern}' matches no cell of the plan.{nearest(pattern, cells)}")
    return policy


def holds(floor: Floor, target: str, params: Params) -> bool:
    """Tell whether a floor is judged on a target: it names the target, and the target times its workload."""
    named = any(fnmatch(target, pattern) for pattern in floor.targets)
    return named and floor.workload in params.workloads_of(params.targets[target])


def _need_target(floor: Floor, params: Params, path: Path) -> None:
    """Refuse a floor that no target can ever be judged by.

    Raises:
        InputError: a pattern that matches no target, or targets that time other workloads.
    """
    for pattern in floor.targets:
        if not any(fnmatch(name, pattern) for name in params.targets):
            raise InputError(f"{path}: '{pattern}' of floor {floor.name} matches no target."
                             f"{nearest(pattern, list(params.targets))}")  # fmt: skip
    named = [n for n in params.targets if any(fnmatch(n, pattern) for pattern in floor.targets)]
    # A floor of targets that nobody measures now is only not judged: who trims the matrix keeps the policy.
    measured = [n for n in named if any(row.measure and n in row.targets for row in params.matrix)] or named
    if not any(holds(floor, name, params) for name in measured):
        timed = "; ".join(f"{n}: {', '.join(params.workloads_of(params.targets[n]))}" for n in measured)
        raise InputError(f"{path}: no target of floor {floor.name} times workload {floor.workload}. "
                         f"They time {timed}.")  # fmt: skip


def _explain(error: ValidationError, path: Path) -> str:
    """Turn pydantic's first error into one sentence with the nearest known key."""
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"]))
    if first["type"] == "extra_forbidden":
        *parents, key = map(str, first["loc"])
        return f"{path}: unknown key '{place}'.{nearest(key, _known(parents))}"
    if first["type"] == "missing":
        return f"{path}: '{place}' is missing."
    if first["type"] == "literal_error" and first["loc"][0] in ("required", "tasks", "quality", "limits", "speed"):
        known = get_args({"tier": Tier, "metric": Metric}.get(str(first["loc"][-1]), Evidence))
        return f"{path}: '{place}' is {first['input']!r}.{nearest(str(first['input']), known)}"
    return f"{path}: '{place}' is {first.get('input')!r}: {first['msg'].removeprefix('Value error, ')}."


def _known(parents: list[str]) -> list[str]:
    """Return the keys that may stand below `parents`."""
    if not parents:
        return list(Policy.model_fields)
    if parents[0] in ("quality", "limits") and len(parents) > 1:
        return list(SECTIONS.get(parents[1], Above).model_fields)
    return list(SECTIONS.get(parents[0], Policy).model_fields)


def shipped(policy: Policy, cell: str) -> bool:
    """Tell whether a cell decides the gate."""
    return any(fnmatch(cell, pattern) for pattern in policy.ship)


def as_json(policy: Policy) -> dict[str, Any]:
    """Return the policy as it is recorded beside its verdict."""
    return policy.model_dump(exclude_none=True)

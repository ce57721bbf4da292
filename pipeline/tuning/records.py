"""What tune.json and scaling.json must hold to be shown: they are data, so a fault in one is named, never raised."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.tuning import rank, scaling
from pipeline.tuning.spec import OWN

Number = Annotated[float, Field(allow_inf_nan=False, ge=0)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Ratio(_Part):
    output_tok_s: Number | None
    ttft_ms: Number | None
    tpot_ms: Number | None


class _Side(_Part):
    output_tok_s: Number | None
    errors: int
    ratio: _Ratio


class _Point(_Part):
    name: str
    concurrency: int | None
    noise: Number | None
    own_tok_s: list[Number | None] | None = None
    sides: dict[str, _Side]


class _Variant(_Part):
    options: dict[str, Any]
    variables: dict[str, str]
    recipe: str | None
    changes_answers: bool


class _Server(_Part):
    version: str | None = None
    kernels: list[str] = []
    startup_s: Number | None = None
    command: str | None = None


class _Served(_Part):
    digest: str | None
    options: dict[str, Any] | None


class _Host(_Part):
    gpus: list[dict[str, Any]] = []


class _Record(_Part):
    cell: str
    runtime: str
    target: str
    workload: str
    server: dict[str, _Server]
    host: _Host


class _Tune(_Record):
    package_digest: str
    common_options: dict[str, Any]
    variants: dict[str, _Variant]
    points: Annotated[list[_Point], Field(min_length=1)]
    client_bound: list[str]
    served: dict[str, _Served] = {}
    front_end_pct: dict[str, dict[str, Number | None]] = {}
    failed: dict[str, str]

    @model_validator(mode="after")
    def _sides(self) -> _Tune:
        for point in self.points:
            if OWN not in point.sides:
                raise ValueError(f"load {point.name} has no side '{OWN}'")
            for name in point.sides:
                if name != OWN and name not in self.variants:
                    raise ValueError(f"load {point.name} has side '{name}', which is no variant of it")
        return self


class _Numbers(_Part):
    output_tok_s: Number | None
    errors: int


class _Together(_Part):
    output_tok_s: Number | None
    each_tok_s: dict[str, Number | None]


class _Efficiency(_Part):
    cells: Number | None
    tensor_parallel: Number | None


class _Speedup(_Part):
    tensor_parallel: _Ratio


class _ScalingPoint(_Part):
    name: str
    alone: _Numbers
    together: _Together
    tensor_parallel: _Numbers
    efficiency: _Efficiency
    speedup: _Speedup


class _Scaling(_Record):
    gpus: int
    failed: dict[str, str] = {}
    points: Annotated[list[_ScalingPoint], Field(min_length=1)]


RECORDS: dict[str, type[_Record]] = {rank.SCHEMA: _Tune, scaling.SCHEMA: _Scaling}


def fault(record: dict[str, Any], cell: str) -> str | None:
    """Return what keeps a record of `cell` from being shown, as `place: what is wrong`, or None where it is whole."""
    try:
        found = RECORDS[record["schema"]].model_validate(record)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "record"
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        return f"{place}: {first['msg']}{more}"
    return None if found.cell == cell else f"cell: it is of {found.cell}, not of {cell}"

"""What `tune` tries on a cell, as data: other options, variables or checkpoints beside the cell's own."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, model_validator

OWN = "own"
Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def dashed(options: dict[str, Any]) -> dict[str, Any]:
    """Refuse names with underscores: beside the package's own, with dashes, the server would be given both."""
    if wrong := [name for name in options if "_" in name]:
        right = ", ".join(name.replace("_", "-") for name in wrong)
        raise ValueError(f"options are written as in serve.yaml, with dashes: {right}")
    return options


Options = Annotated[dict[str, Any], AfterValidator(dashed)]


class Variant(_Strict):
    """One thing to try: the server's `options` and `variables` in its own names, or another `recipe`'s checkpoint.

    `changes_answers: true` where the weights, the cache or the arithmetic differ, so that quality must be measured
    anew before it is used.
    """

    options: Options = Field(default_factory=dict)
    variables: dict[str, str] = Field(default_factory=dict)
    recipe: str | None = None
    changes_answers: bool = False

    @model_validator(mode="after")
    def _something(self) -> Variant:
        if not (self.options or self.variables or self.recipe):
            raise ValueError("a variant needs options, variables or a recipe: else it is the cell itself")
        return self


class Tuning(_Strict):
    """The variants of one cell, timed in one run on one `workload`; `options` are those of every server in it."""

    workload: str
    options: Options = Field(default_factory=dict)
    variants: dict[Name, Variant] = Field(min_length=1)

    @model_validator(mode="after")
    def _names(self) -> Tuning:
        if OWN in self.variants:
            raise ValueError(f"'{OWN}' is the cell as it is; name the variant otherwise")
        return self

"""Read params.yaml: YAML, types, references; every mistake ends in one sentence that names the nearest known name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from pipeline.choice.objective import Slo
from pipeline.errors import InputError, nearest
from pipeline.specs import (
    ID_PATTERN,
    CalibSet,
    Evaluation,
    MatrixRow,
    Model,
    NoiseFloor,
    Params,
    Recipe,
    Target,
    Task,
    TrtllmRuntime,
)
from pipeline.specs_check import cross_check
from pipeline.speed.workloads import Lengths, Point, Workload


class _UniqueKeys(yaml.SafeLoader):
    """A loader for which a key given twice is an error: plain YAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for key in keys if keys.count(key) > 1]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"the key '{twice[0]}' stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def load_params(path: Path = Path("params.yaml")) -> Params:
    """Read, validate and cross-check params.yaml.

    Raises:
        InputError: missing file, bad YAML, unknown key (nearest given), bad value, or a reference to no entry.
    """
    raw = load_yaml(path, f"a mapping with the keys {', '.join(Params.model_fields)}")
    try:
        params = Params.model_validate(raw)
    except ValidationError as error:
        raise InputError(_explain(error, path)) from None
    cross_check(params, path)
    return params


def load_yaml(path: Path, wanted: str) -> dict[str, Any]:
    """Read a YAML mapping in which no key stands twice; `wanted` says what the file must hold.

    Raises:
        InputError: it is missing, no text, no YAML or no mapping.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeys)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from None
    except FileNotFoundError:
        raise InputError(f"{path} is missing; run from the root of the repository.") from None
    except yaml.YAMLError as error:
        said = " ".join(str(error).split())
        raise InputError(f"{path} is not valid YAML: {said}") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path} must hold {wanted}.")
    return raw


def _explain(error: ValidationError, path: Path) -> str:
    """Turn pydantic's first error into one sentence with the nearest known key."""
    first = error.errors()[0]
    place = ".".join(str(p) for p in first["loc"] if p != "[key]")
    if first["type"] == "extra_forbidden":
        *parents, key = first["loc"]
        return f"{path}: unknown key '{place}'.{nearest(str(key), _known_keys(list(parents)))}"
    if first["type"] == "missing":
        return f"{path}: '{place}' is missing."
    if first["type"] == "string_pattern_mismatch":
        return f"{path}: id '{first['input']}' in '{place}' must match {ID_PATTERN} (no dots: DVC splits names there)."
    return f"{path}: '{place}' is {first.get('input')!r}: {first['msg'].removeprefix('Value error, ')}"


def _known_keys(parents: list[Any]) -> list[str]:
    sections: dict[str, type[BaseModel]] = {
        "models": Model,
        "calib_sets": CalibSet,
        "recipes": Recipe,
        "targets": Target,
        "workloads": Workload,
        "slos": Slo,
        "tasks": Task,
        "evaluation": Evaluation,
        "matrix": MatrixRow,
        "trtllm": TrtllmRuntime,
    }
    if not parents:
        return list(Params.model_fields)
    for inner, model in (("points", Point), ("mix", Lengths), ("noise_floor", NoiseFloor)):
        if inner in parents:
            return list(model.model_fields)
    return list(sections.get(str(parents[0]), Params).model_fields)

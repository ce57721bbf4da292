"""params.yaml as typed data: models, calibration sets, recipes, targets, workloads, tasks, matrix.

Adding one of them is one entry of data. Every wrong key, id or reference ends in an InputError that names the
entry, what was found and the nearest known name.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from pipeline.errors import InputError, nearest, unknown

ID_PATTERN = r"^[a-z0-9]+(-[a-z0-9]+)*$"
Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]
FORMATS = ("bf16", "fp8-tensor", "fp8-channel-token", "int8-w8a8", "int4-w4a16")
WEIGHT_BITS = {"bf16": 16, "fp8-tensor": 8, "fp8-channel-token": 8, "int8-w8a8": 8, "int4-w4a16": 4}
# backend -> the (format, algorithm) pairs that it makes. The archived projects are named as their owners named them.
_GPTQ, _AWQ = ("int4-w4a16", "gptq"), ("int4-w4a16", "awq")
BACKENDS: dict[str, tuple[tuple[str, str], ...]] = {
    "none": (("bf16", "none"),),
    "modelopt": (("fp8-tensor", "max"),),
    "llmcompressor": (
        ("fp8-tensor", "max"),
        ("fp8-channel-token", "rtn"),
        ("int8-w8a8", "rtn"),
        ("int8-w8a8", "gptq"),
        ("int8-w8a8", "smoothquant-gptq"),
        ("int4-w4a16", "rtn"),
        _GPTQ,
        _AWQ,
    ),
    "gptqmodel": (_GPTQ,),
    "auto-gptq": (_GPTQ,),
    "autoawq": (_AWQ,),
}
DATA_FREE = ("none", "rtn")
_PYPI = re.compile(r"^pypi:(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.!+]+)/(?P<file>.+)$")
_HF = re.compile(r"^hf:(?P<repo>[\w.-]+/[\w.-]+)@(?P<revision>.+)$")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(_Strict):
    """A pinned place: `kind` pypi, hf, dir, file, stdlib or package; `revision` is what pins it."""

    kind: Literal["pypi", "hf", "dir", "file", "stdlib", "package"]
    name: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parse `pypi:<package>==<version>/<file>`, `hf:<org>/<name>@<40-hex commit>` or `dir:<path>`.

        Raises:
            InputError: another form, or a branch or tag where a commit is needed.
        """
        kind, _, rest = text.partition(":")
        if match := _PYPI.match(text):
            return cls(kind="pypi", name=match["name"], revision=match["version"], file=match["file"])
        if kind == "hf":
            return cls._parse_hf(text)
        if kind in ("dir", "file", "stdlib") and rest:
            return cls.model_validate({"kind": kind, "name": rest})
        if kind == "package" and "/" in rest:
            name, _, file = rest.partition("/")
            return cls(kind="package", name=name, file=file)
        raise InputError(
            f"Source '{text}' is none of pypi:<package>==<version>/<file>, hf:<org>/<name>@<40-hex commit>, "
            "dir:<path>, file:<path>, stdlib:<module>, package:<distribution>/<glob>."
        )

    @classmethod
    def _parse_hf(cls, text: str) -> Source:
        match = _HF.match(text)
        if match is None and re.fullmatch(r"hf:[^/@]+(@.*)?", text):
            raise InputError(f"Source '{text}' names no organisation: write hf:<org>/<name>@<40-hex commit>.")
        repo = match["repo"] if match else text.removeprefix("hf:").partition("@")[0]
        found = match["revision"] if match else "no revision"
        if match is None or not re.fullmatch(r"[0-9a-f]{40}", match["revision"]):
            raise InputError(
                f"Source '{text}' needs a 40-hex commit after '@' and has {found!r}: a branch or tag can move. "
                f"Pin it: `git ls-remote https://huggingface.co/{repo} HEAD` prints the commit; "
                f"write hf:{repo}@<commit>."
            )
        return cls(kind="hf", name=repo, revision=match["revision"])


class Model(_Strict):
    """A checkpoint at a pinned revision. `instruct`: has a chat template that calibration and evals use."""

    source: str
    instruct: bool = True
    trust_remote_code: bool = False
    revision: str | None = Field(default=None, description="digest that a dir: source must have, if given")
    license: str | None = None
    note: str | None = None
    eos_token: str | None = Field(default=None, description="mends a tokenizer whose source names a wrong one")

    @field_validator("source")
    @classmethod
    def _source(cls, value: str) -> str:
        try:
            Source.parse(value)
        except InputError as error:
            raise ValueError(str(error)) from None
        return value


class CalibSet(_Strict):
    """Frozen token ids: `samples` rows of `tokens_per_sample`, `chat_share` of them through the chat template."""

    sources: list[str] = Field(min_length=1)
    samples: int = Field(gt=0)
    tokens_per_sample: int = Field(gt=1)
    chat_share: float = Field(default=0.5, ge=0, le=1)
    license: str
    seed: int = 0
    split: Literal["calibration", "held-out"] = "calibration"
    text_column: str = "text"


class Recipe(_Strict):
    """What is stored and computed (`format`), by which `algorithm`, made by which `backend`."""

    format: str
    algorithm: str
    backend: str
    group_size: int | None = Field(default=None, gt=0)
    calib_set: Id | None = None
    calib_samples: int | None = Field(default=None, gt=0, description="use only the first N samples of the set")
    options: dict[str, Any] | None = None
    note: str | None = None


class Target(_Strict):
    """A kind of machine. Bandwidth and peaks carry their source in `source`; price only if the user gives one."""

    device: Literal["cpu", "cuda"]
    gpu: str | None = None
    sm: int | None = None
    memory_gib: float | None = None
    count: int = 1
    bandwidth_gb_s: float | None = None
    price_usd_per_h: float | None = None
    source: str | None = None

    @model_validator(mode="after")
    def _gpu_facts(self) -> Target:
        missing = [n for n in ("gpu", "sm", "memory_gib") if getattr(self, n) is None]
        if self.device == "cuda" and missing:
            raise ValueError(f"a cuda target needs {', '.join(missing)}")
        return self


class Point(_Strict):
    """One load: `concurrency` requests in flight until `requests` are done, after `warmup` uncounted ones."""

    concurrency: int = Field(gt=0)
    requests: int = Field(gt=0)
    warmup: int = Field(gt=0)


class Workload(_Strict):
    """Fixed prompt and output lengths (tokens), closed loop, streaming."""

    prompt_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=1)
    points: list[Point] = Field(min_length=1)
    order: Literal["AB", "ABBA"] = "AB"


class Task(_Strict):
    """An lm-eval task or group; `metric` and `filter` as lm-eval names them, per item 0 or 1 (or a fraction).

    `hub: true` needs data that only a connected host has.
    """

    lm_eval: str
    metric: str = "acc"
    filter: str = "none"
    hub: bool = False
    limit: int | None = Field(default=None, gt=0)
    num_fewshot: int | None = Field(default=None, ge=0)


class Evaluation(_Strict):
    """What evaluate does: tasks by id, the held-out set, the number of logprobs kept per position."""

    tasks: list[Id]
    held_out: Id
    top_k: int = Field(default=20, ge=1, le=20)


class MatrixRow(_Strict):
    """A product of ids. `measure: true` puts evaluate and benchmark of these cells in the default `dvc repro`."""

    models: list[Id]
    recipes: list[Id]
    runtimes: list[Id]
    targets: list[Id]
    measure: bool = False


class Params(_Strict):
    """The whole of params.yaml."""

    models: dict[Id, Model]
    calib_sets: dict[Id, CalibSet]
    recipes: dict[Id, Recipe]
    targets: dict[Id, Target]
    workloads: dict[Id, Workload]
    tasks: dict[Id, Task]
    evaluation: Evaluation
    benchmark: list[Id]
    serving: dict[str, dict[str, Any]] = Field(default_factory=dict)
    baseline: Id
    matrix: list[MatrixRow]


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
        raise InputError(f"{path} must hold a mapping with the keys {', '.join(Params.model_fields)}.")
    try:
        params = Params.model_validate(raw)
    except ValidationError as error:
        raise InputError(_explain(error, path)) from None
    _cross_check(params, path)
    return params


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
        "tasks": Task,
        "evaluation": Evaluation,
        "matrix": MatrixRow,
    }
    if not parents:
        return list(Params.model_fields)
    if "points" in parents:
        return list(Point.model_fields)
    return list(sections.get(str(parents[0]), Params).model_fields)


def _cross_check(params: Params, path: Path) -> None:
    """Check what types cannot: references between sections, formats, backends, algorithms."""
    where = str(path)
    for name, recipe in params.recipes.items():
        check_recipe(name, recipe, params, where)
    for name in params.benchmark:
        _need("workload", name, params.workloads, where)
    for name in params.evaluation.tasks:
        _need("task", name, params.tasks, where)
    _need("calibration set", params.evaluation.held_out, params.calib_sets, where)
    _need("recipe", params.baseline, params.recipes, where)
    _check_sources(params, where)
    _check_workloads(params, where)
    for row in params.matrix:
        if row.measure and params.baseline not in row.recipes:
            raise InputError(f"{where}: a matrix row with measure: true needs the baseline '{params.baseline}'.")
        tables: list[tuple[str, list[str], dict[str, Any]]] = [
            ("model", row.models, params.models),
            ("recipe", row.recipes, params.recipes),
            ("target", row.targets, params.targets),
        ]
        for kind, names, table in tables:
            for name in names:
                _need(kind, name, table, where)


def _check_sources(params: Params, where: str) -> None:
    """Check the kind and pin of every source, and what remote code needs."""
    named: list[tuple[str, list[str], tuple[str, ...]]]
    named = [(f"models.{n}", [m.source], ("pypi", "hf", "dir")) for n, m in params.models.items()]
    named += [(f"calib_sets.{n}", c.sources, ("stdlib", "package", "file", "hf")) for n, c in params.calib_sets.items()]
    for place, texts, kinds in named:
        for text in texts:
            try:
                kind = Source.parse(text).kind
            except InputError as error:
                raise InputError(f"{where}: {place}: {error}") from None
            if kind not in kinds:
                raise InputError(f"{where}: {place}: a {kind}: source cannot stand here; use {', '.join(kinds)}.")
    for name, model in params.models.items():
        if model.trust_remote_code and Source.parse(model.source).kind != "hf":
            raise InputError(f"{where}: models.{name}: trust_remote_code needs an hf: source at a pinned commit.")


def _check_workloads(params: Params, where: str) -> None:
    """Check that there is something to time, that points differ, and that it fits the server's context."""
    if not params.benchmark:
        raise InputError(f"{where}: benchmark names no workload. Known: {', '.join(params.workloads)}.")
    for key, options in params.serving.items():
        if key not in ("vllm-cpu", "vllm-cuda"):
            raise unknown("runtime and device", key, ("vllm-cpu", "vllm-cuda"), f"{where} (serving)")
        limit = options.get("max-model-len")
        for name in params.benchmark:
            workload = params.workloads[name]
            need = workload.prompt_tokens + workload.output_tokens
            if limit and need > limit:
                raise InputError(
                    f"{where}: workload {name} needs {need} tokens and serving.{key} has max-model-len {limit}."
                )
    for name, workload in params.workloads.items():
        loads = [p.concurrency for p in workload.points]
        if len(loads) != len(set(loads)):
            raise InputError(f"{where}: workloads.{name} has two points of one concurrency: {loads}.")


def check_recipe(name: str, recipe: Recipe, params: Params, where: str) -> None:
    """Check one recipe: known format and backend, an algorithm of that backend, calibration where it is needed.

    Raises:
        InputError: with the nearest known name.
    """
    if recipe.format not in FORMATS:
        raise unknown("format", recipe.format, FORMATS, f"{where} (recipes.{name}.format)")
    if recipe.backend not in BACKENDS:
        raise unknown("backend", recipe.backend, BACKENDS, f"{where} (recipes.{name}.backend)")
    made = BACKENDS[recipe.backend]
    if (recipe.format, recipe.algorithm) not in made:
        can = "; ".join(f"{f} by {a}" for f, a in made)
        near = nearest(recipe.algorithm, {a for f, a in made if f == recipe.format})
        raise InputError(
            f"{where}: recipes.{name}: {recipe.backend} does not make {recipe.format} by '{recipe.algorithm}'.{near} "
            f"It makes: {can}."
        )
    if recipe.format == "int4-w4a16" and recipe.group_size is None:
        raise InputError(f"{where}: recipes.{name} is W4A16 and needs a group_size, for instance 64 or 128.")
    if recipe.algorithm not in DATA_FREE and recipe.calib_set is None:
        raise InputError(f"{where}: recipes.{name} ({recipe.algorithm}) needs a calib_set.")
    if recipe.calib_set is not None:
        _need("calibration set", recipe.calib_set, params.calib_sets, where)
        has = params.calib_sets[recipe.calib_set].samples
        if recipe.calib_samples and recipe.calib_samples > has:
            raise InputError(f"{where}: recipes.{name} wants {recipe.calib_samples} samples, its set has {has}.")


def _need(kind: str, name: str, table: Any, where: str) -> None:
    if name not in table:
        raise unknown(kind, name, table, where)

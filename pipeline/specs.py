"""params.yaml as typed data: models, calibration sets, recipes, targets, workloads, tasks, matrix.

Adding one of them is one entry of data. Every wrong key, id or reference ends in an InputError that names the
entry, what was found and the nearest known name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from pipeline.choice.objective import Slo
from pipeline.errors import InputError
from pipeline.sources import Source
from pipeline.speed.workloads import Workload
from pipeline.tuning.spec import Tuning

ID_PATTERN = r"^[a-z0-9]+(-[a-z0-9]+)*$"
Id = Annotated[str, StringConstraints(pattern=ID_PATTERN)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Model(_Strict):
    """A checkpoint at a pinned revision. `instruct`: has a chat template that calibration and evals use."""

    source: str
    instruct: bool = True
    trust_remote_code: bool = False
    revision: str | None = Field(default=None, description="digest that a dir: source must have, if given")
    license: str | None = None
    note: str | None = None
    eos_token: str | None = Field(default=None, description="mends a tokenizer whose source names a wrong one")
    tokenizer_of: Id | None = Field(default=None, description="the model whose tokenizer a random: source takes")

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
    """What is stored and computed (`format`), by which `algorithm`, made by which `backend`.

    `kv_cache: fp8` calibrates scales for the KV cache too. `producers` names another backend for a runtime; without it
    the plan takes the first one whose artifact that runtime loads (pipeline/producers.py).
    """

    format: str
    algorithm: str
    backend: str
    group_size: int | None = Field(default=None, gt=0)
    calib_set: Id | None = None
    calib_samples: int | None = Field(default=None, gt=0, description="use only the first N samples of the set")
    options: dict[str, Any] | None = None
    kv_cache: Literal["bf16", "fp8"] = "bf16"
    producers: dict[str, str] | None = None
    note: str | None = None


class Target(_Strict):
    """A kind of machine; numbers are per GPU. Bandwidth and peaks carry their source in `source`; price only if given.

    `memory_gib` is as sold, `usable_gib` what its driver reports in all. `peaks_tflops`: dense, without sparsity.

    `workloads` are timed on it instead of those under `benchmark` or `benchmark_gpu`.
    """

    device: Literal["cpu", "cuda"]
    gpu: str | None = None
    sm: int | None = None
    memory_gib: float | None = None
    usable_gib: float | None = Field(default=None, gt=0)
    count: int = Field(default=1, gt=0)
    bandwidth_gb_s: float | None = Field(default=None, gt=0)
    peaks_tflops: dict[Literal["bf16", "fp8", "int8", "fp4"], Annotated[float, Field(gt=0)]] | None = None
    price_usd_per_h: float | None = Field(default=None, gt=0, description="of one GPU, or of the machine for a CPU")
    workloads: list[Id] | None = Field(default=None, min_length=1)
    source: str | None = None

    @model_validator(mode="after")
    def _gpu_facts(self) -> Target:
        missing = [n for n in ("gpu", "sm", "memory_gib") if getattr(self, n) is None]
        if self.device == "cuda" and missing:
            raise ValueError(f"a cuda target needs {', '.join(missing)}")
        return self


class Task(_Strict):
    """An lm-eval task or group; `metric` and `filter` as lm-eval names them, per item 0 or 1 (or a fraction).

    `hub: true` needs data that only a connected host has. `tier`: the lowest tier that runs it. `smoke_items`: how many
    items, chosen by a hash of their id, below the release tier (all if left out). `repeats` and `temperature`: of a
    sampled reasoning task, in the release tier. `when`: only where the KV cache is quantized.
    """

    lm_eval: str
    metric: str = "acc"
    filter: str = "none"
    hub: bool = False
    num_fewshot: int | None = Field(default=None, ge=0)
    tier: Literal["smoke", "release"] = "smoke"
    smoke_items: int | None = Field(default=None, gt=0)
    repeats: int = Field(default=1, gt=0)
    temperature: float | None = Field(default=None, ge=0)
    when: Literal["kv-cache-quantized"] | None = None

    @model_validator(mode="after")
    def _sampled(self) -> Task:
        if self.repeats > 1 and not self.temperature:
            raise ValueError("repeats without a temperature ask the same greedy question again; give a temperature")
        return self


class NoiseFloor(_Strict):
    """How much of the evaluation the baseline answers a second time: items per task, held-out windows."""

    items: int = Field(default=100, gt=0)
    windows: int = Field(default=16, gt=1)


class Evaluation(_Strict):
    """What evaluate does: tasks by id, the held-out set, the number of logprobs kept per position, the tier."""

    tasks: list[Id]
    held_out: Id
    top_k: int = Field(default=20, ge=1, le=20)
    tier: Literal["canary", "fidelity", "smoke", "release"] = "smoke"
    noise_floor: NoiseFloor | None = None


class TrtllmRuntime(_Strict):
    """How TensorRT-LLM is reached, for `trtllm-engine` and `trtllm-bundle`.

    `version` is the one to plan for; `prefix` stands before its commands (a container command), else they are on PATH;
    `container` is the image that a package names; `build` holds flags of trtllm-build, without dashes.
    """

    version: str | None = None
    prefix: list[str] = Field(default_factory=list)
    container: str | None = None
    build: dict[str, Any] = Field(default_factory=dict)
    build_timeout_s: float = Field(default=7200, gt=0)


class MatrixRow(_Strict):
    """A product of ids.

    `measure: true` puts evaluate and benchmark of these cells in the default `dvc repro`; `measure: on-target` leaves
    them to `dvc repro --glob '*@*.<target>'` on a host that is the target, which makes the checkpoints there too.
    `package: true` makes the packages of TensorRT-LLM's cells here, though nothing is built or measured.
    """

    models: list[Id]
    recipes: list[Id]
    runtimes: list[Id]
    targets: list[Id]
    measure: bool | Literal["on-target"] = False
    package: bool = False


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
    benchmark_gpu: list[Id] = Field(default_factory=list)
    slos: dict[Id, Slo] = Field(default_factory=dict)
    serving: dict[str, dict[str, Any]] = Field(default_factory=dict)
    tuning: dict[str, Tuning] = Field(default_factory=dict)
    trtllm: dict[Literal["trtllm-engine", "trtllm-bundle"], TrtllmRuntime] = Field(default_factory=dict)
    baseline: Id
    allow_unknown: list[str] = Field(default_factory=list, description="format.runtime.target to serve though unknown")
    matrix: list[MatrixRow]

    def workloads_of(self, target: Target) -> list[str]:
        """Return the ids of the workloads that are timed on a target."""
        on_gpu = self.benchmark_gpu if target.device == "cuda" else []
        return list(target.workloads or on_gpu or self.benchmark)

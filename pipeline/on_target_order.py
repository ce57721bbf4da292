"""What to run on a target and in which order: from the plan alone, without running anything but `dvc repro --dry`."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.errors import unknown
from pipeline.shapes import is_random
from pipeline.side_by_side import Task
from pipeline.specs import Params

FILE = "stages/vllm_cuda/dvc.yaml"
# What of a row comes first; so many timings stand before its tuning runs.
FIRST, TUNE, SCALING, OTHERS, QUALITY = range(5)
FIRST_TIMINGS = 2
# What quantizing takes in times of the weights: they, one layer's work, and what is written.
ROOM = 1.5
# The share of its guess in which a timing may be done.
SOONER = 0.6
# Where the plan of a tuning run names the other packages that it serves (pipeline/plan_on_target.py).
TRIED = ("other", "another", "third")


def order(params: Params, plan: dict[str, Any], target: str) -> list[str]:
    """Return the measuring stages of a target, the most telling first.

    Row by row of the matrix, the speed of large shapes and the quality of real models; then the noise floors of the
    large baselines, and last the speed of models that are too small to fill a GPU. Of each row the first two
    timings, then its tuning runs in params.yaml's order, then its other timings. How the target scales over its GPUs
    comes right after the tuning runs of its first row.
    """
    found: list[tuple[tuple[int, int, int], int, str]] = []
    lead: dict[int, int] = {}
    timed: dict[tuple[int, int], int] = {}

    def add(phase: int, row: int, place: int, stage: str) -> None:
        found.append(((phase, row, place), len(found), stage))

    def items(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
        return ((name, item) for name, item in plan["on_target"][kind].items() if item["target"] == target)

    for name, item in items("benchmark"):
        random = is_random(params.models[item["model"]].source)
        phase = 2 if not random else 1 if name == item["baseline"] else 0
        before = timed.get((phase, item["row"]), 0)
        timed[phase, item["row"]] = before + 1
        lead[item["row"]] = min(phase, lead.get(item["row"], phase))
        add(phase, item["row"], FIRST if before < FIRST_TIMINGS else OTHERS, f"benchmark@{name}")
    entries = list(params.tuning)
    for name, item in sorted(items("tune"), key=lambda pair: entries.index(pair[0])):
        add(lead.get(item["row"], 0), item["row"], TUNE, f"tune@{name}")
    phase, row = min(((phase, row) for row, phase in lead.items()), default=(0, 0))
    for name, _ in items("scaling"):
        add(phase, row, SCALING, f"scaling@{name}")
    for name, item in items("evaluate"):
        add(0, item["row"], QUALITY, f"evaluate@{name}")
    return [stage for _, _, stage in sorted(found)]


def pending(stages: list[str], dvc: Callable[[list[str]], str]) -> list[str]:
    """Return the stages that DVC would run; weights and raw files that are missing here and unchanged do not count."""
    lock = Path(FILE).with_name("dvc.lock")
    locked = (yaml.safe_load(lock.read_text(encoding="utf-8")) or {}).get("stages", {}) if lock.exists() else {}
    # DVC takes a missing result for one that could be fetched; here it means that the measurement is not there.
    ran = [stage for stage in stages if stage in locked and result(stage).exists()]
    if not ran:
        return list(stages)
    said = dvc(["repro", "--dry", "--allow-missing", "--single-item", *(f"{FILE}:{s}" for s in ran)])
    fresh = set(ran) - set(re.findall(r"Running stage '(?:[^':]*:)?([^']+)'", said))
    return [stage for stage in stages if stage not in fresh]


def result(stage: str) -> Path:
    """Return the file that a measuring stage leaves in git."""
    kind, _, cell = stage.partition("@")
    return Path("artifacts/results") / cell / f"{kind.replace('evaluate', 'eval').replace('benchmark', 'bench')}.json"


def item_of(plan: dict[str, Any], stage: str) -> dict[str, Any]:
    """Return what the plan says of a measuring stage."""
    kind, _, cell = stage.partition("@")
    return dict(plan["on_target"][kind][cell])


def packages_of(plan: dict[str, Any], stage: str) -> list[str]:
    """Return the packages that a measuring stage serves: its cell's own, its baseline's, or those that it tries."""
    kind, _, cell = stage.partition("@")
    item = item_of(plan, stage)
    if kind == "scaling":
        return [cell]
    if kind == "tune":
        files = [Path(item[key]) for key in TRIED if key in item]
        return [cell, *(file.parts[2] for file in files if file.parts[:2] == ("artifacts", "packages"))]
    return list(dict.fromkeys([item["baseline"], cell]))


def needs(plan: dict[str, Any], stages: Iterable[str]) -> dict[str, list[str]]:
    """Return what must be made before `stages` can run: fetches, calibrations, and one chain per package."""
    cells = plan["on_target"]
    stages = list(stages)
    packages = dict.fromkeys(p for stage in stages for p in packages_of(plan, stage))
    chains = [chain(plan, name) for name in packages]
    wanted = dict.fromkeys(cells["package"][name]["model"] for name in packages)
    # Random weights take another model's tokenizer, so that one comes first.
    origins = {m: cells["fetch"][m]["origin"].removeprefix("artifacts/models/") for m in wanted if m in cells["fetch"]}
    models = dict.fromkeys(x for m in wanted for x in ([origins[m]] if origins.get(m) in plan["fetch"] else []) + [m])
    calib = {i["needs"] for c in chains for s in c if (i := cells["quantize"].get(s.split("@", 1)[1]))}
    calib |= {item_of(plan, stage)["held_out"] for stage in stages}
    sets = [key for group in (plan, cells) for key in group["calibrate"] if f"calib_data/{key}" in calib]
    return {
        "fetch": [f"fetch@{m}" if m in plan["fetch"] else f"{FILE}:fetch@{m}" for m in models],
        "calibrate": [f"calibrate@{s}" if s in plan["calibrate"] else f"{FILE}:calibrate@{s}" for s in sets],
        "chains": [" ".join(f"{FILE}:{stage}" for stage in chain) for chain in chains],
    }


def users(plan: dict[str, Any], stages: Iterable[str]) -> dict[str, list[str]]:
    """Return for each fetch, calibration and chain, named by its last stage, which of `stages` need it."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        for what in itertools.chain.from_iterable(needs(plan, [stage]).values()):
            found.setdefault(short(what.split()[-1]), []).append(stage)
    return found


def short(stage: str) -> str:
    """Return a stage's name without the file that it stands in."""
    return stage.removeprefix(f"{FILE}:")


def with_references(plan: dict[str, Any], wanted: list[str], todo: list[str]) -> list[str]:
    """Return `todo` with the evaluations of baselines whose answers the others are compared with, and are not here.

    Their results are in git, those answers are not: a fresh host has none.
    """
    lost = {
        f"evaluate@{item['baseline']}"
        for stage in todo
        if stage.startswith("evaluate@") and not Path((item := item_of(plan, stage))["reference"]).exists()
    }
    return [stage for stage in wanted if stage in todo or stage in lost]


def matching(stages: list[str], patterns: Sequence[str]) -> list[str]:
    """Return the stages that one of `patterns` (shell wildcards) matches, in their order; all without patterns.

    Raises:
        InputError: a pattern that matches none.
    """
    for pattern in patterns:
        if not fnmatch.filter(stages, pattern):
            raise unknown("measurement", pattern, stages, "--only (stages of stages/vllm_cuda/dvc.yaml)")
    return [s for s in stages if not patterns or any(fnmatch.fnmatchcase(s, pattern) for pattern in patterns)]


def missing_first(stages: list[str]) -> list[str]:
    """Return `stages` with those that left no result yet before those whose result is to be measured again."""
    return sorted(stages, key=lambda stage: result(stage).exists())


def in_time(stages: list[str], guess_s: Mapping[str, float], left_s: float, gpus: int) -> list[str]:
    """Return `stages` without the timings that `left_s` seconds would not reach, were each done in SOONER of its guess.

    What is never timed need not be made: checkpoints and packages cost minutes too.
    """
    found, before_s = [], 0.0
    for stage in stages:
        kind = stage.split("@")[0]
        if kind != "evaluate":
            if before_s >= left_s:
                continue
            before_s += SOONER * guess_s[kind] / gpus
        found.append(stage)
    return found


def jobs_that_fit(jobs: int, weight_bytes: int, gpu_bytes: float, ram_bytes: float, gpus: int) -> int:
    """Return how many of `jobs` checkpoints of a model can be made at once on each GPU: one needs its weights and some.

    Args:
        jobs: as many as are asked for.
        weight_bytes: of the largest model that is quantized.
        gpu_bytes: of one GPU; ram_bytes: of the host, which all `gpus` share.
    """
    each = max(1.0, ROOM * weight_bytes)
    return max(1, min(jobs, int(gpu_bytes / each), int(ram_bytes / each / gpus)))


def untimed(plan: dict[str, Any], todo: list[str], everywhere: bool) -> list[Task]:
    """Return the chains and evaluations of `todo` as tasks, what many wait for first, else in their order.

    A chain waits for nothing but a chain that makes the same checkpoint. An evaluation waits for its chain, its
    baseline's and the baseline's evaluation. `everywhere`: the target's cells are spread over all its GPUs.
    """
    made: dict[str, str] = {}
    tasks = []
    for text in needs(plan, todo)["chains"]:
        stages = tuple(text.split())
        name = short(stages[-1])
        after = dict.fromkeys(made[stage] for stage in stages if stage in made)
        made |= {stage: made.get(stage, name) for stage in stages}
        tasks.append(Task(name, stages, tuple(after)))
    for stage in (s for s in todo if s.startswith("evaluate@")):
        first = f"evaluate@{item_of(plan, stage)['baseline']}"
        chains = [f"package@{name}" for name in packages_of(plan, stage)]
        after = dict.fromkeys([*chains, *([first] if first != stage else [])])
        tasks.append(Task(stage, (f"{FILE}:{stage}",), tuple(after), everywhere))
    waited = Counter(name for task in tasks for name in task.after)
    return sorted(tasks, key=lambda task: waited[task.name] < 2)


def timed(todo: list[str], everywhere: bool) -> list[Task]:
    """Return the timings of `todo` as tasks in their order; one over all GPUs has them to itself."""
    return [
        Task(stage, (f"{FILE}:{stage}",), (), everywhere or stage.startswith("scaling@"))
        for stage in todo
        if not stage.startswith("evaluate@")
    ]


def chain(plan: dict[str, Any], package: str) -> list[str]:
    """Return quantize, lint and package of one cell, in their order; the baseline has no quantize."""
    item = plan["on_target"]["package"][package]
    made = Path(item["lint"]).name.removesuffix(".lint.json")
    quantize = [f"quantize@{made}"] if made in plan["on_target"]["quantize"] else []
    return [*quantize, f"lint@{made}", f"package@{package}"]

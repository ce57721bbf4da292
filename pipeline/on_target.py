"""Run a target's cells on it, the most telling first, within a time limit, and keep what is done.

It is `dvc repro --glob '*@*.<target>'` in an order and with a limit: a GPU host is often lent for half an hour and
keeps nothing. DVC decides what is still to do; a cell whose result is there and still holds is not made again, nor
anything that only it needs. Quantizing and evaluating run several at a time, because nothing is timed there; timings
run alone.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import re
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from pipeline import host, jsonio, manifest
from pipeline.errors import InputError, WorkError, unknown
from pipeline.plan import PLAN, facts_path
from pipeline.runstage import STATE
from pipeline.shapes import is_random
from pipeline.specs import Params

FILE = "stages/vllm_cuda/dvc.yaml"
# What a stage is taken to last before one of its kind was seen; measured times replace it.
FIRST_GUESS_S = {"benchmark": 300.0, "evaluate": 150.0}
# Raw files that a reader of results does not need, by the end of their names.
BULKY = (".npz", "inputs.json", ".parquet", "server_metrics_export.jsonl", ".raw.jsonl")


def order(params: Params, plan: dict[str, Any], target: str) -> list[str]:
    """Return the measuring stages of a target, the most telling first.

    Row by row of the matrix, the speed of large shapes and the quality of real models; then the noise floors of the
    large baselines, and last the speed of models that are too small to fill a GPU.
    """
    cells = plan["on_target"]
    found: list[tuple[tuple[int, int], int, str]] = []
    for kind in ("benchmark", "evaluate"):
        for name, item in cells[kind].items():
            if item["target"] != target:
                continue
            random = is_random(params.models[item["model"]].source)
            baseline = name == item["baseline"]
            phase = 0 if kind == "evaluate" or (random and not baseline) else 1 if random else 2
            rank = (phase, item["row"])
            found.append((rank, len(found), f"{kind}@{name}"))
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


def needs(plan: dict[str, Any], stages: Iterable[str]) -> dict[str, list[str]]:
    """Return what must be made before `stages` can run: fetches, calibrations, and one chain per package."""
    cells = plan["on_target"]
    items = [cells[stage.split("@")[0]][stage.split("@", 1)[1]] for stage in stages]
    packages = dict.fromkeys(p for item in items for p in (item["baseline"], _cell(item)))
    chains = [_chain(plan, name) for name in packages]
    wanted = dict.fromkeys(cells["package"][name]["model"] for name in packages)
    # Random weights take another model's tokenizer, so that one comes first.
    origins = {m: cells["fetch"][m]["origin"].removeprefix("artifacts/models/") for m in wanted if m in cells["fetch"]}
    models = dict.fromkeys(x for m in wanted for x in ([origins[m]] if origins.get(m) in plan["fetch"] else []) + [m])
    calib = {i["needs"] for c in chains for s in c if (i := cells["quantize"].get(s.split("@", 1)[1]))}
    calib |= {item["held_out"] for item in items}
    sets = [key for group in (plan, cells) for key in group["calibrate"] if f"calib_data/{key}" in calib]
    return {
        "fetch": [f"fetch@{m}" if m in plan["fetch"] else f"{FILE}:fetch@{m}" for m in models],
        "calibrate": [f"calibrate@{s}" if s in plan["calibrate"] else f"{FILE}:calibrate@{s}" for s in sets],
        "chains": [" ".join(f"{FILE}:{stage}" for stage in chain) for chain in chains],
    }


def _cell(item: dict[str, Any]) -> str:
    return ".".join(item[key] for key in ("model", "recipe", "runtime", "target"))


def _chain(plan: dict[str, Any], package: str) -> list[str]:
    """Return quantize, lint and package of one cell, in their order; the baseline has no quantize."""
    item = plan["on_target"]["package"][package]
    made = Path(item["lint"]).name.removesuffix(".lint.json")
    quantize = [f"quantize@{made}"] if made in plan["on_target"]["quantize"] else []
    return [*quantize, f"lint@{made}", f"package@{package}"]


def groups(plan: dict[str, Any], stages: list[str]) -> list[list[str]]:
    """Return the stages in runs of one kind and one row of the matrix: what is prepared together."""

    def key(stage: str) -> tuple[str, int]:
        kind, _, cell = stage.partition("@")
        return kind, plan["on_target"][kind][cell]["row"]

    return [list(group) for _, group in itertools.groupby(stages, key)]


class Run:
    """One run on a target; `deadline` is a time.monotonic() value, None without a limit."""

    def __init__(
        self, params: Params, target: str, minutes: float | None, jobs: int, out: Path | None, gpus: int = 1
    ) -> None:
        """Read the plan; raise an InputError for a target that has no such cells."""
        self.plan = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
        self.params, self.target, self.jobs, self.out = params, target, jobs, out
        self.gpus: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        for number in range(gpus):
            self.gpus.put(str(number) if gpus > 1 else None)
        known = sorted({item["target"] for item in self.plan["on_target"]["benchmark"].values()})
        if target not in known:
            raise unknown("target with `measure: on-target`", target, known, "params.yaml (matrix)")
        self.start = time.monotonic()
        self.deadline = None if minutes is None else self.start + 60 * minutes
        self.guess_s = dict(FIRST_GUESS_S)
        self.made: set[str] = set()
        self.keeping = threading.Lock()
        self.done: list[str] = []
        self.failed: dict[str, str] = {}
        self.skipped: list[str] = []

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{time.monotonic() - self.start:6.0f} s  {text}", flush=True)

    def dvc(self, arguments: list[str], gpu: str | None = None) -> str:
        """Run dvc, keep its output in a log, and return it; `gpu` is the only one that it sees.

        Raises:
            WorkError: it failed; with the stage's own sentence.
        """
        command = [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]
        env = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=env, check=False)
        log = STATE / "logs" / "on_target.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("a", encoding="utf-8") as sink:
            sink.write(f"$ dvc {' '.join(arguments)}\n{done.stdout}{done.stderr}\n")
        if done.returncode != 0:
            raise WorkError(
                f"dvc {' '.join(arguments[:3])} ... failed: {last_error(done.stdout + done.stderr)} Log {log}."
            )
        return done.stdout + done.stderr

    def __call__(self) -> int:
        """Run what is pending; return 0 when every cell has its results, 1 when some failed or time ran out."""
        host.need_target(self.params.targets[self.target], self.target)
        if not Path(".git").exists():
            self.dvc(["config", "--local", "core.no_scm", "true"])
        self.dvc(["repro", "check", f"{FILE}:kind@{self.target}"])
        wanted = order(self.params, self.plan, self.target)
        todo = pending(wanted, self.dvc)
        self.say(f"{len(wanted) - len(todo)} of {len(wanted)} measurements are there already, {len(todo)} to do")
        for group in groups(self.plan, todo):
            # What none of them has time for is not made either.
            if not any(self._time_for(stage) for stage in group):
                self.skipped += group
                continue
            try:
                self._prepare(group)
            except WorkError as error:
                self.say(f"FAILED {error}")
                self.failed |= dict.fromkeys(group, str(error))
                continue
            self._measure(group)
        self._keep()
        for stage, why in self.failed.items():
            self.say(f"FAILED   {stage}: {why}")
        for stage in self.skipped:
            self.say(f"no time  {stage}")
        self.say(f"{len(self.done)} done, {len(self.failed)} failed, {len(self.skipped)} without time")
        return 1 if self.failed or self.skipped else 0

    def _prepare(self, todo: list[str]) -> None:
        """Fetch, calibrate, quantize, lint and package; the first of each in order, then several at a time."""
        found = needs(self.plan, todo)
        for stage in [*found["fetch"], *found["calibrate"]]:
            if not is_there(stage):
                with kept_facts(self.plan["fetch"]):
                    self.dvc(["repro", "--single-item", stage])
                self.say(stage)
        chains = [chain for chain in found["chains"] if chain not in self.made]
        self.made |= set(chains)
        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(self._stage, chains))

    def _measure(self, group: list[str]) -> None:
        """Time one cell a GPU, evaluate side by side; a baseline is evaluated before what is compared with it."""
        if group[0].startswith("benchmark@"):
            with ThreadPoolExecutor(self.gpus.qsize()) as pool:
                list(pool.map(self._on_gpu, group))
            return
        baselines = {item["baseline"] for item in self.plan["on_target"]["evaluate"].values()}
        first = [s for s in group if s.removeprefix("evaluate@") in baselines]
        for part in (first, [s for s in group if s not in first]):
            with ThreadPoolExecutor(self.jobs) as pool:
                list(pool.map(lambda s: self._stage(f"{FILE}:{s}") if self._has_time(s) else None, part))

    def _on_gpu(self, stage: str) -> None:
        gpu = self.gpus.get()
        try:
            if self._has_time(stage):
                self._stage(f"{FILE}:{stage}", gpu)
        finally:
            self.gpus.put(gpu)

    def _time_for(self, stage: str) -> bool:
        return self.deadline is None or time.monotonic() + self.guess_s[stage.split("@")[0]] <= self.deadline

    def _has_time(self, stage: str) -> bool:
        if not self._time_for(stage):
            self.skipped.append(stage)
            return False
        return True

    def _stage(self, stages: str, gpu: str | None = None) -> None:
        """Run one stage or a chain; a failure is noted and the rest goes on."""
        start = time.monotonic()
        names = stages.replace(f"{FILE}:", "")
        last = names.split()[-1]
        try:
            said = self.dvc(["repro", "--single-item", *stages.split()], gpu)
        except WorkError as error:
            self.failed[last] = str(error)
            self.say(f"FAILED {names}: {error}")
            return
        took = time.monotonic() - start
        if "Running stage" in said:
            kind = last.split("@")[0]
            if kind in self.guess_s:
                self.guess_s[kind] = took
                self.done.append(last)
            self.say(f"{names}: {took:.0f} s")
        self._keep()

    def _keep(self) -> None:
        """Write results.tar.gz and raw.tar.gz into the folder that is brought home, whole or not at all."""
        if self.out is not None:
            with self.keeping:
                keep(self.out, self.target, self.plan["on_target"]["fetch"])


def last_error(text: str) -> str:
    """Return the sentence of a stage's error when dvc's output has one, else dvc's own last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if "quantpress: error: " in line] or [x for x in lines if x.startswith("ERROR")]
    return (said or lines or ["it wrote nothing"])[-1].removeprefix("quantpress: error: ")[:400]


def keep(out: Path, target: str, models: Iterable[str] = ()) -> None:
    """Pack a target's results into `out`: results.tar.gz is what git keeps, raw.tar.gz the logs and raw exports.

    `models` were made on the target, so that their facts come home too; any other model's are those of its first fetch.
    """
    out.mkdir(parents=True, exist_ok=True)
    results = [*Path("artifacts/results").glob(f"*.{target}"), *Path("artifacts/packages").glob(f"*.{target}")]
    results += [p for m in models for p in (Path(facts_path(m)), *Path("calib_data").glob(f"*.{m}")) if p.exists()]
    results += [p for p in (Path(FILE).with_name("dvc.lock"), STATE / "times.jsonl") if p.exists()]
    raw = [p for p in Path("artifacts/raw").glob(f"*.{target}/**/*") if p.is_file() and not p.name.endswith(BULKY)]
    raw += [p for p in (STATE / "logs").glob("*.log")]
    for name, paths in (("results", results), ("raw", raw)):
        part = out / f".{name}.part"
        with tarfile.open(part, "w:gz") as tar:
            for path in sorted(paths):
                tar.add(path)
        part.replace(out / f"{name}.tar.gz")


def is_there(stage: str) -> bool:
    """Say whether what a fetch or calibrate stage makes is here, whatever made it.

    A model is, when it has the bytes that its facts name. A calibration set is, when it is in the tree: another
    Python's own texts would freeze it differently.
    """
    kind, _, name = stage.rpartition(":")[2].partition("@")
    if kind == "calibrate":
        return (Path("calib_data") / name / "tokens.json").exists()
    facts, folder = Path(facts_path(name)), Path("artifacts/models") / name
    return facts.exists() and folder.is_dir() and not manifest.differences(folder, jsonio.read_json(facts)["files"])


@contextmanager
def kept_facts(models: Iterable[str]) -> Iterator[None]:
    """Put the committed facts of models back after they were fetched again, when the bytes are the same.

    They also name the versions of the libraries that fetched, which differ here, and every stage's digest of its input
    would with them.

    Raises:
        WorkError: a model came out with other bytes than the committed ones.
    """
    before = {path: path.read_text(encoding="utf-8") for m in models if (path := Path(facts_path(m))).exists()}
    yield
    for path, text in before.items():
        if not path.exists():
            jsonio.write_text(path, text)
            continue
        now, then = jsonio.read_json(path), json.loads(text)
        if now["files"] != then["files"]:
            other = [name for name in then["files"] if now["files"].get(name) != then["files"][name]]
            raise WorkError(f"{path.parent.name} was fetched here with other bytes than {path} says: {other[:5]}.")
        jsonio.write_text(path, text)


def need_minutes(minutes: float | None) -> None:
    """Refuse a limit that is none.

    Raises:
        InputError: zero or less.
    """
    if minutes is not None and minutes <= 0:
        raise InputError(f"--minutes {minutes:g} leaves no time; leave it out to run without a limit.")

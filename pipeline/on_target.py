"""Run a target's cells on it, the most telling first, within a time limit, and keep what is done.

It is `dvc repro --glob '*@*.<target>'` in an order and with a limit: a GPU host is often lent for half an hour and
keeps nothing. DVC decides what is still to do; a cell whose result is there and still holds is not made again, nor
anything that only it needs. Checkpoints are made and cells evaluated first, several at a time on every GPU, because
nothing is timed there; then timings run, one alone on a GPU.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil
import yaml

from pipeline import host, jsonio
from pipeline.errors import InputError, WorkError, unknown
from pipeline.guard import Guarded
from pipeline.on_target_files import is_there, keep, kept_facts
from pipeline.on_target_order import (
    FILE,
    in_time,
    jobs_that_fit,
    matching,
    missing_first,
    needs,
    order,
    packages_of,
    pending,
    short,
    timed,
    untimed,
    users,
    with_references,
)
from pipeline.plan import PLAN, facts_path
from pipeline.runstage import STATE
from pipeline.side_by_side import Slots, Task, run
from pipeline.specs import Params

# What a stage is taken to last before one of its kind was seen; measured times replace it.
FIRST_GUESS_S = {"benchmark": 300.0, "evaluate": 150.0, "tune": 420.0, "scaling": 300.0}
VISIBLE = "CUDA_VISIBLE_DEVICES"
KEEP_EVERY_S = 30.0


class Run:
    """One run on a target; `deadline` is a time.monotonic() value, None without a limit."""

    def __init__(
        self, params: Params, target: str, minutes: float | None, jobs: int, out: Path | None, gpus: int = 1,
        only: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Read the plan; `jobs` is how many untimed stages run at once on each of `gpus` GPUs, `only` names stages.

        Raises:
            InputError: a target that has no such cells, or more GPUs than CUDA_VISIBLE_DEVICES lets be seen, or
                nothing that `only` matches.
        """
        self.plan = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
        self.params, self.target, self.jobs, self.out = params, target, jobs, out
        known = sorted({item["target"] for item in self.plan["on_target"]["benchmark"].values()})
        if target not in known:
            raise unknown("target with `measure: on-target`", target, known, "params.yaml (matrix)")
        self.wanted = matching(order(params, self.plan, target), only)
        self.gpus = gpu_names(gpus)
        self.everywhere = params.targets[target].count > 1
        self.start = time.monotonic()
        self.deadline = None if minutes is None else self.start + 60 * minutes
        self.guess_s = dict(FIRST_GUESS_S)
        self.writing, self.keeping = threading.Lock(), threading.Lock()
        self.stopped = False
        self.jobs_running: set[Guarded] = set()
        self.users: dict[str, list[str]] = {}
        self.done: list[str] = []
        self.failed: dict[str, str] = {}
        self.skipped: list[str] = []

    def say(self, text: str) -> None:
        """Print a line with the seconds since the start."""
        print(f"{time.monotonic() - self.start:6.0f} s  {text}", flush=True)

    def dvc(self, arguments: list[str], gpu: str | None = None) -> str:
        """Run dvc, keep its output in a log, and return it; `gpu` is the only one that it sees.

        It ends with this process, and all that it started: a stage whose starter is gone would hold the GPU.

        Raises:
            WorkError: it failed, with the stage's own sentence, or this run was stopped.
        """
        command = [sys.executable, "-m", "dvc", "--wait-for-lock", *arguments]
        with tempfile.TemporaryFile() as sink:
            with self.writing:
                if self.stopped:
                    raise WorkError("The run was stopped.")
                job = Guarded(command, os.environ | ({} if gpu is None else {VISIBLE: gpu}), sink)
                self.jobs_running.add(job)
            code = job.process.wait()
            with self.writing:
                self.jobs_running.discard(job)
                job.stop()
            sink.seek(0)
            said = sink.read().decode("utf-8", errors="replace")
        self._log(f"$ dvc {' '.join(arguments)}\n{said}\n")
        if self.stopped:
            raise WorkError("The run was stopped.")
        if code != 0:
            raise WorkError(f"dvc {' '.join(arguments[:3])} ... failed: {last_error(said)} Log {self._log()}.")
        return said

    def _log(self, text: str = "") -> Path:
        log = STATE / "logs" / "on_target.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        with self.writing, log.open("a", encoding="utf-8") as sink:
            sink.write(text)
        return log

    def __call__(self) -> int:
        """Run what is pending; return 0 when every cell has its results, 1 when some failed or time ran out."""
        host.need_target(self.params.targets[self.target], self.target)
        if len(self.gpus) > max(1, len(host.gpus())):
            raise InputError(f"--gpus {len(self.gpus)} wants more GPUs than this host has: {len(host.gpus())}.")
        try:
            if not Path(".git").exists():
                self.dvc(["config", "--local", "core.no_scm", "true"])
            self.dvc(["repro", "check", f"{FILE}:kind@{self.target}"])
            with self._watched():
                self._all()
        except BaseException:  # Ctrl-C above all: what runs in threads would hold the GPU, and this process
            self._stop()
            self._keep()
            raise
        self._keep()
        for stage, why in self.failed.items():
            self.say(f"FAILED   {stage}: {why}")
        for stage in self.skipped:
            self.say(f"no time  {stage}")
        self.say(f"{len(self.done)} done, {len(self.failed)} failed, {len(self.skipped)} without time")
        return 1 if self.failed or self.skipped else 0

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Pack results every KEEP_EVERY_S, end what runs at the deadline, and take TERM for Ctrl-C.

        A lent host may be gone before a stage ends, and stages write what they have after every leg.
        """
        over = threading.Event()

        def watch() -> None:
            while not over.wait(KEEP_EVERY_S):
                if self.deadline is not None and time.monotonic() > self.deadline and not self.stopped:
                    self.say("the time is over: what still runs is ended")
                    self._stop()
                try:
                    self._keep(with_raw=False)
                except Exception as error:  # a stage writes meanwhile; the next round packs anew
                    self._log(f"could not pack the results: {error}\n")

        watcher = threading.Thread(target=watch, daemon=True)
        before = (
            signal.signal(signal.SIGTERM, _interrupt) if threading.current_thread() is threading.main_thread() else None
        )
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    def _all(self) -> None:
        """Make and evaluate side by side, then time: nothing else runs while something is timed."""
        wanted = self.wanted
        todo = pending(wanted, self.dvc)
        self.say(f"{len(wanted) - len(todo)} of {len(wanted)} measurements are there already, {len(todo)} to do")
        todo = with_references(self.plan, missing_first(wanted), todo)
        if self.deadline is not None:
            reached = in_time(todo, self.guess_s, self.deadline - time.monotonic(), len(self.gpus))
            self.skipped += [stage for stage in todo if stage not in reached]
            todo = reached
        self.users = users(self.plan, todo)
        self._prepare(todo)
        todo = [stage for stage in todo if stage not in self.failed and stage not in self.skipped]
        run(untimed(self.plan, todo, self.everywhere), Slots(self.gpus, self._jobs(todo)), self._ready, self._work)
        run(timed(todo, self.everywhere), Slots(self.gpus, 1), self._ready, self._work, in_order=True)

    def _jobs(self, todo: list[str]) -> int:
        """Return how many untimed stages run at once on a GPU: fewer than asked for where they would not fit."""
        chains = " ".join(needs(self.plan, todo)["chains"])
        made = [i["model"] for name, i in self.plan["on_target"]["quantize"].items() if f"quantize@{name} " in chains]
        sizes = [jsonio.read_json(f)["weight_bytes"] for m in set(made) if (f := Path(facts_path(m))).exists()]
        memory = 2**30 * float(self.params.targets[self.target].memory_gib or 0)
        jobs = jobs_that_fit(self.jobs, max(sizes, default=0), memory, psutil.virtual_memory().total, len(self.gpus))
        if jobs < self.jobs:
            self.say(f"{jobs} at a time on each GPU instead of {self.jobs}: more would not fit into memory")
        return jobs

    def _prepare(self, todo: list[str]) -> None:
        """Fetch and calibrate, one after the other; what fails takes along only the stages that need it."""
        found = needs(self.plan, todo)
        for stage in [*found["fetch"], *found["calibrate"]]:
            if not self._is_wanted(short(stage)) or is_there(stage):
                continue
            try:
                with kept_facts(self.plan["fetch"]):
                    self.dvc(["repro", "--single-item", stage])
            except Exception as error:  # one model that cannot be had must not take the others along
                self._fail(short(stage), error)
                for user in self.users[short(stage)]:
                    self.failed.setdefault(user, f"not run, because {short(stage)} failed: {self.failed[short(stage)]}")
                continue
            self.say(stage)

    def _is_wanted(self, name: str) -> bool:
        """Say whether a stage that needs `name` may still run; what none has time for is not made, nor they then."""
        alive = [s for s in self.users[name] if s not in self.failed and s not in self.skipped]
        if any(self._time_for(stage) for stage in alive):
            return True
        self.skipped += alive
        return False

    def _ready(self, task: Task) -> bool:
        """Say whether a task can start now; note why not."""
        if task.name.startswith("package@"):
            return self._is_wanted(task.name)
        if task.name in self.failed or task.name in self.skipped:
            return False
        before = [*(f"package@{name}" for name in packages_of(self.plan, task.name)), *task.after]
        if broken := next((name for name in before if name in self.failed), None):
            why = self.failed[broken]
            self.failed[task.name] = why if why.startswith("not run") else f"not run, because {broken} failed: {why}"
            return False
        if any(name in self.skipped for name in before):
            self.skipped.append(task.name)
            return False
        return self._has_time(task.name)

    def _time_for(self, stage: str) -> bool:
        return self.deadline is None or time.monotonic() + self.guess_s[stage.split("@")[0]] <= self.deadline

    def _has_time(self, stage: str) -> bool:
        if not self._time_for(stage):
            self.skipped.append(stage)
            return False
        return True

    def _work(self, task: Task, gpu: str | None) -> None:
        """Run the stages of one task; a failure of any kind is noted and the rest goes on."""
        start = time.monotonic()
        names = " ".join(short(stage) for stage in task.stages)
        where = "" if len(self.gpus) == 1 else " on all GPUs" if gpu is None else f" on GPU {gpu}"
        try:
            said = self.dvc(["repro", "--single-item", *task.stages], gpu)
            took = time.monotonic() - start
            if "Running stage" in said:
                kind = task.name.split("@")[0]
                if kind in self.guess_s:
                    self.guess_s[kind] = took
                    self.done.append(task.name)
                self.say(f"{names}: {took:.0f} s{where}")
        except Exception as error:  # a thread must end with its task noted, whatever happened to it
            self._fail(task.name, error, where)
        if self.stopped:
            return
        try:
            self._keep(with_raw=False)
        except Exception as error:  # stages beside it write meanwhile; the next one packs anew
            self.say(f"could not pack the results, will try after the next stage: {error}")

    def _fail(self, name: str, error: Exception, where: str = "") -> None:
        if not isinstance(error, WorkError):
            self._log("".join(traceback.format_exception(error)))
        self.failed[name] = str(error) if isinstance(error, WorkError) else f"{type(error).__name__}: {error}"
        self.say(f"FAILED {name}{where}: {self.failed[name]}")

    def _stop(self) -> None:
        """End every dvc that runs, with all that it started."""
        with self.writing:
            self.stopped = True
            for job in self.jobs_running:
                job.stop()

    def _keep(self, with_raw: bool = True) -> None:
        """Write results.tar.gz and raw.tar.gz into the folder that is brought home, whole or not at all."""
        if self.out is not None:
            with self.keeping:
                keep(self.out, self.target, self.plan["on_target"]["fetch"], with_raw)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def gpu_names(count: int) -> list[str | None]:
    """Return the names of `count` GPUs for CUDA_VISIBLE_DEVICES; a single None where there is nothing to choose.

    Raises:
        InputError: the variable is set and names fewer.
    """
    if count == 1:
        return [None]
    seen = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    if seen and len(seen) < count:
        raise InputError(f"--gpus {count} wants more GPUs than {VISIBLE}={os.environ[VISIBLE]} names; unset it.")
    return list(seen[:count] or map(str, range(count)))


def last_error(text: str) -> str:
    """Return the sentence of a stage's error when dvc's output has one, else dvc's own last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if "quantpress: error: " in line] or [x for x in lines if x.startswith("ERROR")]
    return (said or lines or ["it wrote nothing"])[-1].removeprefix("quantpress: error: ")[:400]


def need_minutes(minutes: float | None) -> None:
    """Refuse a limit that is none.

    Raises:
        InputError: zero or less.
    """
    if minutes is not None and minutes <= 0:
        raise InputError(f"--minutes {minutes:g} leaves no time; leave it out to run without a limit.")

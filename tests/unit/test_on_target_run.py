"""A run on a target with a stand-in for dvc that notes when each stage ran, and on which GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import host, on_target, on_target_order
from pipeline.errors import InputError, WorkError
from pipeline.side_by_side import Task
from pipeline.specs import Params

ROOT = Path(__file__).parents[2]
TIMED = ("benchmark@", "tune@", "scaling@")
BASELINE = "smollm2-135m.bf16.vllm.h200"


class Seen(NamedTuple):
    name: str
    gpu: str | None
    start: float
    end: float


class Fake:
    """What `Run.dvc` is replaced by: takes a moment, fails or raises for the stages that are named."""

    def __init__(self, fails: tuple[str, ...] = (), raises: tuple[str, ...] = (), lasts_s: float = 0.004) -> None:
        self.fails, self.raises, self.lasts_s = fails, raises, lasts_s
        self.seen: list[Seen] = []
        self.lock = threading.Lock()

    def __call__(self, arguments: list[str], gpu: str | None = None) -> str:
        last = arguments[-1].rpartition(":")[2]
        start = time.monotonic()
        time.sleep(self.lasts_s)
        with self.lock:
            self.seen.append(Seen(last, gpu, start, time.monotonic()))
        for name in (a.rpartition(":")[2] for a in arguments):
            if name in self.fails:
                raise WorkError(f"{name} does not work.")
            if name in self.raises:
                raise RuntimeError(f"{name} broke")
        return f"Running stage '{last}':"

    def of(self, *kinds: str) -> list[Seen]:
        return [seen for seen in self.seen if seen.name.startswith(kinds)]

    def names(self) -> list[str]:
        return [seen.name for seen in self.seen]

    def one(self, name: str) -> Seen:
        (found,) = [seen for seen in self.seen if seen.name == name]
        return found


Start = Callable[..., on_target.Run]


@pytest.fixture
def start(
    params: Params, made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., on_target.Run]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(host, "need_target", lambda *_: None)
    monkeypatch.setattr(host, "gpus", lambda: [{"name": "NVIDIA H200"}] * 2)
    Path(".git").mkdir()
    Path("pipeline").mkdir()
    part = {key: made[key] for key in ("fetch", "calibrate", "on_target")}
    Path("pipeline/plan.yaml").write_text(yaml.dump(part, Dumper=yaml.CSafeDumper), "utf-8")

    def begin(fake: Fake, target: str = "h200", **how: Any) -> on_target.Run:
        monkeypatch.setattr(on_target.Run, "dvc", staticmethod(fake))
        options = {"minutes": None, "jobs": 2, "out": None, "gpus": 2} | how
        return on_target.Run(params, target, **options)

    return begin


def overlap(a: Seen, b: Seen) -> bool:
    return a.start < b.end and b.start < a.end


def most_at_once(seen: list[Seen]) -> int:
    return max(sum(s.start <= moment.start < s.end for s in seen) for moment in seen)


def test_everything_runs_and_nothing_runs_beside_what_is_timed(start: Start, params: Params) -> None:
    fake = Fake(lasts_s=0.03)
    run = start(fake)
    asked: list[str] = []
    ready = run._ready
    run._ready = lambda task: (asked.append(task.name), ready(task))[1]  # type: ignore[method-assign]
    assert run() == 0
    wanted = on_target_order.order(params, run.plan, "h200")
    assert sorted(run.done) == sorted(wanted)
    timed, untimed = fake.of(*TIMED), fake.of("package@", "evaluate@", "fetch@", "calibrate@")
    assert len(timed) + len(fake.of("evaluate@")) == len(wanted)
    assert max(s.end for s in untimed) <= min(s.start for s in timed)
    for gpu in ("0", "1"):
        assert most_at_once([s for s in timed if s.gpu == gpu]) == 1
        assert most_at_once([s for s in untimed if s.gpu == gpu]) == 2
    assert {s.gpu for s in timed} == {"0", "1"} and most_at_once(timed) == 2
    assert [name for name in asked if name.startswith(TIMED)] == [name for name in wanted if name.startswith(TIMED)]


def test_an_evaluation_waits_for_its_packages_and_its_baselines_answers_only(start: Start) -> None:
    fake = Fake(lasts_s=0.03)
    start(fake)()
    packages = fake.of("package@")
    base = fake.one(f"evaluate@{BASELINE}")
    assert fake.one(f"package@{BASELINE}").end <= base.start
    assert any(s.start > base.start for s in packages), "the baseline is evaluated while others are still made"
    for seen in fake.of("evaluate@"):
        assert fake.one(seen.name.replace("evaluate@", "package@")).end <= seen.start
        assert seen is base or base.end <= seen.start


def test_one_gpu_is_left_as_it_is(start: Start) -> None:
    fake = Fake(lasts_s=0.03)
    assert start(fake, gpus=1, jobs=3)() == 0
    assert {s.gpu for s in fake.seen} == {None}
    assert most_at_once(fake.of(*TIMED)) == 1
    assert most_at_once(fake.of("package@", "evaluate@")) == 3


def test_a_target_of_two_gpus_has_them_to_itself(start: Start) -> None:
    fake = Fake()
    assert start(fake, target="h200-x2")() == 0
    timed = fake.of(*TIMED)
    assert len(timed) == 3 and {s.gpu for s in timed} == {None} and most_at_once(timed) == 1
    assert {s.gpu for s in fake.of("package@")} == {"0", "1"}


def test_scaling_is_alone_and_overtaken_by_nothing_where_cells_take_one_gpu_each(start: Start) -> None:
    fake = Fake(lasts_s=0.02)
    run = start(fake, target="h200-x2")
    run.everywhere = False
    assert run() == 0
    (scaling,) = fake.of("scaling@")
    first, last = (fake.one(f"benchmark@llama-8b-random.{r}.vllm.h200-x2") for r in ("fp8-dynamic", "bf16"))
    assert scaling.gpu is None and {first.gpu, last.gpu} <= {"0", "1"}
    assert first.end <= scaling.start and scaling.end <= last.start


def test_an_evaluation_of_a_cell_over_all_gpus_sees_all(made: dict[str, Any]) -> None:
    tasks = on_target_order.untimed(made, [f"evaluate@{BASELINE}"], True)
    assert [(task.name.split("@")[0], task.everywhere) for task in tasks] == [("package", False), ("evaluate", True)]


def test_what_was_not_made_for_want_of_time_is_not_measured_when_guesses_shrink(start: Start) -> None:
    fake = Fake()
    run = start(fake, minutes=1)
    cell = "llama-8b-random.bf16.vllm.h200"
    run.users = {f"package@{cell}": [f"benchmark@{cell}"]}
    assert not run._ready(Task(f"package@{cell}", ()))
    run.guess_s["benchmark"] = 1.0
    assert not run._ready(Task(f"benchmark@{cell}", ()))
    assert run.skipped == [f"benchmark@{cell}"]


def test_a_chain_that_fails_fails_what_needs_it_and_no_more(start: Start) -> None:
    broken = "quantize@llama-8b-random.fp8.h200"
    fake = Fake(fails=(broken,))
    run = start(fake)
    assert run() == 1
    package = "package@llama-8b-random.fp8.vllm.h200"
    cells = ("benchmark@llama-8b-random.fp8.vllm.h200", "tune@llama-8b-random.fp8-dynamic.vllm.h200")
    assert set(run.failed) == {package, *cells}
    for stage in cells:
        assert run.failed[stage] == f"not run, because {package} failed: {broken} does not work."
        assert stage not in fake.names()
    assert "benchmark@llama-8b-random.fp8-dynamic.vllm.h200" in run.done


def test_without_the_baselines_answers_nothing_is_compared(start: Start, params: Params) -> None:
    fake = Fake(fails=(f"evaluate@{BASELINE}",))
    run = start(fake)
    assert run() == 1
    assert [s.name for s in fake.of("evaluate@")] == [f"evaluate@{BASELINE}"]
    assert "not run, because evaluate@smollm2-135m.bf16" in run.failed["evaluate@smollm2-135m.fp8.vllm.h200"]
    there = [s for s in on_target_order.order(params, run.plan, "h200") if s.startswith(TIMED)]
    assert sorted(s for s in run.done if s.startswith(TIMED)) == sorted(there)


def test_a_fetch_that_fails_leaves_the_other_models(start: Start) -> None:
    fake = Fake(fails=("fetch@llama-8b-random",))
    run = start(fake)
    assert run() == 1
    assert not [s for s in fake.names() if "llama" in s and not s.startswith("fetch@")]
    assert len(run.done) == 18 and all("smollm2" in stage for stage in run.done)
    why = run.failed["tune@llama-8b-random.fp8-dynamic.vllm.h200"]
    assert why == "not run, because fetch@llama-8b-random failed: fetch@llama-8b-random does not work."


def test_an_error_nobody_thought_of_loses_its_own_stage_only(start: Start, tmp_path: Path) -> None:
    stages = ("evaluate@smollm2-135m.awq.vllm.h200", "benchmark@smollm2-135m.awq.vllm.h200")
    run = start(Fake(raises=stages), out=tmp_path / "home")
    assert run() == 1
    assert run.failed == {stage: f"RuntimeError: {stage} broke" for stage in stages}
    assert len(run.done) + 2 == len(on_target_order.order(run.params, run.plan, "h200"))
    assert "Traceback" in Path(".quantpress/logs/on_target.log").read_text("utf-8")
    with tarfile.open(tmp_path / "home/raw.tar.gz") as tar:
        assert tar.getnames() == [".quantpress/logs/on_target.log"]


def test_results_are_packed_after_every_stage_and_a_failure_there_stops_nothing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[int] = []

    def keep(*_: Any) -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise FileNotFoundError("gone meanwhile")

    monkeypatch.setattr(on_target, "keep", keep)
    fake = Fake(lasts_s=0.0)
    assert start(fake, out=tmp_path)() == 0
    assert len(calls) == len(fake.of("package@", "evaluate@", *TIMED)) + 1
    assert "could not pack the results, will try after the next stage: gone meanwhile" in capsys.readouterr().out


def test_what_there_is_no_time_for_is_listed_and_not_made(start: Start, params: Params) -> None:
    fake = Fake()
    run = start(fake, minutes=200 / 60)  # an evaluation (150 s) fits, no timing does
    assert run() == 1
    assert not fake.of(*TIMED) and len(fake.of("evaluate@")) == 9
    assert not [s for s in fake.names() if "llama" in s]
    left = [s for s in on_target_order.order(params, run.plan, "h200") if not s.startswith("evaluate@")]
    assert sorted(run.skipped) == sorted(left)


def test_what_no_time_would_reach_is_not_made_though_its_guess_alone_would_fit(start: Start, params: Params) -> None:
    fake = Fake()
    run = start(fake, minutes=12, gpus=1)  # 720 s: timings of 300 s, each done in no less than 180 s
    run.guess_s |= {"tune": 300.0}
    assert run() == 1
    wanted = [s for s in on_target_order.order(params, run.plan, "h200") if not s.startswith("evaluate@")]
    assert [s.name for s in fake.of(*TIMED)] == wanted[:4]
    served = {p for s in wanted[:4] for p in on_target_order.packages_of(run.plan, s)}
    assert {s.name.removeprefix("package@") for s in fake.of("package@llama")} == {p for p in served if "llama" in p}
    assert run.skipped == wanted[4:]


def test_what_was_never_measured_comes_before_what_is_to_be_measured_again(start: Start, params: Params) -> None:
    fake = Fake()
    run = start(fake, gpus=1)
    first, second, *_ = on_target_order.order(params, run.plan, "h200")
    on_target_order.result(first).parent.mkdir(parents=True)
    on_target_order.result(first).write_text("{}", "utf-8")
    assert run() == 0
    timed = [seen.name for seen in fake.of(*TIMED)]
    assert timed[0] == second and timed[-1] == first


def test_only_what_is_named_is_measured_and_made(start: Start) -> None:
    fake = Fake()
    run = start(fake, only=["tune@*fp8-dynamic*", "benchmark@*int8-rtn*"])
    assert run() == 0
    tune = "tune@llama-8b-random.fp8-dynamic.vllm.h200"
    assert sorted(run.done) == ["benchmark@llama-8b-random.int8-rtn.vllm.h200", tune]
    assert not [s for s in fake.names() if s.startswith("package@smollm2")]
    with pytest.raises(InputError, match="'tune@nothing'.*--only"):
        start(Fake(), only=["tune@nothing"])


def test_models_that_fill_a_gpu_are_quantized_one_at_a_time(start: Start) -> None:
    fake = Fake()
    run = start(fake, jobs=4, gpus=1)
    for model in ("llama-8b-random", "smollm2-135m"):
        Path(f"artifacts/results/{model}").mkdir(parents=True)
        Path(f"artifacts/results/{model}/model.json").write_text('{"weight_bytes": 100000000000, "files": {}}', "utf-8")
    assert run() == 0
    assert most_at_once(fake.of("package@")) == 1


def test_time_that_runs_out_on_the_way_is_seen_before_each_stage(start: Start, params: Params) -> None:
    fake = Fake(lasts_s=0.02)
    run = start(fake, minutes=1000)
    measured = {kind: 0.02 for kind in on_target.FIRST_GUESS_S}
    run.guess_s |= measured
    run.deadline = time.monotonic() + 0.25
    end = run.deadline
    assert run() == 1
    assert all(s.start < end + 0.1 for s in fake.of("evaluate@", "package@", *TIMED))
    assert run.skipped
    assert not set(run.done) & set(run.skipped) and not run.failed
    assert sorted([*run.done, *run.skipped]) == sorted(on_target_order.order(params, run.plan, "h200"))


def test_the_baselines_answers_are_made_again_where_they_are_not(
    start: Start, params: Params, made: dict[str, Any]
) -> None:
    wanted = on_target_order.order(params, made, "h200")
    start(Fake())  # for its empty folder
    one = "evaluate@smollm2-135m.fp8.vllm.h200"
    assert on_target_order.with_references(made, wanted, [one]) == [f"evaluate@{BASELINE}", one]
    Path(made["on_target"]["evaluate"][one.split("@")[1]]["reference"]).mkdir(parents=True)
    assert on_target_order.with_references(made, wanted, [one]) == [one]


def test_progress_names_the_gpu(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start(Fake(lasts_s=0.0))()
    said = capsys.readouterr().out
    assert " on GPU 0\n" in said and " on GPU 1\n" in said
    start(Fake(lasts_s=0.0), target="h200-x2")()
    assert "scaling@llama-8b-random.bf16.vllm.h200-x2: 0 s on all GPUs" in capsys.readouterr().out


SLEEPER = """
import os, sys, time
from pathlib import Path
from pipeline import on_target, side_by_side
from pipeline.side_by_side import Slots, Task
run = on_target.Run.__new__(on_target.Run)
run.__dict__.update(out=None, stopped=False, writing=on_target.threading.Lock(), keeping=on_target.threading.Lock(),
    jobs_running=set(), failed={}, skipped=[],
    deadline=None, done=[], guess_s={}, gpus=[None], start=time.monotonic(), target="cpu", plan={})
run.params = type("P", (), {"targets": {"cpu": None}})
on_target.host.need_target = lambda *_: None
Path("dvc").mkdir(); Path("dvc/__init__.py").touch(); Path("dvc/__main__.py").write_text(
    "import os, sys, time\\nif 'slow' in sys.argv[-1]:\\n    print(os.getpid(), flush=True)\\n"
    "    open(sys.argv[-1] + '.pid', 'w').write(str(os.getpid()))\\n    time.sleep(60)\\n")
run._all = lambda: side_by_side.run(
    [Task(f"evaluate@{n}", (f"slow{n}",)) for n in "ab"], Slots([None], 2), lambda _: True, run._work)
sys.exit(run())
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_term_end_every_stage_that_runs(sent: signal.Signals, tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), "."])}
    # A shell that starts tests in the background lets them ignore SIGINT, and what they start inherits that.
    job = subprocess.Popen(
        [sys.executable, "-c", SLEEPER], cwd=tmp_path, env=env, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    files = [tmp_path / f"slow{n}.pid" for n in "ab"]
    deadline = time.monotonic() + 30
    while not all(f.exists() and f.read_text() for f in files) and time.monotonic() < deadline and job.poll() is None:
        time.sleep(0.05)
    assert job.poll() is None, job.stderr and job.stderr.read()
    pids = [int(f.read_text()) for f in files]
    job.send_signal(sent)
    _, said = job.communicate(timeout=30)
    assert "KeyboardInterrupt" in said
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_what_still_runs_when_the_time_is_over_is_ended(tmp_path: Path) -> None:
    program = SLEEPER.replace("deadline=None", "deadline=time.monotonic() + 1.5")
    program = program.replace("sys.exit(run())", "on_target.KEEP_EVERY_S = 0.2\nsys.exit(run())")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), "."])}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1, done.stderr
    assert "the time is over: what still runs is ended" in done.stdout
    assert "FAILED   evaluate@a: The run was stopped." in done.stdout
    pids = [int((tmp_path / f"slow{n}.pid").read_text()) for n in "ab"]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_more_gpus_than_the_host_has_are_refused(start: Start) -> None:
    with pytest.raises(InputError, match="--gpus 3 wants more GPUs than this host has: 2"):
        start(Fake(), gpus=3)()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_whatever_is_pending_every_package_it_serves_is_made_first(data: st.DataObject, made: dict[str, Any]) -> None:
    every = [f"{kind}@{name}" for kind in on_target.FIRST_GUESS_S for name in made["on_target"][kind]]
    todo = data.draw(st.lists(st.sampled_from(every), unique=True))
    tasks = {task.name: task for task in on_target_order.untimed(made, todo, False)}
    chains = {name for name in tasks if name.startswith("package@")}
    assert chains == {f"package@{p}" for stage in todo for p in on_target_order.packages_of(made, stage)}
    assert {n for n in tasks if n.startswith("evaluate@")} | {
        task.name for task in on_target_order.timed(todo, False)
    } == set(todo)
    using = on_target_order.users(made, todo)
    assert set(todo) == {stage for found in using.values() for stage in found}
    assert chains <= set(using)

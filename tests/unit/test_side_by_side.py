"""Tasks side by side on GPUs: never two in one place, nothing before its needs, no endless wait."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline import side_by_side
from pipeline.side_by_side import Slots, Task


@st.composite
def graphs(draw: st.DrawFn) -> list[Task]:
    count = draw(st.integers(0, 12))
    tasks = []
    for number in range(count):
        after = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        tasks.append(Task(str(number), (), tuple(map(str, after)), draw(st.booleans())))
    return draw(st.permutations(tasks))


@settings(max_examples=60, deadline=None)
@given(graphs(), st.integers(1, 3), st.integers(1, 3), st.sets(st.integers(0, 11), max_size=3))
def test_no_place_is_given_twice_and_nothing_starts_before_its_needs(
    tasks: list[Task], gpus: int, each: int, broken: set[int]
) -> None:
    lock = threading.Lock()
    now: list[tuple[Task, str | None]] = []
    ended: set[str] = set()

    def work(task: Task, gpu: str | None) -> None:
        with lock:
            now.append((task, gpu))
            assert set(task.after) <= ended
            for name in map(str, range(gpus)):
                assert sum(t.everywhere or g == name for t, g in now) <= each
            assert not (each == 1 and len(now) > 1 and any(t.everywhere for t, _ in now))
            assert (gpu is None) == task.everywhere
        time.sleep(0.0005)
        with lock:
            now.remove((task, gpu))
            ended.add(task.name)
        if int(task.name) in broken:
            raise RuntimeError(f"task {task.name}")

    slots = Slots(map(str, range(gpus)), each)
    try:
        side_by_side.run(tasks, slots, lambda _: True, work)
    except RuntimeError:
        assert broken
    assert ended == {task.name for task in tasks}
    assert slots.used == [0] * gpus


@settings(max_examples=60, deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.integers(1, 3))
def test_in_order_nothing_overtakes(everywhere: list[bool], gpus: int) -> None:
    asked: list[str] = []
    tasks = [Task(str(n), (), (), every) for n, every in enumerate(everywhere)]

    def ready(task: Task) -> bool:
        asked.append(task.name)
        return int(task.name) % 4 != 3

    side_by_side.run(tasks, Slots(map(str, range(gpus)), 1), ready, lambda *_: time.sleep(0.0005), in_order=True)
    assert asked == [task.name for task in tasks]


def test_tasks_that_wait_for_each_other_are_no_endless_wait() -> None:
    tasks = [Task("a", (), ("b",)), Task("b", (), ("a",))]
    for in_order in (False, True):
        with pytest.raises(ValueError, match="wait for each other: a, b"):
            side_by_side.run(tasks, Slots([None], 1), lambda _: True, lambda *_: None, in_order)

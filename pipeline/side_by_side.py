"""Run tasks side by side in threads, each on a GPU of its own or on all of them, as soon as what they need has ended.

One thread decides, so that no two can take the same place and a task that waits holds none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple


class Task(NamedTuple):
    """One thing to run.

    Attributes:
        name: its name, unique among the tasks of a run.
        stages: addresses of the stages that it runs, in order.
        after: names of tasks that must have ended before; a name that is no task of the run counts as ended.
        everywhere: it needs every GPU.
    """

    name: str
    stages: tuple[str, ...]
    after: tuple[str, ...] = ()
    everywhere: bool = False


class Slots:
    """Places on GPUs: at most `each` tasks at a time on every one; `gpus` are their names, None where none is chosen.

    What needs every GPU takes one place on each, and with one place a GPU has them all to itself.
    """

    def __init__(self, gpus: Iterable[str | None], each: int) -> None:
        """Start with every place free."""
        self.gpus = list(gpus)
        self.each = each
        self.used = [0] * len(self.gpus)

    def take(self, task: Task) -> list[int] | None:
        """Take the task's places, one, on the GPU with the fewest taken, or one on each; None without room now."""
        every = list(range(len(self.gpus)))
        places = every if task.everywhere else [min(every, key=self.used.__getitem__)]
        if any(self.used[place] >= self.each for place in places):
            return None
        for place in places:
            self.used[place] += 1
        return places

    def give_back(self, places: list[int]) -> None:
        """Free what `take` returned."""
        for place in places:
            self.used[place] -= 1

    def gpu(self, task: Task, places: list[int]) -> str | None:
        """Return the GPU that the task may see, None when it sees what this process sees."""
        return None if task.everywhere else self.gpus[places[0]]


def run(
    tasks: Iterable[Task],
    slots: Slots,
    ready: Callable[[Task], bool],
    work: Callable[[Task, str | None], None],
    in_order: bool = False,
) -> None:
    """Run every task once; return when all have ended.

    Args:
        tasks: the first that can start is started first.
        slots: where they run.
        ready: asked in this thread just before a task starts; False leaves it out, and it counts as ended.
        work: runs a task on a GPU, in a thread of its own.
        in_order: no task starts before those in front of it have started.

    Raises:
        ValueError: tasks that wait for each other.
        Exception: the first that `work` raised, after all others have ended.
    """
    waiting = {task.name: task for task in tasks}
    running: dict[Future[None], tuple[Task, list[int]]] = {}
    raised: list[BaseException] = []
    pool = ThreadPoolExecutor(max(1, len(slots.gpus) * slots.each))
    try:
        while waiting or running:
            for task in startable(waiting, {t.name for t, _ in running.values()}, in_order):
                places = slots.take(task)
                if places is None and in_order:
                    break
                if places is None:
                    continue
                del waiting[task.name]
                if ready(task):
                    running[pool.submit(work, task, slots.gpu(task, places))] = task, places
                else:
                    slots.give_back(places)
            if running:
                ended, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    slots.give_back(running.pop(future)[1])
                    raised += [error] if (error := future.exception()) else []
            elif waiting and not startable(waiting, set(), in_order):
                raise ValueError(f"These wait for each other: {', '.join(waiting)}.")
    except BaseException:
        # Ctrl-C above all: who called ends what still runs, nobody waits for it here.
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    if raised:
        raise raised[0]


def startable(waiting: dict[str, Task], running: set[str], in_order: bool) -> list[Task]:
    """Return the waiting tasks whose needs have all ended; in order, only those before the first that still waits."""
    found = []
    for task in waiting.values():
        if any(name in waiting or name in running for name in task.after):
            if in_order:
                break
            continue
        found.append(task)
    return found

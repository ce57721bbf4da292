"""Tiers of evaluation: which tasks run, on which items, how often. Pure.

canary: fixed greedy prompts. fidelity: and the held-out tokens. smoke: and tasks on items chosen by a hash of their id,
never the first N (the first N of many sets are one subject). release: and full sets, repeats for sampled reasoning
tasks, and long-context tasks where the KV cache is quantized.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

from pipeline.specs import Params, Recipe, Task

TIERS = ("canary", "fidelity", "smoke", "release")


class Run(NamedTuple):
    """How one task is run: on how many items (None: all of them) and how many times each."""

    task: Task
    items: int | None
    repeats: int


def choose(ids: list[str], count: int | None) -> list[int]:
    """Return the positions, rising, of the `count` items whose id has the smallest SHA-256; all of them for None.

    The choice depends on nothing but the ids: the order of the set and the other items do not matter, a larger `count`
    only adds items, and every model and every run is asked the same ones.
    """
    if count is None or count >= len(ids):
        return list(range(len(ids)))
    ranked = sorted(range(len(ids)), key=lambda i: (hashlib.sha256(ids[i].encode()).hexdigest(), i))
    return sorted(ranked[:count])


def digest(ids: list[str]) -> str:
    """Return a digest of a set of item ids, whatever their order: equal digests are equal items."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()[:16]


def kv_quantized(recipe: Recipe, serve: dict[str, Any]) -> bool:
    """Tell whether the KV cache is stored in fewer bits, by the recipe or by the server's options."""
    plain = ("auto", "bf16", "bfloat16", "float16")
    return recipe.kv_cache not in plain or str(serve.get("kv-cache-dtype", "auto")) not in plain


def runs(params: Params, recipe: Recipe, serve: dict[str, Any]) -> tuple[dict[str, Run], dict[str, str]]:
    """Return the tasks to run, and for every other task of params.yaml why it is not measured."""
    chosen: dict[str, Run] = {}
    not_run: dict[str, str] = {}
    level = TIERS.index(params.evaluation.tier)
    for name, task in params.tasks.items():
        if name not in params.evaluation.tasks:
            reason = "needs data from the hub; " if task.hub else ""
            not_run[name] = f"not measured ({reason}add it to evaluation.tasks in params.yaml to run it)"
        elif level < TIERS.index(task.tier):
            not_run[name] = f"not measured (tier {task.tier}; evaluation.tier is {params.evaluation.tier})"
        elif task.when == "kv-cache-quantized" and not kv_quantized(recipe, serve):
            not_run[name] = "not measured (only where the KV cache is quantized, and here it is not)"
        else:
            release = params.evaluation.tier == "release"
            chosen[name] = Run(task, None if release else task.smoke_items, task.repeats if release else 1)
    return chosen, not_run

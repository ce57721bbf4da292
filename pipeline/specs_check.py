"""Check what types cannot: references between sections of params.yaml, formats, backends, algorithms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.errors import InputError, nearest, unknown
from pipeline.formats import BACKENDS, DATA_FREE, FORMATS, GROUPED, KV_BACKENDS
from pipeline.memory.cells import check_serving
from pipeline.producers_check import check_allowed, check_producers
from pipeline.shapes import shapes
from pipeline.sources import Source
from pipeline.specs import Model, Params, Recipe
from pipeline.support import runtimes
from pipeline.trtllm.settings import check_settings
from pipeline.tuning.check import check_tuning


def cross_check(params: Params, path: Path) -> None:
    """Check what types cannot: references between sections, formats, backends, algorithms."""
    where = str(path)
    for name, recipe in params.recipes.items():
        check_recipe(name, recipe, params, where)
    for name in [*params.benchmark, *params.benchmark_gpu]:
        _need("workload", name, params.workloads, where)
    for name in params.evaluation.tasks:
        _need("task", name, params.tasks, where)
    _need("calibration set", params.evaluation.held_out, params.calib_sets, where)
    _need("recipe", params.baseline, params.recipes, where)
    _check_sources(params, where)
    _check_workloads(params, where)
    check_allowed(params, where)
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
    check_tuning(params, where)


def _check_sources(params: Params, where: str) -> None:
    """Check the kind and pin of every source, and what remote code needs."""
    named: list[tuple[str, list[str], tuple[str, ...]]]
    named = [(f"models.{n}", [m.source], ("pypi", "hf", "dir", "random")) for n, m in params.models.items()]
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
        _check_random(name, model, params, where)
        if model.trust_remote_code and Source.parse(model.source).kind != "hf":
            raise InputError(f"{where}: models.{name}: trust_remote_code needs an hf: source at a pinned commit.")


def _check_random(name: str, model: Model, params: Params, where: str) -> None:
    """Check what random weights need: a known shape, a tokenizer, and no chat template."""
    source = Source.parse(model.source)
    if source.kind != "random":
        if model.tokenizer_of:
            raise InputError(f"{where}: models.{name}: tokenizer_of is for random: sources; this one brings its own.")
        return
    if source.name not in shapes():
        raise unknown("shape", source.name, shapes(), f"pipeline/shapes.yaml (models.{name})")
    if model.tokenizer_of is None or model.instruct:
        raise InputError(f"{where}: models.{name} has random weights: it needs tokenizer_of and instruct: false.")
    _need("model", model.tokenizer_of, params.models, where)
    if params.models[model.tokenizer_of].tokenizer_of:
        raise InputError(f"{where}: models.{name}: {model.tokenizer_of} has no tokenizer of its own.")


def _check_workloads(params: Params, where: str) -> None:
    """Check that there is something to time, that it is known, and that it fits the server's context."""
    if not params.benchmark:
        raise InputError(f"{where}: benchmark names no workload. Known: {', '.join(params.workloads)}.")
    for name, target in params.targets.items():
        for workload in target.workloads or []:
            _need("workload", workload, params.workloads, f"{where} (targets.{name})")
    for name, slo in params.slos.items():
        for workload in slo.workloads:
            _need("workload", workload, params.workloads, f"{where} (slos.{name})")
    known = [f"{runtime}-{place}" for runtime in runtimes() for place in ("cpu", "cuda", *params.targets)]
    for key in params.serving:
        if key not in known:
            raise unknown("runtime and device", key, known, f"{where} (serving)")
    check_settings(params, where)  # before check_serving: an old name is told by its name, not by its value
    check_serving(params, where)


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
        can = "; ".join(f"{f} by {', '.join(a for g, a in made if g == f)}" for f in dict.fromkeys(f for f, _ in made))
        near = nearest(recipe.algorithm, {a for f, a in made if f == recipe.format})
        raise InputError(
            f"{where}: recipes.{name}: {recipe.backend} does not make {recipe.format} by '{recipe.algorithm}'.{near} "
            f"It makes: {can}."
        )
    if recipe.format in GROUPED and recipe.group_size is None:
        raise InputError(f"{where}: recipes.{name} is {recipe.format} and needs a group_size, for instance 64 or 128.")
    if recipe.format not in GROUPED and recipe.group_size is not None:
        raise InputError(f"{where}: recipes.{name} is {recipe.format}, which takes no group_size; leave it out.")
    if recipe.kv_cache != "bf16" and recipe.backend not in KV_BACKENDS:
        able = " and ".join(KV_BACKENDS)
        raise InputError(f"{where}: recipes.{name}: {recipe.backend} calibrates no KV cache; {able} do.")
    check_producers(name, recipe, where)
    if recipe.algorithm not in DATA_FREE and recipe.calib_set is None:
        raise InputError(f"{where}: recipes.{name} ({recipe.algorithm}) needs a calib_set.")
    if recipe.kv_cache != "bf16" and recipe.calib_set is None:
        raise InputError(f"{where}: recipes.{name} (kv_cache: {recipe.kv_cache}) needs a calib_set for its scales.")
    if recipe.calib_set is not None:
        _need("calibration set", recipe.calib_set, params.calib_sets, where)
        has = params.calib_sets[recipe.calib_set].samples
        if recipe.calib_samples and recipe.calib_samples > has:
            raise InputError(f"{where}: recipes.{name} wants {recipe.calib_samples} samples, its set has {has}.")


def _need(kind: str, name: str, table: Any, where: str) -> None:
    if name not in table:
        raise unknown(kind, name, table, where)

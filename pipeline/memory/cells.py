"""The plan's cells: which serving parameters they get, what of the target they fill, the speed that is predicted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from pipeline.memory import user_options
from pipeline.memory.arch import ConfigError, read_arch
from pipeline.memory.fit import TP_SIZES, Fit, fit
from pipeline.memory.kv import kv_cache, kv_facts
from pipeline.memory.overhead import CPU_BLOCK_TOKENS, CPU_CACHE_GIB, GIB, Engine
from pipeline.memory.roofline import Roofline, roofline
from pipeline.memory.serving_params import NoRoom, Proposal, form_of, is_trtllm, kv_dtype_of, propose
from pipeline.specs import Params
from pipeline.speed.workloads import Workload

Configs = Mapping[str, Mapping[str, Any]]


class CellIds(NamedTuple):
    """model x recipe x runtime x target, as in a cell's name."""

    model: str
    recipe: str
    runtime: str
    target: str


class Load(NamedTuple):
    """A predicted bound at one load of one workload."""

    workload: str
    concurrency: int
    bound: Roofline


def own_options(params: Params, runtime: str, target: str) -> dict[str, Any]:
    """Return the user's options of a runtime on a target: those of the kind of device, and on top those of the target.

    `serving: {vllm-cuda: {...}, vllm-l40s: {...}}` in params.yaml.
    """
    found = dict(params.serving.get(f"{runtime}-{params.targets[target].device}", {}))
    return found | params.serving.get(f"{runtime}-{target}", {})


def check_serving(params: Params, where: str) -> None:
    """Check the user's serving options as far as no model is needed.

    Raises:
        InputError: a number that cannot be, or a length that is shorter than a workload that is timed there.
    """
    for key, options in params.serving.items():
        own = user_options.flat(options)
        place = key.split("-", 2 if key.startswith("trtllm-") else 1)[-1]
        targets = [n for n, t in params.targets.items() if place in (n, t.device)]
        loads = {name: load for target in targets for name, load in workloads(params, target).items()}
        user_options.check_values(own, f"{where} (serving.{key})")
        user_options.check_lengths(own, loads, f"{where} (serving.{key})")


def workloads(params: Params, target: str) -> dict[str, Workload]:
    """Return the workloads that a server is sized for: those that are timed on its target."""
    return {name: params.workloads[name] for name in params.workloads_of(params.targets[target])}


def within(params: Params, target: str, config: Mapping[str, Any]) -> dict[str, Workload]:
    """Return the workloads of a target that the model's own context holds; a server refuses the others' requests."""
    limit = read_arch(config).max_positions
    return {name: load for name, load in workloads(params, target).items() if not limit or load.longest <= limit}


def serving(params: Params, ids: CellIds, config: Mapping[str, Any]) -> list[Proposal]:
    """Return the serving parameters of a cell, each with its reason; see `propose`.

    Raises:
        InputError: a value of the user's cannot work.
        NoRoom: the model does not fit the target.
    """
    return propose(
        config, params.recipes[ids.recipe], params.targets[ids.target], within(params, ids.target, config), ids.runtime,
        own_options(params, ids.runtime, ids.target), where=f"params.yaml ({ids.runtime} on {ids.target})",
    )  # fmt: skip


def cell_fit(params: Params, ids: CellIds, config: Mapping[str, Any], chosen: list[Proposal]) -> Fit:
    """Return what the target holds with the serving parameters that were `chosen`."""
    values = {p.name: p.value for p in chosen}
    trt = is_trtllm(ids.runtime)
    sequences, tokens = ("max_batch_size", "max_num_tokens") if trt else ("max_num_seqs", "max_num_batched_tokens")
    share, block = ("free_gpu_memory_fraction", "tokens_per_block") if trt else ("gpu_memory_utilization", "block_size")
    usual = Engine()
    engine = Engine(
        "trtllm" if trt else "vllm",
        values.get(share, usual.fraction), values.get(sequences, usual.max_num_seqs),
        values.get(tokens, usual.max_num_batched_tokens), values.get(block, usual.block_tokens),
        str(values.get("kv_cache_dtype", "auto")),
        user_options.flat(own_options(params, ids.runtime, ids.target)).get("kv_cache_memory_bytes"),
    )  # fmt: skip
    arch = read_arch(config)
    form, size = form_of(params.recipes[ids.recipe], arch), int(values.get("tensor_parallel_size", 1))
    return fit(arch, form, params.targets[ids.target], size, engine, within(params, ids.target, config))


def cache_tokens(params: Params, ids: CellIds, config: Mapping[str, Any], chosen: list[Proposal]) -> int | None:
    """Return the capacity in tokens that a vLLM server of this cell should log at its start, or None if not predicted.

    From the cache that a CPU server is given, or from what is left of a GPU's memory.
    """
    values = {p.name: p.value for p in chosen}
    length = values.get("max_model_len") or values.get("max_seq_len") or read_arch(config).max_positions
    if length is None or read_arch(config).not_modelled:
        return None
    kv_dtype = str(values.get("kv_cache_dtype", kv_dtype_of(params.recipes[ids.recipe])))
    if params.targets[ids.target].device == "cpu":
        cache = kv_cache(read_arch(config), kv_dtype)
        return cache.tokens_in(CPU_CACHE_GIB * GIB, length, values.get("block_size", CPU_BLOCK_TOKENS))
    found = cell_fit(params, ids, config, chosen)
    if found.budget_bytes is None:
        return None
    chunk = values.get("max_num_batched_tokens", 0)
    return found.kv.tokens_in(found.budget_bytes, length, values.get("block_size", 16), chunk)


def bounds(params: Params, ids: CellIds, config: Mapping[str, Any], verdict: str, size: int = 1) -> list[Load]:
    """Return the predicted bound of every closed load that is timed on the target."""
    arch, recipe = read_arch(config), params.recipes[ids.recipe]
    form = form_of(recipe, arch)
    return [
        Load(
            name, point.concurrency,
            roofline(
                arch, form, params.targets[ids.target], round(load.mean_prompt), round(load.mean_output),
                point.concurrency, verdict=verdict, tensor_parallel=size, kv_dtype=kv_dtype_of(recipe),
            ),
        )
        for name, load in within(params, ids.target, config).items()
        for point in load.points
        if point.concurrency  # an open loop has no fixed batch
    ]  # fmt: skip


def sizes(params: Params, ids: CellIds, config: Mapping[str, Any], verdict: str) -> dict[str, Any]:
    """Return all that is predicted of one cell as plain data, every number under a key that says so.

    Keys: cell, problem (why there is no serving), serving [{name, value, reason}], fits_at, fit, kv_cache,
    kv_cache_tokens, predicted [{workload, concurrency, tpot_ms, output_tok_s, ...}].
    """
    record: dict[str, Any] = {"cell": ".".join(ids), "problem": None}
    try:
        chosen = serving(params, ids, config)
    except NoRoom as error:
        record["problem"] = str(error)
        chosen = []
    record["serving"] = [p._asdict() for p in chosen]
    record["fits_at"] = fits_at(params, ids, config)
    size = int(next((p.value for p in chosen if p.name == "tensor_parallel_size"), 1))
    held = cell_fit(params, ids, config, chosen)
    record["fit"] = fit_facts(held)
    record["kv_cache"] = kv_facts(held.kv)
    record["kv_cache_tokens"] = cache_tokens(params, ids, config, chosen)
    record["predicted"] = [
        {"workload": load.workload, "concurrency": load.concurrency, **asdict(load.bound)}
        for load in bounds(params, ids, config, verdict, size)
    ]
    return record


def fits_at(params: Params, ids: CellIds, config: Mapping[str, Any]) -> list[int]:
    """Return the degrees of tensor parallelism, of 1, 2, 4 and 8, at which the target holds the model and its loads."""
    arch, recipe = read_arch(config), params.recipes[ids.recipe]
    engine = Engine("trtllm" if is_trtllm(ids.runtime) else "vllm", kv_dtype=kv_dtype_of(recipe))
    target, loads = params.targets[ids.target], within(params, ids.target, config)
    return [n for n in TP_SIZES if fit(arch, form_of(recipe, arch), target, n, engine, loads).fits]


def fit_facts(found: Fit) -> dict[str, Any]:
    """Return a fit as plain data; bytes are per GPU."""
    return {
        "tensor_parallel": found.tensor_parallel, "fits": found.fits, "reason": found.reason,
        "weight_bytes": found.weights.bytes, "weight_bytes_kind": found.weights.kind,
        "activation_bytes": found.activation_bytes, "engine_bytes": found.engine_bytes,
        "usable_bytes": found.usable_bytes, "kv_cache_budget_bytes": found.budget_bytes,
        "max_context_tokens": found.max_context, "sequences": dict(found.sequences),
    }  # fmt: skip


def compact(params: Params, configs: Configs, cells: list[dict[str, Any]]) -> str:
    """Return the proposed parameters of all GPU cells for a terminal: cells with equal values on one line.

    Raises:
        InputError: a value of the user's cannot work for a cell.
    """
    groups: dict[str, list[CellIds]] = {}
    for cell in cells:
        ids = CellIds(*(cell[key] for key in CellIds._fields))
        if params.targets[ids.target].device == "cpu" or cell["verdict"] not in ("native", "fallback"):
            continue
        if ids.model not in configs:
            text = "not proposed: the model is not fetched yet"
        else:
            try:
                text = _line(serving(params, ids, configs[ids.model]))
            except NoRoom as error:
                text = f"does not fit: {error}"
            except ConfigError as error:
                text = f"not proposed: {error}"
        groups.setdefault(text, []).append(ids)
    lines = []
    for text, members in groups.items():
        names = ", ".join(f"{recipe} on {' '.join(targets)}" for recipe, targets in _by_recipe(members))
        lines += [f"  {text}", f"    {len(members)} cells: {names}"]
    if not lines:
        return ""
    return "\n".join(["serving parameters of GPU cells (`python -m pipeline serving --cell CELL` says why):", *lines])


def _line(chosen: list[Proposal]) -> str:
    return ", ".join(f"{p.name} {p.value}" for p in chosen)


def _by_recipe(members: list[CellIds]) -> list[tuple[str, list[str]]]:
    """Return (recipes, targets): recipes that share their targets stand together."""
    targets: dict[str, list[str]] = {}
    for ids in members:
        targets.setdefault(ids.recipe, []).append(ids.target)
    together: dict[tuple[str, ...], list[str]] = {}
    for recipe, where in targets.items():
        together.setdefault(tuple(where), []).append(recipe)
    return [(" ".join(recipes), list(where)) for where, recipes in together.items()]

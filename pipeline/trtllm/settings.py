"""What params.yaml says of TensorRT-LLM: versions, the environment's prefix, build flags; the values of one cell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.errors import InputError
from pipeline.memory.cells import CellIds, own_options, serving
from pipeline.memory.user_options import flat
from pipeline.specs import Params, TrtllmRuntime
from pipeline.support.table import tables
from pipeline.trtllm.migration import refuse_old
from pipeline.trtllm.ranks import Split
from pipeline.trtllm.tables import parameters, tool
from pipeline.trtllm.version import need_bundle, need_engine_builder

RUNTIMES = ("trtllm-engine", "trtllm-bundle")


class Chosen(NamedTuple):
    """The parameters of one cell: `values` by their names here, `reasons`, the user's other YAML keys, the split."""

    values: dict[str, Any]
    reasons: dict[str, str]
    own_yaml: dict[str, Any]
    split: Split
    expert_parallel: int | None


def settings(params: Params, runtime: str) -> TrtllmRuntime:
    """Return the user's settings of a runtime, with the version that the support matrix plans for if none is given."""
    own = {str(name): given for name, given in params.trtllm.items()}.get(runtime) or TrtllmRuntime()
    version = own.version or tables()[runtime].planned_version["cuda"]
    return own.model_copy(update={"version": version})


def version_of(params: Params, runtime: str) -> str:
    """Return the version that a runtime is planned for."""
    return str(settings(params, runtime).version)


def check_settings(params: Params, where: str) -> None:
    """Check versions, build flags and names of old releases wherever a user may write them.

    Raises:
        InputError: a version of the other runtime, an unknown flag, or an old name with what to write today.
    """
    from pipeline.trtllm.command import arguments

    for runtime in RUNTIMES:
        version, place = version_of(params, runtime), f"{where} (trtllm.{runtime})"
        (need_engine_builder if runtime == "trtllm-engine" else need_bundle)(version, f"{place}.version")
        own = settings(params, runtime)
        refuse_old(own.build, f"{place}.build")
        if own.build and runtime == "trtllm-bundle":
            raise InputError(
                f"{place}.build: a bundle is not built; put serving options under serving.trtllm-bundle-cuda."
            )
        if own.build:
            arguments("build", version, own.build, f"{place}.build")
            _need_not_serving(own.build, version, f"{place}.build")
        fixed = sorted(set(own.build) & {"checkpoint_dir", "output_dir", "dry_run"})
        if fixed:
            raise InputError(f"{place}.build: {fixed[0]} is set by this project; leave it out.")
    for key, options in params.serving.items():
        if key.startswith("trtllm"):
            refuse_old(options, f"{where} (serving.{key})")
    for name, recipe in params.recipes.items():
        if recipe.backend == "modelopt" and recipe.options:
            refuse_old(recipe.options, f"{where} (recipes.{name}.options)")


def _need_not_serving(build: Mapping[str, Any], version: str, where: str) -> None:
    """Refuse a flag that the server needs too: given for the build alone, the two would disagree.

    Raises:
        InputError: with the place where it belongs.
    """
    table = tool("build", version)
    spelled = {p.spellings["build"]: name for name, p in parameters(version).items() if "build" in p.spellings}
    for key in build:
        flag = table.flag(str(key).replace("-", "_"), where).name
        if flag in spelled:
            raise InputError(
                f"{where}: {key} is a serving parameter; write it as serving.trtllm-engine-cuda.{spelled[flag]}."
            )


def chosen(params: Params, ids: CellIds, config: Mapping[str, Any]) -> Chosen:
    """Return the parameters of a cell: proposed from the model and the target, then the user's own.

    Raises:
        InputError: a user's value cannot work (old name, too short, does not divide, no room for one sequence).
        NoRoom: the model does not fit the target.
    """
    version = version_of(params, ids.runtime)
    own = own_options(params, ids.runtime, ids.target)
    refuse_old(own, f"params.yaml (serving of {ids.runtime} on {ids.target})")
    proposed = serving(params, ids, config)
    known = parameters(version)
    values = {p.name: p.value for p in proposed if p.name in known}
    reasons = {p.name: p.reason for p in proposed}
    named = {name: value for name, value in flat(own).items() if name in known}
    values |= named
    reasons |= {name: "yours, from params.yaml" for name in named if name not in reasons}
    rest = _other_keys(
        own, {spelling for p in known.values() for place, spelling in p.spellings.items() if place == "yaml"}
    )
    split = Split(int(values.get("tensor_parallel_size", 1)), int(values.get("pipeline_parallel_size", 1)))
    need_gpus(split, params.targets[ids.target].count, ids.target)
    return Chosen(values, reasons, rest, split, values.get("moe_expert_parallel_size"))


def need_gpus(split: Split, count: int, target: str) -> None:
    """Refuse more ranks than the target has GPUs.

    Raises:
        InputError: with both numbers.
    """
    if split.world_size > count:
        raise InputError(
            f"tensor parallel {split.tp} x pipeline parallel {split.pp} needs {split.world_size} GPUs and "
            f"target {target} has "
            f"count: {count} in params.yaml."
        )


def _other_keys(own: Mapping[str, Any], known: set[str], prefix: str = "") -> dict[str, Any]:
    """Return the user's keys that are no parameters here: further keys of the YAML, as they stand."""
    out: dict[str, Any] = {}
    names = set(flat_names(known))
    for key, value in own.items():
        name = str(key).replace("-", "_")
        path = f"{prefix}{name}"
        if isinstance(value, Mapping):
            inside = _other_keys(value, known, f"{path}.")
            if inside:
                out[name] = inside
        elif path not in known and (prefix or name not in names):
            out[name] = value
    return out


def flat_names(paths: set[str]) -> list[str]:
    """Return the names by which a parameter may stand at the top: its path and the last part of it."""
    from pipeline.memory.user_options import SAME

    # At the top `dtype` is the model's own type; the cache's stands under kv_cache_config.
    lasts = ({path.rsplit(".", 1)[-1] for path in paths} | {"kv_cache_dtype"}) - {"dtype"}
    return sorted(paths | lasts | {alias for alias, name in SAME.items() if name in lasts and alias != "dtype"})

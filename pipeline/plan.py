"""Expand params.yaml into pipeline/plan.yaml: every stage of dvc.yaml loops over one mapping of it.

The plan is a pure function of params.yaml, support.yaml and the committed facts of fetched models
(artifacts/results/<model>/model.json), so it can be committed and checked for freshness.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

import yaml

from pipeline import jsonio
from pipeline.errors import InputError, unknown
from pipeline.formats import BLOCKS
from pipeline.plan_on_target import on_target
from pipeline.producers import Producer, first_producer, needs_calibration, producer_for, served
from pipeline.shapes import config_of
from pipeline.sources import Source
from pipeline.specs import MatrixRow, Params, Recipe
from pipeline.support import runtimes
from pipeline.trtllm.planning import TENSORRT_LLM, engine_problem

PLAN = Path("pipeline/plan.yaml")
HEADER = "# Generated from params.yaml by `python -m pipeline plan`. Do not edit; `plan --check` fails when stale.\n"
NOT_BY_DVC = (
    "TensorRT-LLM is brought by the user, so DVC does not measure {name}: leave measure out of its row in params.yaml "
    "and run the steps of docs/trtllm.md on its GPU."
)
# Where a runtime's server for a device lives.
SERVER_ENVS = {("vllm", "cpu"): "vllm_cpu", ("vllm", "cuda"): "vllm_cuda"}


def make_plan(params: Params, configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the plan; `configs` maps a model id to its config.json where it is known.

    Raises:
        InputError: a runtime that does not exist (nearest name given).
    """
    plan = _expand(params, configs)
    return plan | {"on_target": on_target(params, plan, lambda part: _expand(part, configs))}


def _expand(params: Params, configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the stages of the rows that a plain `dvc repro` measures, and every row's cells."""
    plan: dict[str, Any] = {key: {} for key in ("fetch", "calibrate", "quantize", "lint", "package", "measure")}
    plan["checkpoints"], plan["cells"], plan["refusals"] = {}, [], []
    refused: dict[str, dict[str, Any]] = {}
    for row in params.matrix:
        for name in row.runtimes:
            if name not in runtimes():
                raise unknown("runtime", name, runtimes(), "params.yaml (matrix)")
        for model in row.models:
            if row.measure != "on-target":
                plan["fetch"][model] = {"model": model, "origin": _origin(params, model)}
                _calibration(plan, params, params.evaluation.held_out, model)
            for recipe in row.recipes:
                reason = why_not_made(model, params.recipes[recipe], configs.get(model))
                if reason:
                    why = {"reason": reason, "source": f"config.json of {model}", "measure": False}
                    asked = refused.setdefault(f"{model}.{recipe}", why)
                    asked["measure"] |= bool(row.measure)
                    continue
                if row.measure is True:
                    _checkpoint(plan, params, model, recipe, first_producer(params.recipes[recipe]))
                for runtime, target in itertools.product(row.runtimes, row.targets):
                    ids = (model, recipe, runtime, target)
                    if ".".join(ids) not in {c["cell"] for c in plan["cells"]}:
                        _cell(plan, params, ids, row)
                        if problem := engine_problem(params, ids, configs.get(model)):
                            plan["cells"][-1] |= {"verdict": "refused", "reason": problem}
    plan["refusals"] = [{"what": what, **why} for what, why in refused.items()]
    return plan


def why_not_made(model: str, recipe: Recipe, config: dict[str, Any] | None) -> str | None:
    """Return why this recipe cannot be made of a model with this config.json, or None (also if it is not known)."""
    if config is None:
        return None
    if recipe.format in BLOCKS:
        return _why_no_blocks(model, recipe, config)
    if recipe.group_size is None:
        return None
    for key in ("hidden_size", "intermediate_size"):
        size = config.get(key)
        if size and size % recipe.group_size:
            fits = [
                g
                for g in (128, 64, 32, 16)
                if all(config.get(k, g) % g == 0 for k in ("hidden_size", "intermediate_size"))
            ]
            advice = f"group_size {fits[0]} divides" if fits else "no usual group size divides"
            return f"group_size {recipe.group_size} does not divide {key} {size} of {model}; {advice}"
    return None


def _why_no_blocks(model: str, recipe: Recipe, config: dict[str, Any]) -> str | None:
    """Return the first size that the format's fixed blocks do not divide, or None."""
    rows, columns = BLOCKS[recipe.format]
    sizes = {key: config.get(key) or 0 for key in ("hidden_size", "intermediate_size")}
    heads = config.get("num_attention_heads") or 0
    if heads:
        width = config.get("head_dim") or sizes["hidden_size"] // heads
        sizes["key and value width"] = width * (config.get("num_key_value_heads") or heads)
    for key, size in sizes.items():
        # Keys and values are rows of a weight, never columns of one.
        block = rows if key == "key and value width" else max(rows, columns)
        if size % block:
            whole = "; runtimes load whole blocks" if rows > 1 else ""
            return f"{recipe.format} has blocks of {rows}x{columns}, which do not divide {key} {size} of {model}{whole}"
    return None


def _origin(params: Params, model: str) -> str:
    """Return the local file or folder that a model is made from; random weights take another model's tokenizer."""
    spec = params.models[model]
    return f"artifacts/models/{spec.tokenizer_of}" if spec.tokenizer_of else local_path([spec.source])


def facts_path(model: str) -> str:
    """Return where the committed facts of a fetched model are; also a stage's dependency where it needs no other."""
    return f"artifacts/results/{model}/model.json"


def local_path(sources: list[str]) -> str:
    """Return what DVC must watch of some sources: the local file or folder, the folder that holds several of them.

    Without a local source it is a file that never matters.

    Raises:
        InputError: several local sources whose only common folder is the repository itself or the disk's root.
    """
    found = [Source.parse(text).name for text in sources if text.startswith(("dir:", "file:"))]
    if len(found) < 2:
        return found[0] if found else "stages/source/pyproject.toml"
    kinds = {Path(name).is_absolute() for name in found}
    common = os.path.commonpath(found) if len(kinds) == 1 else ""
    if common in ("", ".", os.sep):
        raise InputError(f"Put {', '.join(found)} in one folder: DVC watches the folder that holds them.")
    return common


def checkpoint_path(model: str, recipe_id: str, recipe: Recipe, producer: Producer | None = None) -> str:
    """Return the folder of a recipe's checkpoint; the baseline is the fetched model itself, never a copy.

    `producer` is the one whose artifact is meant, the recipe's first one if None.
    """
    if recipe.backend == "none" and (producer is None or producer.layout == "hf"):
        return f"artifacts/models/{model}"
    return f"artifacts/checkpoints/{(producer or first_producer(recipe)).id(model, recipe_id, recipe)}"


def _calibration(plan: dict[str, Any], params: Params, name: str, model: str) -> str:
    key = f"{name}.{model}"
    held_out = params.evaluation.held_out
    needs = facts_path(model) if name == held_out else f"calib_data/{held_out}.{model}"
    origin = local_path(params.calib_sets[name].sources)
    plan["calibrate"][key] = {"set": name, "model": model, "needs": needs, "origin": origin}
    return f"calib_data/{key}"


def _checkpoint(plan: dict[str, Any], params: Params, model: str, recipe_id: str, producer: Producer) -> None:
    recipe = params.recipes[recipe_id]
    key = producer.id(model, recipe_id, recipe)
    plan["lint"][key] = {
        "model": model, "recipe": recipe_id, "checkpoint": checkpoint_path(model, recipe_id, recipe, producer),
        # The baseline is its own source; DVC wants distinct dependencies.
        "against": facts_path(model) if recipe.backend == "none" else f"artifacts/models/{model}",
    }  # fmt: skip
    if recipe.backend == "none":
        return
    needs = facts_path(model)
    if needs_calibration(recipe):
        needs = _calibration(plan, params, str(recipe.calib_set), model)
    plan["quantize"][key] = {"model": model, "recipe": recipe_id, "env": producer.backend, "needs": needs}


def _cell(plan: dict[str, Any], params: Params, ids: tuple[str, str, str, str], row: MatrixRow) -> None:
    model, recipe, runtime, target = ids
    measure = row.measure
    name = ".".join(ids)
    spec = params.recipes[recipe]
    producer = producer_for(spec, runtime)
    key = producer.id(model, recipe, spec)
    found = served(spec, producer, runtime, params.targets[target], target, params.allow_unknown)
    serves = found.verdict != "refused"
    place = {"model": model, "recipe": recipe, "runtime": runtime, "target": target}
    made = f"{key}.{target}" if measure == "on-target" else key
    what = {"checkpoint": made, "backend": producer.backend}
    entry = {"cell": name, **place, **what, **found._asdict(), "measured_here": measure is True and serves}
    plan["cells"].append(entry)
    plan["checkpoints"][made] = {"model": model, "recipe": recipe, **producer._asdict()}
    if measure == "on-target":
        plan["checkpoints"][made]["made_on"] = target
    if row.package and serves and runtime in TENSORRT_LLM:
        plan["package"][name] = place | package_inputs(params, model, recipe, runtime, producer)
    if measure is not True:
        return
    if runtime in TENSORRT_LLM:
        raise InputError(NOT_BY_DVC.format(name=name))
    if key != f"{model}.{recipe}":
        _checkpoint(plan, params, model, recipe, producer)
    plan["package"][name] = place | {
        "checkpoint": checkpoint_path(model, recipe, spec, producer),
        "lint": f"artifacts/results/{key}/lint.json",
    }
    if not serves:
        return
    env = SERVER_ENVS.get((runtime, params.targets[target].device))
    if env is None:
        raise InputError(f"No environment serves {runtime} on {target}; set measure: false for it in params.yaml.")
    baseline = ".".join((model, params.baseline, runtime, target))
    is_baseline = name == baseline
    plan["measure"][name] = place | {
        "env": env,
        "baseline": baseline,
        "held_out": f"calib_data/{params.evaluation.held_out}.{model}",
        "reference": facts_path(model) if is_baseline else f"artifacts/raw/{baseline}/eval/reference",
        "beside": facts_path(model) if is_baseline else f"artifacts/packages/{baseline}/deploy/manifest.json",
    }


def package_inputs(params: Params, model: str, recipe: str, runtime: str, producer: Producer) -> dict[str, str]:
    """Return what a package of TensorRT-LLM is made from; an engine is planned from the model, before its export."""
    spec = params.recipes[recipe]
    if runtime == "trtllm-engine":
        spec, recipe, producer = (
            params.recipes[params.baseline],
            params.baseline,
            first_producer(params.recipes[params.baseline]),
        )
    key = producer.id(model, recipe, spec)
    return {"checkpoint": checkpoint_path(model, recipe, spec, producer), "lint": f"artifacts/results/{key}/lint.json"}


def known_configs(root: Path, params: Params) -> dict[str, dict[str, Any]]:
    """Return the config.json of each model whose facts are committed under artifacts/results, or that is a shape."""
    found = {}
    for model in params.models:
        if shape := config_of(params.models[model].source):
            found[model] = shape
            continue
        path = root / "artifacts/results" / model / "model.json"
        if path.exists():
            found[model] = jsonio.read_json(path)["config"]
    return found


def dump(plan: dict[str, Any]) -> str:
    """Return the plan as YAML text, the same text for the same plan."""
    return HEADER + yaml.safe_dump(plan, sort_keys=False, width=120, allow_unicode=True)


def check_fresh(plan: dict[str, Any], path: Path = PLAN) -> None:
    """Compare the committed plan with `plan`.

    Raises:
        InputError: it is missing or stale.
    """
    if not path.exists() or path.read_text(encoding="utf-8") != dump(plan):
        raise InputError(f"{path} is stale: params.yaml says something else. Run `uv run python -m pipeline plan`.")


def table(plan: dict[str, Any]) -> str:
    """Return the table of cells, of artifacts that are not the recipe's first one, and of refusals for a terminal."""
    lines = [f"{'CELL':52} {'VERDICT':9} {'MEASURED BY DVC REPRO':22} REASON"]
    elsewhere = {name for group in ("evaluate", "benchmark") for name in plan["on_target"][group]}
    for cell in plan["cells"]:
        here = "yes" if cell["measured_here"] else "on its target" if cell["cell"] in elsewhere else "no"
        lines.append(f"{cell['cell']:52} {cell['verdict']:9} {here:22} {cell['reason']}")
    lines.append("")
    for name, made in plan["checkpoints"].items():
        if name not in (f"{made['model']}.{made['recipe']}", f"{made['model']}.{made['recipe']}.{made.get('made_on')}"):
            lines.append(f"made apart: {name}: {made['backend']} by {made['algorithm']}, stored as {made['layout']}")
    lines += [f"refused: {item['what']}: {item['reason']}" for item in plan["refusals"]] or ["refused recipes: none"]
    return "\n".join(lines)

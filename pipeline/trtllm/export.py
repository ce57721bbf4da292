"""Around ModelOpt's TensorRT-LLM export: what can be refused before it, what has to be mended after it, the record.

ModelOpt 0.47 (export/model_config_export.py, run): with `inference_tensor_parallel` left at its default 0 every size is
divided by zero ("integer modulo by zero"), so the split is always given. It looks for the rotary base at the top of
config.json, where Transformers 5 does not write it, and loses it: TensorRT-LLM would take 10000. Plain INT4 blocks are
written with pre_quant_scale true and without such tensors. Weight-only is left to trtllm-build, as in NVIDIA's own
script.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import jsonio
from pipeline.errors import InputError, unknown
from pipeline.producers import Producer, needs_calibration, producer_for
from pipeline.specs import Params, Recipe
from pipeline.trtllm.layouts import FORMATS, KINDS
from pipeline.trtllm.proof import rotary
from pipeline.trtllm.ranks import Split, decoder_of, need_split, sizes_of

RUNTIME = "trtllm-engine"
LAYOUT = "modelopt-trtllm"


class Export(NamedTuple):
    """One checkpoint to export: its `id`, the recipe, the source's folder, ModelOpt's decoder type, the split."""

    id: str
    recipe: Recipe
    source: Path
    decoder: str
    split: Split

    @property
    def folder(self) -> Path:
        """Return where the checkpoint is put."""
        return Path("artifacts/checkpoints") / self.id


def export_id(model: str, recipe_id: str, split: Split) -> str:
    """Return the id of a TensorRT-LLM checkpoint; one rank is the usual case and is not named."""
    return f"{model}.{recipe_id}.{LAYOUT}" + ("" if split.world_size == 1 else f".{split.name}")


def engine_producer(recipe: Recipe, recipe_id: str) -> Producer:
    """Return the producer of a recipe's TensorRT-LLM checkpoint.

    Raises:
        InputError: no backend stores this recipe as such a checkpoint.
    """
    producer = producer_for(recipe, RUNTIME)
    if producer.layout != LAYOUT or recipe.format not in FORMATS:
        raise InputError(
            f"recipes.{recipe_id}: no backend stores {recipe.format} by {recipe.algorithm} as a TensorRT-LLM "
            "checkpoint; "
            f"formats that one holds: {', '.join(FORMATS)}. Use the runtime trtllm-bundle."
        )
    return producer


def why_not_exported(recipe: Recipe, recipe_id: str, config: Mapping[str, Any], split: Split) -> str | None:
    """Return why no TensorRT-LLM checkpoint of this recipe and split can be made of a model, or None."""
    try:
        engine_producer(recipe, recipe_id)
        decoder_of(config)
        need_split(sizes_of(config), split, group_of(recipe), f"recipes.{recipe_id}")
    except InputError as error:
        return str(error)
    return None


def group_of(recipe: Recipe) -> int | None:
    """Return the columns that share a scale, None for formats without groups."""
    if not KINDS[FORMATS[recipe.format]].grouped:
        return None
    return 16 if recipe.format == "nvfp4" else recipe.group_size


def plan_export(params: Params, model: str, recipe_id: str, split: Split) -> Export:
    """Check all that can be checked before ModelOpt is imported.

    Raises:
        InputError: unknown ids, no source, or a checkpoint that cannot be made, with the reason.
    """
    if model not in params.models:
        raise unknown("model", model, params.models, "params.yaml")
    if recipe_id not in params.recipes:
        raise unknown("recipe", recipe_id, params.recipes, "params.yaml")
    source, recipe = Path("artifacts/models") / model, params.recipes[recipe_id]
    if not (source / "config.json").is_file():
        raise InputError(f"{source} holds no checkpoint. Run `uv run dvc repro fetch@{model}`.")
    config = jsonio.read_json(source / "config.json")
    engine_producer(recipe, recipe_id)
    decoder = decoder_of(config)
    need_split(sizes_of(config), split, group_of(recipe), f"recipes.{recipe_id}")
    if needs_calibration(recipe):
        folder = Path("calib_data") / f"{recipe.calib_set}.{model}"
        if not (folder / "tokens.json").is_file():
            raise InputError(f"{folder} is missing. Run `uv run dvc repro calibrate@{folder.name}`.")
    return Export(export_id(model, recipe_id, split), recipe, source, decoder, split)


def mend_config(made: Mapping[str, Any], source: Mapping[str, Any], fmt: str, group: int | None, prequant: bool) -> Any:
    """Return config.json as TensorRT-LLM needs it.

    Args:
        made: what ModelOpt wrote.
        source: the Hugging Face config.json.
        fmt: the recipe's format.
        group: the group size of 4-bit weights.
        prequant: whether the layers have a prequant_scaling_factor.
    """
    config = dict(made)
    base, scaling = rotary(source)
    if base is not None:
        config["rotary_base"] = base
    if scaling:
        config["rotary_scaling"] = scaling
    quantization = dict(config.get("quantization") or {})
    kind = KINDS[FORMATS[fmt]]
    if kind.algo in ("W8A16", "W4A16"):
        quantization |= {"quant_algo": kind.algo, "exclude_modules": ["lm_head"]}
    if kind.grouped:
        quantization["group_size"] = group
        if fmt != "nvfp4":
            quantization |= {"has_zero_point": False, "pre_quant_scale": prequant}
    config["quantization"] = quantization
    config["rank"] = 0  # ModelOpt leaves the last rank's number there; every rank reads this file
    return config


def mend_folder(folder: Path, source: Path, fmt: str, group: int | None) -> None:
    """Mend what ModelOpt wrote in `folder`, in place."""
    from pipeline.checkpoint import read_header

    names = read_header(folder / "rank0.safetensors")
    prequant = any(name.endswith("prequant_scaling_factor") for name in names)
    made, original = (jsonio.read_json(path / "config.json") for path in (folder, source))
    jsonio.write_json(folder / "config.json", mend_config(made, original, fmt, group, prequant))
    layers = folder / "quant_cfg.json"
    # Written for an unquantized model too; only MIXED_PRECISION reads it.
    if layers.is_file() and not json.loads(layers.read_text(encoding="utf-8")).get("quantized_layers"):
        layers.unlink()

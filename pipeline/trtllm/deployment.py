"""What is deployed for a cell of TensorRT-LLM: the YAML, the serve command and, for an engine, the build command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.cells import Cell
from pipeline.errors import InputError
from pipeline.memory.cells import CellIds
from pipeline.specs import Params
from pipeline.trtllm.command import arguments, flags_of, raises_on
from pipeline.trtllm.export import export_id, group_of, why_not_exported
from pipeline.trtllm.llm_yaml import document, merge, need_known
from pipeline.trtllm.ranks import Split, sizes_of, why_not_split
from pipeline.trtllm.settings import chosen, settings
from pipeline.trtllm.tables import parameters

OUTPUT = "OUTPUT"  # stands for the folder that a build writes to
# What an engine fixed when it was built: its YAML does not repeat these.
FIXED_BY_ENGINE = (
    "max_batch_size", "max_input_len", "max_seq_len", "max_num_tokens", "max_beam_width", "tensor_parallel_size",
    "pipeline_parallel_size", "moe_expert_parallel_size", "tokens_per_block", "kv_cache_dtype",
)  # fmt: skip
# trtllm-serve reads its limits from flags; the YAML, which is read after them, holds the rest.
SERVE_FLAGS = (
    "max_batch_size", "max_seq_len", "max_num_tokens", "tensor_parallel_size", "pipeline_parallel_size",
    "moe_expert_parallel_size",
)  # fmt: skip


class Deployment(NamedTuple):
    """All that follows from params.yaml for one cell.

    `values` and `reasons`: the serving parameters. `build`: arguments of trtllm-build after its name, None for a
    bundle.
    `serve`: the command without prefix, host and port. `yaml`: the content for --config. `notes`: what to know.
    """

    cell: Cell
    version: str
    prefix: tuple[str, ...]
    container: str
    split: Split
    expert_parallel: int | None
    values: dict[str, Any]
    reasons: dict[str, str]
    checkpoint: Path
    build: list[str] | None
    build_flags: dict[str, Any]
    serve: list[str]
    yaml: dict[str, Any]
    notes: list[str]


def deployment(cell: Cell, params: Params, config: Mapping[str, Any], checkpoint: Path | None = None) -> Deployment:
    """Derive everything from params.yaml and the model's config.json.

    Args:
        cell: of the runtime trtllm-engine or trtllm-bundle.
        params: of params.yaml.
        config: the source model's Hugging Face config.json.
        checkpoint: what a bundle serves; an engine's follows from the split.

    Raises:
        InputError: something cannot work; the message says what and what can.
    """
    target = params.targets[cell.target]
    if target.device == "cpu":
        raise InputError(f"{cell.runtime} needs an NVIDIA GPU; {cell.target} is a CPU.")
    own = settings(params, cell.runtime)
    version = str(own.version)
    made = chosen(params, CellIds(*cell), config)
    folder = (checkpoint or Path("artifacts/models") / cell.model) if cell.runtime == "trtllm-bundle" else None
    container = own.container or f"nvcr.io/nvidia/tensorrt-llm/release:{version}"
    recipe = params.recipes[cell.recipe]
    head = (cell, version, tuple(own.prefix), container, made.split, made.expert_parallel, made.values, made.reasons)
    if folder is not None:
        if problem := why_not_split(sizes_of(config), made.split, recipe.group_size):
            raise InputError(f"{cell.name}: {problem}.")
        content = merge(document(made.values, version), made.own_yaml)
        if params.models[cell.model].trust_remote_code:
            content["trust_remote_code"] = True
        need_known(content, f"serve.yaml of {cell.name}")
        return Deployment(*head, folder, None, {}, bundle_command(cell, version, folder), content, _notes(version))
    if problem := why_not_exported(recipe, cell.recipe, config, made.split):
        raise InputError(f"{cell.name}: {problem}")
    folder = Path("artifacts/checkpoints") / export_id(cell.model, cell.recipe, made.split)
    flags = build_flags(made.values, recipe.format, made.split, version, own.build)
    problems = raises_on(version, flags, int(target.sm or 0))
    if problems:
        raise InputError(f"{cell.name}: {'; '.join(problems)}.")
    build = arguments("build", version, {"checkpoint_dir": folder.as_posix(), "output_dir": OUTPUT, **flags})
    content = merge(
        document({k: v for k, v in made.values.items() if k not in FIXED_BY_ENGINE}, version), made.own_yaml
    )
    need_known(content, f"serve.yaml of {cell.name}")
    notes = [] if group_of(recipe) is None else [f"weights in groups of {group_of(recipe)}"]
    return Deployment(*head, folder, build, flags, engine_command(cell, version, made.values), content, notes)


def build_flags(
    values: Mapping[str, Any], fmt: str, split: Split, version: str, own: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the flags of trtllm-build: sizes, what the format needs, one worker a rank, and the user's own on top."""
    flags = flags_of(values, "build", version)
    flags |= {"kv_cache_type": "paged", "workers": split.world_size}
    if fmt == "fp8-channel-token":
        flags["fp8_rowwise_gemm_plugin"] = "auto"  # what computes FP8 per channel and token in an engine
    if values.get("enable_chunked_prefill"):
        flags["use_paged_context_fmha"] = "enable"  # a chunk attends to what the ones before left in the cache
    return flags | {key.replace("-", "_"): value for key, value in own.items()}


def engine_command(cell: Cell, version: str, values: Mapping[str, Any]) -> list[str]:
    """Return trtllm-serve's command for an engine, without host and port."""
    config = parameters(version)["config_file"].spellings["serve"]
    flags: dict[str, Any] = {
        "tokenizer": f"artifacts/models/{cell.model}",
        "backend": "tensorrt",
        **flags_of({k: values[k] for k in SERVE_FLAGS if k in values}, "serve", version),
        config: (cell.deploy / "serve.yaml").as_posix(),
    }
    return ["trtllm-serve", cell.engine.as_posix(), *arguments("serve", version, flags)]


def bundle_command(cell: Cell, version: str, checkpoint: Path) -> list[str]:
    """Return trtllm-serve's command for a bundle, without host and port: everything else stands in the YAML."""
    flags = {
        "config": (cell.deploy / "serve.yaml").as_posix(),
        "served_model_name": cell.model,
    }
    return ["trtllm-serve", checkpoint.as_posix(), *arguments("serve", version, flags)]


def listening(command: list[str], version: str, host: str, port: int) -> list[str]:
    """Return a serve command with the address that it listens on."""
    return [*command, *arguments("serve", version, {"host": host, "port": port})]


def _notes(version: str) -> list[str]:
    return [f"TensorRT-LLM {version} compiles nothing before it serves: kernels are chosen and tuned at start-up"]

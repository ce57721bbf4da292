"""Rank arithmetic of a TensorRT-LLM checkpoint: which rank holds which rows, columns, heads and layers.

Rank r of tp x pp ranks is tensor rank r % tp of pipeline stage r // tp
(docs/source/legacy/architecture/checkpoint.md@10c1d59).
Column-parallel layers (qkv, fc, gate, lm_head) are cut along their outputs, row-parallel ones (dense, proj) along
their inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.errors import InputError

DENSE_ONLY = ("num_local_experts", "n_routed_experts", "num_experts", "moe_intermediate_size")
# architecture -> ModelOpt's decoder_type; those whose layers are attention.qkv/dense and mlp.fc/gate/proj.
DECODERS = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
}


class Sizes(NamedTuple):
    """The sizes of a dense decoder: heads and widths of the whole model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int


class Split(NamedTuple):
    """A number of ranks: tensor parallel times pipeline parallel."""

    tp: int = 1
    pp: int = 1

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.tp * self.pp

    @property
    def name(self) -> str:
        """Return the split as it stands in folder names."""
        return f"tp{self.tp}pp{self.pp}"


def sizes_of(config: Mapping[str, Any]) -> Sizes:
    """Return the sizes that a Hugging Face config.json gives.

    Raises:
        InputError: a size is missing or is no number.
    """

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        value = default if value is None else value
        if type(value) is not int or value <= 0:
            raise InputError(f"config.json says {key} = {value!r}; a whole number above zero is needed.")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    return Sizes(
        hidden, number("intermediate_size"), number("num_hidden_layers"), heads,
        number("num_key_value_heads", heads), number("head_dim", hidden // heads or None), number("vocab_size"),
    )  # fmt: skip


def decoder_of(config: Mapping[str, Any]) -> str:
    """Return ModelOpt's decoder type for a model.

    Raises:
        InputError: no TensorRT-LLM checkpoint of this architecture can be proved here (experts, or unknown layers).
    """
    named = (config.get("architectures") or ["none"])[0]
    experts = [key for key in DENSE_ONLY if config.get(key)]
    if named not in DECODERS or experts:
        why = f"it has experts ({experts[0]})" if experts and named in DECODERS else f"known: {', '.join(DECODERS)}"
        raise InputError(
            f"A TensorRT-LLM checkpoint of {named} cannot be made here: {why}. Use the runtime trtllm-bundle."
        )
    return DECODERS[named]


def why_not_split(sizes: Sizes, split: Split, group: int | None) -> str | None:
    """Return why the model cannot be cut into `split`, or None; `group` is the group size of 4-bit weights.

    Key and value heads are copied where there are more ranks than heads, if the ranks are a multiple of them.
    """
    tp = split.tp
    if tp < 1 or split.pp < 1:
        return f"tensor parallel {tp} and pipeline parallel {split.pp} must be at least 1"
    for what, size in (("attention heads", sizes.heads), ("intermediate_size", sizes.intermediate)):
        if size % tp:
            return f"tensor parallel {tp} does not divide {size} {what}; possible: {possible(sizes, group)}"
    if sizes.kv_heads % tp and tp % sizes.kv_heads:
        return f"tensor parallel {tp} and {sizes.kv_heads} key and value heads do not divide each other"
    if sizes.layers % split.pp:
        return f"pipeline parallel {split.pp} does not divide {sizes.layers} layers"
    # ModelOpt checks the columns of both kinds of layer (export/postprocess.py: check_weight_shape_valid).
    columns = {"hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate}
    columns["attention width"] = sizes.heads * sizes.head_size
    for what, size in columns.items():
        if group and (size // tp) % group:
            return (
                f"at tensor parallel {tp} a rank gets {size // tp} of {what} {size}, which group size {group} does not "
                f"divide; possible: {possible(sizes, group)}"
            )
    return None


def possible(sizes: Sizes, group: int | None) -> str:
    """Return the tensor parallel sizes of 1, 2, 4 and 8 that divide the model."""
    found = [n for n in (1, 2, 4, 8) if n == 1 or _divides(sizes, n, group)]
    return ", ".join(map(str, found))


def _divides(sizes: Sizes, tp: int, group: int | None) -> bool:
    columns = (sizes.hidden, sizes.intermediate, sizes.heads * sizes.head_size)
    if sizes.heads % tp or sizes.intermediate % tp or (sizes.kv_heads % tp and tp % sizes.kv_heads):
        return False
    return not group or all(size % tp == 0 and (size // tp) % group == 0 for size in columns)


def need_split(sizes: Sizes, split: Split, group: int | None, where: str) -> None:
    """Refuse a split that does not divide the model.

    Raises:
        InputError: with the sizes and what is possible.
    """
    problem = why_not_split(sizes, split, group)
    if problem:
        raise InputError(f"{where}: {problem}.")

"""Every weight of an architecture: its shape, how often it is there, how tensor parallelism cuts it.

How a tensor is cut follows vLLM 0.32 (model_executor/layers/linear.py, vocab_parallel_embedding.py, models/*.py):
column-parallel layers by their outputs, row-parallel ones by their inputs, embeddings and head by the vocabulary,
key-value heads at least one a GPU; norms, routers and the latent down-projections of MLA are copied to every GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.memory.arch import Arch

COLUMN, ROW, KV, VOCAB, COPY = "column", "row", "kv", "vocab", "copy"


@dataclass(frozen=True)
class Weight:
    """`count` tensors of shape (out, width); a vector has width 1. `linear`: a recipe may quantize it.

    `active`: how many of them one token uses (experts); `cut`: how tensor parallelism divides it; `unit`: outputs
    that stay together (the size of a key-value head).
    """

    name: str
    out: int
    width: int
    count: int
    cut: str
    linear: bool = False
    active: int | None = None
    unit: int = 1

    @property
    def parameters(self) -> int:
        """Number of values of all `count` tensors."""
        return self.out * self.width * self.count

    @property
    def used(self) -> int:
        """How many of the tensors one token reads."""
        return self.count if self.active is None else self.active

    def share(self, tensor_parallel: int) -> Weight:
        """Return the part of it that one of `tensor_parallel` GPUs holds; cuts are rounded up."""
        if tensor_parallel == 1 or self.cut == COPY:
            return self
        if self.cut == ROW:
            return replace(self, width=math.ceil(self.width / tensor_parallel))
        if self.cut == KV:
            heads = max(1, math.ceil(self.out / self.unit / tensor_parallel))
            return replace(self, out=heads * self.unit)
        return replace(self, out=math.ceil(self.out / tensor_parallel))


def weights_of(arch: Arch) -> list[Weight]:
    """Return all weights of the language model; the shapes are those of unquantized linear layers (out, in)."""
    found = [Weight("embed_tokens", arch.vocab, arch.hidden, 1, VOCAB)]
    if not arch.tied:
        found.append(Weight("lm_head", arch.vocab, arch.hidden, 1, VOCAB))
    if arch.traits["head_bias"]:
        found.append(Weight("lm_head.bias", arch.vocab, 1, 1, VOCAB))
    if arch.traits["positions"] != "none":
        rows = (arch.max_positions or 0) + int(arch.traits["positions"])
        found.append(Weight("position_embeddings", rows, arch.hidden, 1, COPY))
    wide = 2 if arch.traits["norm_bias"] else 1
    found.append(Weight("norms", arch.hidden, wide, arch.layers * arch.traits["layer_norms"] + 1, COPY))
    found += _latent_attention(arch) if arch.latent else _attention(arch)
    return found + list(_feed_forward(arch))


def _linear(name: str, out: int, width: int, count: int, cut: str, bias: bool, unit: int = 1) -> list[Weight]:
    """Return a linear layer and, if it has one, its bias: cut like its outputs, copied where only inputs are cut."""
    made = [Weight(name, out, width, count, cut, linear=True, unit=unit)]
    if bias:
        made.append(Weight(f"{name}.bias", out, 1, count, COPY if cut == ROW else cut, unit=unit))
    return made


def _attention(arch: Arch) -> list[Weight]:
    traits, n = arch.traits, arch.layers
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    found = _linear("q_proj", q, arch.hidden, n, COLUMN, bool(traits["qkv_bias"]))
    for name in ("k_proj", "v_proj"):
        found += _linear(name, kv, arch.hidden, n, KV, bool(traits["qkv_bias"]), arch.head_dim)
    found += _linear("o_proj", arch.hidden, q, n, ROW, bool(traits["o_bias"]))
    if traits["qk_norm"] == "head":
        found.append(Weight("qk_norm", 2 * arch.head_dim, 1, n, COPY))
    elif traits["qk_norm"] == "full":
        found.append(Weight("qk_norm", q + kv, 1, n, COPY))
    if traits["sinks"]:
        found.append(Weight("sinks", arch.heads, 1, n, COLUMN))
    return found


def _latent_attention(arch: Arch) -> list[Weight]:
    mla, n = arch.latent, arch.layers
    assert mla is not None
    q_out = arch.heads * (mla.nope_dim + mla.rope_dim)
    if mla.q_rank:
        found = _linear("q_a_proj", mla.q_rank, arch.hidden, n, COPY, False)
        found += _linear("q_b_proj", q_out, mla.q_rank, n, COLUMN, False)
        found.append(Weight("q_a_norm", mla.q_rank, 1, n, COPY))
    else:
        found = _linear("q_proj", q_out, arch.hidden, n, COLUMN, False)
    found += _linear("kv_a_proj", mla.kv_rank + mla.rope_dim, arch.hidden, n, COPY, False)
    found.append(Weight("kv_a_norm", mla.kv_rank, 1, n, COPY))
    found += _linear("kv_b_proj", arch.heads * (mla.nope_dim + mla.v_dim), mla.kv_rank, n, COLUMN, False)
    return found + _linear("o_proj", arch.hidden, arch.heads * mla.v_dim, n, ROW, False)


def _feed_forward(arch: Arch) -> Iterator[Weight]:
    moe = arch.moe
    dense = arch.layers - (moe.layers if moe else 0)
    if dense:
        yield from _mlp(arch, "", arch.inter, dense, dense)
    if moe is None:
        return
    yield Weight("router", moe.experts, arch.hidden, moe.layers, COPY)
    if arch.traits["router_bias"]:
        yield Weight("router.bias", moe.experts, 1, moe.layers, COPY)
    yield from _mlp(arch, "experts.", moe.width, moe.layers * moe.experts, moe.layers * moe.top_k)
    if moe.shared_width:
        yield from _mlp(arch, "shared_experts.", moe.shared_width, moe.layers, moe.layers)
    if moe.shared_gate:
        yield Weight("shared_expert_gate", 1, arch.hidden, moe.layers, COPY)


def _mlp(arch: Arch, prefix: str, width: int, count: int, active: int) -> Iterator[Weight]:
    bias = bool(arch.traits["mlp_bias"])
    names = ("gate_proj", "up_proj") if arch.traits["gated_mlp"] else ("up_proj",)
    for name in names:
        for made in _linear(prefix + name, width, arch.hidden, count, COLUMN, bias):
            yield replace(made, active=active)
    for made in _linear(f"{prefix}down_proj", arch.hidden, width, count, ROW, bias):
        yield replace(made, active=active)


def parameters(arch: Arch) -> int:
    """Return the number of parameters of the language model, tied embeddings once."""
    return sum(weight.parameters for weight in weights_of(arch))

"""Bytes of the weights on each GPU: exact from a folder's safetensors headers, else predicted from the architecture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint import Checkpoint, TensorInfo, is_tied
from pipeline.memory.arch import LATENT, Arch
from pipeline.memory.stored import Stored, of_checkpoint, stored
from pipeline.memory.tensors import COLUMN, COPY, KV, ROW, VOCAB, weights_of


@dataclass(frozen=True)
class WeightBytes:
    """Bytes of the weights on one of `tensor_parallel` GPUs. `bytes` is None where `reason` says why.

    `kind`: "exact" (read from headers) or "predicted". `linear_bytes`, of which `active_bytes` a single token reads:
    the layers that a decoding step multiplies, the head among them and the embedding table not.
    """

    bytes: int | None
    kind: str
    fmt: str
    reason: str | None = None
    read_bytes: int | None = None
    active_bytes: int | None = None


def predicted(arch: Arch, form: Stored | None = None, tensor_parallel: int = 1) -> WeightBytes:
    """Return the weights of an artifact that is not made yet.

    Linear layers of the decoder are stored as `form` says; embeddings, head, norms, routers and biases stay in the
    model's own type, as every backend of this project leaves them. Without `form` it is the config's own format.
    """
    if not arch.weights_modelled:
        why = f"the shapes of {'; '.join(arch.not_modelled)} are not modelled; give the folder with its safetensors"
        return WeightBytes(None, "predicted", form.fmt if form else "?", why)
    own = form is None
    if form is None:
        form = of_checkpoint(arch.quantization) if arch.quantization else stored("bf16")
        if form is None:
            why = "quantization_config is of a kind that is not in stored.yaml; give the folder with its safetensors"
            return WeightBytes(None, "predicted", "?", why)
    total = read = active = 0
    kept = _left_alone(arch.quantization) if own else ()
    for weight in weights_of(arch):
        part = weight.share(tensor_parallel)
        packed = part.linear and form.weight_bits < 16 and not part.name.endswith(kept)
        one = form.layer_bytes(part.out, part.width) if packed else part.out * part.width * arch.dtype_bytes
        total += one * part.count
        if part.name != "embed_tokens" or arch.tied:
            read += one * part.count
            active += one * part.used
    total += form.kv_scale_bytes * 2 * sum(1 for kind, _ in arch.cache if kind != LATENT)
    return WeightBytes(total, "predicted", form.fmt, None, read, active)


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")


def _left_alone(quantization: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return the linear layers that a published `quantization_config` leaves in 16 bits, by the ends of their names."""
    found: list[str] = []
    for key in ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers"):
        entries = (quantization or {}).get(key)
        for entry in entries if isinstance(entries, list) else []:
            last = str(entry).rstrip("$*").rsplit(".", 1)[-1]
            found += ATTENTION if last == "self_attn" else [last] if last.endswith("_proj") else []
    return tuple(found)


# How a checkpoint's tensor is cut, by its module's name; the first that matches. Everything else is copied.
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(^|\.)(embed_tokens|wte|word_embeddings|embed_in|lm_head|embed_out|output)$"), VOCAB),
    (re.compile(r"(^|\.)(k_proj|v_proj|qkv_proj|query_key_value|c_attn|Wqkv|W_pack)$"), KV),
    (re.compile(r"(^|\.)(o_proj|down_proj|dense_4h_to_h|w2|fc2|fc_out|out_proj|c_proj|attention\.dense)$"), ROW),
    (
        re.compile(r"(^|\.)(q_proj|q_b_proj|kv_b_proj|gate_proj|up_proj|gate_up_proj|w1|w3|fc1|c_fc|dense_h_to_4h)$"),
        COLUMN,
    ),
    (re.compile(r"(^|\.)self_attn\.dense$"), ROW),
)
_PART = re.compile(r"\.(weight|bias|weight_\w+|input_\w+|qweight|qzeros|scales|g_idx|[kv]_scale|pre_quant_scale)$")
_TRANSPOSED = (".qweight", ".qzeros", ".scales")  # GPTQ and AutoAWQ store [in, out]
_NEVER_CUT = (".weight_shape", ".pre_quant_scale")
_STACKED = re.compile(
    r"\.experts\.(gate_up|down)_proj(_blocks|_scales|_bias)?$"
)  # all experts of a layer in one tensor


def _cut_axis(name: str, cut: str, shape: tuple[int, ...]) -> int | None:
    """Return the axis along which a stored tensor is divided, or None where each GPU gets all of it."""
    if stack := _STACKED.search(name):
        bias = stack[2] == "_bias"
        return 1 if stack[1] == "gate_up" else None if bias or len(shape) < 3 else 2
    if cut == COPY or not shape or name.endswith(_NEVER_CUT) or max(shape) == 1:
        return None
    if name.endswith(".g_idx"):
        return 0 if cut == ROW else None
    if name.endswith(".bias") or len(shape) == 1:
        return 0 if cut != ROW else None
    outputs = len(shape) - 1 if name.endswith(_TRANSPOSED) else len(shape) - 2
    axis = outputs if cut != ROW else 2 * len(shape) - 3 - outputs
    return None if shape[axis] == 1 else axis


def tensor_share(tensor: TensorInfo, tensor_parallel: int, kv_heads: int | None) -> int:
    """Return the bytes of a checkpoint's tensor that one of `tensor_parallel` GPUs holds, rounded up."""
    module = _PART.sub("", tensor.name)
    cut = next((kind for pattern, kind in _RULES if pattern.search(module)), COPY)
    axis = _cut_axis(tensor.name, cut, tensor.shape)
    if axis is None or tensor_parallel == 1:
        return tensor.nbytes
    if cut == KV and kv_heads and module.endswith(("k_proj", "v_proj")):
        return math.ceil(tensor.nbytes / kv_heads * math.ceil(kv_heads / tensor_parallel))
    size = tensor.shape[axis]
    return tensor.nbytes // size * math.ceil(size / tensor_parallel)


def exact(folder: Path, arch: Arch, tensor_parallel: int = 1, fmt: str = "as stored") -> WeightBytes:
    """Return the weights of a checkpoint folder, from its headers; no tensor data is read.

    Raises:
        InputError: the folder's files are damaged or disagree.
    """
    checkpoint = Checkpoint.open(folder)
    tensors = list(checkpoint.tensors.values())
    tied = is_tied(checkpoint.config, checkpoint.tensors)
    total = _sum(tensors, tensor_parallel, arch)
    embedding = [] if tied else [t for t in tensors if re.search(r"(^|\.)(embed_tokens|wte|embed_in)\.", t.name)]
    read = total - _sum(embedding, tensor_parallel, arch)
    idle = [t for t in tensors if ".experts." in t.name]
    experts = _sum(idle, tensor_parallel, arch)
    share = arch.moe.top_k / arch.moe.experts if arch.moe else 1.0
    return WeightBytes(total, "exact", fmt, None, read, read - round(experts * (1 - share)))


def _sum(tensors: Iterable[TensorInfo], tensor_parallel: int, arch: Arch) -> int:
    return sum(tensor_share(tensor, tensor_parallel, arch.kv_heads) for tensor in tensors)

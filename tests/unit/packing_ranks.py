"""Small TensorRT-LLM checkpoints for the tests, packed rank by rank from the format's description.

Written without pipeline's layouts and rank arithmetic, so that the two can disagree.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from packers import CONFIG, load, save
from packing_bits import Tensors, bf16, block_max, pairs, spread, to_e2m1, to_f8, value

ALGO = {
    "bf16": None, "int8-w8a16": "W8A16", "fp8-tensor": "FP8", "fp8-channel-token": "FP8_PER_CHANNEL_PER_TOKEN",
    "int8-w8a8": "W8A8_SQ_PER_CHANNEL", "int4-w4a16": "W4A16_AWQ", "int4-w4a8": "W4A8_AWQ", "nvfp4": "NVFP4",
}  # fmt: skip
HEADS, KV_HEADS, HEAD = 4, 2, 32
GROUP = 32


def _f32(values: Any) -> tuple[str, NDArray[Any]]:
    return "F32", np.asarray(values, np.float32)


def _from_f8(codes: NDArray[np.uint8]) -> NDArray[Any]:
    e, m = (codes >> 3) & 15, codes & 7
    size = np.where(e == 0, m / 512, (1 + m / 8) * 2.0 ** (e.astype(float) - 7))
    return np.where(codes & 128, -size, size)


def linear(fmt: str, w: NDArray[Any], prequant: NDArray[Any] | None) -> Tensors:
    """Return the tensors of a layer W[out, in] of a whole matrix; `prequant` [in] scales the inputs."""
    if fmt in ("bf16", "int8-w8a16"):
        return {"weight": bf16(w)}
    w = w.astype(np.float64)
    parts: Tensors = {}
    if prequant is not None:
        parts["prequant_scaling_factor"] = bf16(prequant)
        w = w / value(parts["prequant_scaling_factor"])
    if fmt in ("fp8-tensor", "int8-w8a8", "int4-w4a8", "nvfp4"):
        parts["activation_scaling_factor"] = _f32([0.01])
    if fmt == "fp8-tensor":
        scale = np.abs(w).max() / 448
        return parts | {"weight": ("F8_E4M3", to_f8(w / scale)), "weights_scaling_factor": _f32([scale])}
    if fmt == "fp8-channel-token":
        scale = np.abs(w).max(axis=1) / 448
        return parts | {"weight": ("F8_E4M3", to_f8(w / scale[:, None])), "per_channel_scale": _f32(scale)}
    if fmt == "int8-w8a8":
        scale = np.abs(w).max(axis=1) / 127
        return parts | {
            "weight": ("I8", np.round(w / scale[:, None]).astype(np.int8)),
            "weights_scaling_factor": _f32(scale),
        }
    if fmt == "nvfp4":
        second = np.abs(w).max() / (6 * 448)
        scale = to_f8(block_max(w, 1, 16) / 6 / second)
        codes = to_e2m1(w / spread(_from_f8(scale) * second, w.shape, 1, 16))
        return parts | {"weight": ("U8", pairs(codes)), "weights_scaling_factor": ("F8_E4M3", scale),
                        "weights_scaling_factor_2": _f32([second])}  # fmt: skip
    scale = block_max(w, 1, GROUP) / 7
    codes = np.clip(np.round(w / spread(scale, w.shape, 1, GROUP)), -8, 7).astype(np.int8).view(np.uint8) & 15
    parts |= {"weight": ("I8", (codes[0::2] | codes[1::2] << 4).view(np.int8)), "weights_scaling_factor": _f32(scale)}
    return parts | ({"weights_scaling_factor_2": _f32([1.0])} if fmt == "int4-w4a8" else {})


def _cut(parts: Tensors, by_rows: bool, tp: int, rank: int) -> Tensors:
    """Return one rank's share: rows of everything that has rows, or columns of everything that has columns."""
    out: Tensors = {}
    for name, (dtype, raw) in parts.items():
        if raw.size == 1 or (by_rows and name == "prequant_scaling_factor"):
            out[name] = dtype, raw
        elif raw.ndim == 1:
            goes_with_rows = name != "prequant_scaling_factor"
            out[name] = dtype, np.array_split(raw, tp)[rank] if goes_with_rows == by_rows else raw
        else:
            out[name] = dtype, np.array_split(raw, tp, axis=0 if by_rows else 1)[rank]
    return out


def make_ranks(folder: Path, source: Path, fmt: str, tp: int = 1, pp: int = 1, kv: str = "bf16") -> Path:
    """Write a TensorRT-LLM checkpoint of `source` (see packers.make_source) for tp x pp ranks."""
    tensors = {name: value(t) for name, t in load(source / "model.safetensors").items()}
    rng = np.random.default_rng(3)
    folder.mkdir(parents=True)
    factors = {width: rng.uniform(0.5, 2, width) if fmt in ("int8-w8a8", "int4-w4a16", "int4-w4a8") else None
               for width in (128, 256)}  # fmt: skip
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    for rank in range(tp * pp):
        mine, stage, out = rank % tp, rank // tp, {}
        for local in range(2 // pp):
            there, here = f"model.layers.{stage * (2 // pp) + local}", f"transformer.layers.{local}"
            q, k, v = (tensors[f"{there}.self_attn.{x}_proj.weight"] for x in "qkv")
            parts = tp if tp <= KV_HEADS else KV_HEADS
            kv_of = [np.array_split(m, parts)[mine // (tp // parts)] for m in (k, v)]
            layers = {
                "attention.qkv": (np.concatenate([np.array_split(q, tp)[mine], *kv_of]), None),
                "attention.dense": (tensors[f"{there}.self_attn.o_proj.weight"], False),
                "mlp.fc": (tensors[f"{there}.mlp.gate_proj.weight"], True),
                "mlp.gate": (tensors[f"{there}.mlp.up_proj.weight"], True),
                "mlp.proj": (tensors[f"{there}.mlp.down_proj.weight"], False),
            }
            for name, (matrix, by_rows) in layers.items():
                parts = linear(fmt, matrix, factors[matrix.shape[1]])
                cut = parts if by_rows is None else _cut(parts, by_rows, tp, mine)
                out |= {f"{here}.{name}.{suffix}": tensor for suffix, tensor in cut.items()}
            out[f"{here}.input_layernorm.weight"] = bf16(tensors[f"{there}.input_layernorm.weight"])
            out[f"{here}.post_layernorm.weight"] = bf16(tensors[f"{there}.post_attention_layernorm.weight"])
            if kv == "fp8":
                for scale in ("kv_cache", "k_cache", "v_cache"):
                    out[f"{here}.attention.{scale}_scaling_factor"] = _f32([1.0])
        if stage == 0:
            out["transformer.vocab_embedding.weight"] = bf16(
                np.array_split(tensors["model.embed_tokens.weight"], tp)[mine]
            )
        if stage == pp - 1:
            out["lm_head.weight"] = bf16(np.array_split(head, tp)[mine])
            out["transformer.ln_f.weight"] = bf16(tensors["model.norm.weight"])
        save(folder / f"rank{rank}.safetensors", out)
    quantization: dict[str, Any] = {"quant_algo": ALGO[fmt], "kv_cache_quant_algo": "FP8" if kv == "fp8" else None}
    if fmt.startswith("int4"):
        quantization |= {"group_size": GROUP, "has_zero_point": False, "pre_quant_scale": True}
    if fmt == "nvfp4":
        quantization["group_size"] = 16
    config = {
        "architecture": "LlamaForCausalLM", "dtype": "bfloat16", "hidden_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": CONFIG["vocab_size"], "head_size": 32,
        "intermediate_size": 256, "rotary_base": 10000.0, "quantization": quantization,
        "mapping": {"world_size": tp * pp, "tp_size": tp, "pp_size": pp},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder

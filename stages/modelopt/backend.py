"""ModelOpt backend (nvidia-modelopt 0.47, Apache-2.0): unified Hugging Face checkpoints for vLLM and TensorRT-LLM."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM

# (format, algorithm) -> preset of mtq; the presets keep lm_head and the router in bf16.
PRESETS = {
    ("fp8-tensor", "max"): "FP8_DEFAULT_CFG",
    ("fp8-channel-token", "rtn"): "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    ("fp8-block", "rtn"): "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG",
    ("int8-w8a8", "smoothquant"): "INT8_SMOOTHQUANT_CFG",
    ("int8-w8a16", "rtn"): "INT8_WEIGHT_ONLY_CFG",
    ("int4-w4a16", "rtn"): "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    ("int4-w4a16", "awq"): "INT4_AWQ_CFG",
    ("int4-w4a8", "awq"): "W4A8_AWQ_BETA_CFG",
    ("nvfp4", "max"): "NVFP4_DEFAULT_CFG",
    ("mxfp4", "rtn"): "MXFP4_DEFAULT_CFG",
    ("mxfp8", "rtn"): "MXFP8_DEFAULT_CFG",
}
KV_PRESETS = {"fp8": "FP8_KV_CFG"}

BATCH = 32


def batches(rows: list[list[int]]) -> list[list[list[int]]]:
    """Return rows of equal length in groups of up to BATCH: fake quantization of the weights is paid per forward."""
    by_length: dict[int, list[list[int]]] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    return [group[i : i + BATCH] for group in by_length.values() for i in range(0, len(group), BATCH)]


def config_of(recipe: dict[str, Any]) -> dict[str, Any]:
    """Return ModelOpt's configuration of a recipe: its preset, the recipe's group size, scales of the KV cache."""
    config: dict[str, Any] = copy.deepcopy(getattr(mtq, PRESETS[recipe["format"], recipe["algorithm"]]))
    if recipe.get("group_size"):
        set_group_size(config["quant_cfg"], recipe["group_size"])
    if recipe.get("kv_cache", "bf16") in KV_PRESETS:
        config["quant_cfg"] += copy.deepcopy(getattr(mtq, KV_PRESETS[recipe["kv_cache"]])["quant_cfg"])
    return config


def set_group_size(entries: list[dict[str, Any]], group_size: int) -> None:
    """Give every blocked weight quantizer of `entries` blocks of `group_size` along the inputs."""
    for entry in entries:
        found = entry.get("cfg")
        for part in found if isinstance(found, list) else [found]:
            if isinstance(part, dict) and part.get("block_sizes"):
                part["block_sizes"][-1] = group_size


def quantize(source: Path, out: Path, recipe: dict[str, Any], calib_ids: list[list[int]], seed: int) -> None:
    """Quantize the checkpoint `source` into `out`; `calib_ids` is `[samples][tokens]`, empty for data-free ones."""
    torch.manual_seed(seed)
    remote = bool(recipe.get("trust_remote_code"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", trust_remote_code=remote)
    model.eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)

    def forward(m: Any) -> None:
        with torch.no_grad():
            for batch in batches(calib_ids):
                m(torch.tensor(batch, device=device))

    mtq.quantize(model, config_of(recipe), forward if calib_ids else None)
    export_hf_checkpoint(model, export_dir=str(out))

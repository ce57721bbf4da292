"""ModelOpt backend (nvidia-modelopt 0.47, Apache-2.0): unified Hugging Face checkpoints for vLLM and TensorRT-LLM."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from transformers import AutoModelForCausalLM

# format -> preset of mtq; the presets keep lm_head and the router in bf16.
PRESETS = {"fp8-tensor": "FP8_DEFAULT_CFG"}


BATCH = 32


def batches(rows: list[list[int]]) -> list[list[list[int]]]:
    """Return rows of equal length in groups of up to BATCH: fake quantization of the weights is paid per forward."""
    by_length: dict[int, list[list[int]]] = {}
    for row in rows:
        by_length.setdefault(len(row), []).append(row)
    return [group[i : i + BATCH] for group in by_length.values() for i in range(0, len(group), BATCH)]


def quantize(source: Path, out: Path, recipe: dict[str, Any], calib_ids: list[list[int]], seed: int) -> None:
    """Quantize the checkpoint `source` into `out`; `calib_ids` is `[samples][tokens]`."""
    torch.manual_seed(seed)
    remote = bool(recipe.get("trust_remote_code"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", trust_remote_code=remote)
    model.eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    config = copy.deepcopy(getattr(mtq, PRESETS[recipe["format"]]))

    def forward(m: Any) -> None:
        with torch.no_grad():
            for batch in batches(calib_ids):
                m(torch.tensor(batch, device=device))

    mtq.quantize(model, config, forward)
    export_hf_checkpoint(model, export_dir=str(out))

"""GPTQModel backend (ModelCloud/GPTQModel 7.6, Apache-2.0): GPTQ checkpoints (arXiv:2210.17323)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

# Without a worker count the CPU path of GPTQModel 7.6 stops before the first layer; it is read at import.
os.environ.setdefault("GPTQMODEL_CPU_WORKERS", str(os.cpu_count() or 1))

import torch
from gptqmodel import GPTQModel, QuantizeConfig


def quantize(source: Path, out: Path, recipe: dict[str, Any], calib_ids: list[list[int]], seed: int) -> None:
    """Quantize the checkpoint `source` into `out`; `calib_ids` is `[samples][tokens]`."""
    torch.manual_seed(seed)
    config = QuantizeConfig(
        bits=4,
        group_size=recipe["group_size"],
        sym=True,
        desc_act=False,
        # Its scratch path would be written into config.json: other bytes at every run, and one machine's path.
        offload_to_disk=False,
        **(recipe.get("options") or {}),
    )
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    remote = bool(recipe.get("trust_remote_code"))
    model = GPTQModel.load(str(source), config, device=device, trust_remote_code=remote)
    model.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in calib_ids], batch_size=32)
    model.save(str(out))
    # Its per-layer log holds durations: other bytes at every run of the same input. The losses are in the stage's log.
    (out / "quant_log.csv").unlink(missing_ok=True)

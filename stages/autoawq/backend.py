"""AutoAWQ backend, legacy (casper-hansen/AutoAWQ 0.2.9, MIT, archived): AWQ (arXiv:2306.00978) in the GEMM layout."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from awq import AutoAWQForCausalLM
from awq.quantize.quantizer import AwqQuantizer


def quantize(source: Path, out: Path, recipe: dict[str, Any], calib_ids: list[list[int]], seed: int) -> None:
    """Quantize the checkpoint `source` into `out`; `calib_ids` is `[samples][tokens]`, all of one length."""
    torch.manual_seed(seed)
    AwqQuantizer._compute_best_scale = keeping_weights(AwqQuantizer._compute_best_scale)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        model = AutoAWQForCausalLM.from_pretrained(
            str(readable(source, Path(folder))),
            device_map=device,
            torch_dtype=torch.bfloat16,
            trust_remote_code=bool(recipe.get("trust_remote_code")),
            safetensors=True,
        )
        model.quantize(
            None,  # the calibration set is token ids already
            quant_config={
                "w_bit": 4,
                "q_group_size": recipe["group_size"],
                "zero_point": True,
                "version": "GEMM",
            },
            calib_data=calib_ids,
            max_calib_samples=len(calib_ids),
            max_calib_seq_len=len(calib_ids[0]),
            **(recipe.get("options") or {}),
        )
        model.save_quantized(str(out))


def keeping_weights(search: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return AutoAWQ's grid search with its backup of the weights made a real copy.

    It backs up by `.cpu()`, which on a CPU is the live tensor: the first scales then stay in the weights and
    every layer comes out scaled twice (seen on SmolLM2-135M: 50 to 79% relative RMS error a layer, found by lint).
    """

    def best_scale(self: AwqQuantizer, x: Any, w_mean: Any, x_mean: Any, module: Any, *rest: Any) -> torch.Tensor:
        live = module.state_dict
        module.state_dict = lambda: {name: tensor.clone() for name, tensor in live().items()}
        try:
            return search(self, x, w_mean, x_mean, module, *rest)
        finally:
            del module.state_dict

    return best_scale


def readable(source: Path, folder: Path) -> Path:
    """Return a copy of `source` that Transformers 4 reads rightly: it wants `rope_theta` and `torch_dtype` at the top.

    Weights are linked, not copied.
    """
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path.resolve())
        elif path.is_file():
            shutil.copyfile(path, folder / path.name)
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    config["torch_dtype"] = config.get("dtype", "bfloat16")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder

"""llm-compressor backend: compressed-tensors checkpoints (vllm-project/llm-compressor 0.14, Apache-2.0).

Methods: round to nearest, GPTQ (arXiv:2210.17323), AWQ (arXiv:2306.00978), SmoothQuant (arXiv:2211.10438).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.pipelines.cache import IntermediatesCache
from transformers import AutoModelForCausalLM

IGNORE = ["lm_head"]
BATCH_TOKENS = 8192

# A recipe's `format` decides the weight and activation arguments; the algorithm only decides the rounding.
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
_INT8_W = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
_INT8_A = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
_FP8_TOKEN = _FP8 | {"strategy": "token", "dynamic": True}
_FP8_TENSOR = _FP8 | {"strategy": "tensor", "dynamic": False}
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "int4-w4a16": (_INT4, None),
    "int4-w4a8": (_INT4, _FP8_TOKEN),
    "int8-w8a8": (_INT8_W, _INT8_A),
    "int8-w8a16": (_INT8_W, None),
    "fp8-channel-token": (_FP8 | {"strategy": "channel"}, _FP8_TOKEN),
    "fp8-tensor": (_FP8 | {"strategy": "tensor"}, _FP8_TENSOR),
}
# On-disk forms that are not the library's choice: it would give each 4-bit weight of W4A8 a byte, and vLLM's loader
# wants them packed (compressed_tensors_w4a8_fp8.py registers weight_packed).
FORMS = {"int4-w4a8": "pack-quantized"}
# Formats with fixed blocks: the library's own presets (compressed_tensors/quantization/quant_scheme.py).
PRESETS = {"fp8-block": "FP8_BLOCK", "nvfp4": "NVFP4", "mxfp4": "MXFP4", "mxfp8": "MXFP8"}


def scheme(fmt: str, group_size: int | None) -> QuantizationScheme:
    """Return the compressed-tensors scheme of `fmt`; `group_size` only matters for grouped weights."""
    if fmt in PRESETS:
        return preset_name_to_scheme(PRESETS[fmt], ["Linear"])
    weights, activations = SCHEMES[fmt]
    if weights["strategy"] == "group":
        weights = weights | {"group_size": group_size}
    return QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(**weights),
        input_activations=QuantizationArgs(**activations) if activations else None,
        format=FORMS.get(fmt),
    )


def modifiers(recipe: dict[str, Any]) -> list[Any]:
    """Return the llm-compressor modifiers of a recipe.

    `recipe` has the keys `format`, `algorithm`, `group_size`, `kv_cache` and `options`. A quantized KV cache gets
    one calibrated scale per layer for the keys and one for the values.
    """
    common: dict[str, Any] = {"config_groups": {"group_0": scheme(recipe["format"], recipe.get("group_size"))}}
    common["ignore"] = IGNORE
    if recipe.get("kv_cache", "bf16") == "fp8":
        common["kv_cache_scheme"] = QuantizationArgs(**_FP8_TENSOR)
    options = recipe.get("options") or {}
    gptq = options.get("gptq", {})
    rounding: dict[str, list[Any]] = {
        "rtn": [QuantizationModifier(**common)],
        "max": [QuantizationModifier(**common)],
        "gptq": [GPTQModifier(**common, **gptq)],
        "smoothquant-gptq": [
            SmoothQuantModifier(**options.get("smoothquant", {"smoothing_strength": 0.8})),
            GPTQModifier(**common, **gptq),
        ],
        "awq": [AWQModifier(**options.get("awq", {})), QuantizationModifier(**common)],
    }
    return rounding[recipe["algorithm"]]


def quantize(source: Path, out: Path, recipe: dict[str, Any], calib_ids: list[list[int]], seed: int) -> None:
    """Quantize the checkpoint `source` into `out`; `calib_ids` is `[samples][tokens]`, empty for data-free ones."""
    torch.manual_seed(seed)
    if not torch.accelerator.is_available():
        # llm-compressor 0.14 pins memory without asking for a GPU: "Cannot access accelerator device when none
        # is available" (AWQ). Without an accelerator pinning has no meaning, so it is left out.
        IntermediatesCache.pin_memory = lambda self, *a, **k: None  # type: ignore[method-assign]
    remote = bool(recipe.get("trust_remote_code"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", trust_remote_code=remote)
    if not calib_ids and torch.cuda.is_available():
        # Rounding alone is done where the weights are; with calibration llm-compressor brings the layers itself.
        model.to("cuda")
    data: dict[str, Any] = {}
    if calib_ids:
        rows = {"input_ids": calib_ids, "attention_mask": [[1] * len(row) for row in calib_ids]}
        data = {
            "dataset": Dataset.from_dict(rows),
            "num_calibration_samples": len(calib_ids),
            "max_seq_length": max(map(len, calib_ids)),
            "shuffle_calibration_samples": False,
            # Rows of one length go in batches; a padded row would be calibrated on its padding.
            "batch_size": max(1, BATCH_TOKENS // len(calib_ids[0])) if len(set(map(len, calib_ids))) == 1 else 1,
        }
    oneshot(model=model, recipe=modifiers(recipe), **data)
    # Shards, because they are hashed and loaded several at a time.
    model.save_pretrained(out, save_compressed=True, max_shard_size="2GB")

"""ModelOpt's TensorRT-LLM checkpoint: rank{N}.safetensors and config.json, made on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_tensorrt_llm_checkpoint
from transformers import AutoModelForCausalLM

from stages.modelopt.backend import batches, config_of

# Exported as they are: bf16, and weight-only, which trtllm-build quantizes itself.
UNQUANTIZED = ("bf16", "int8-w8a16")


@contextmanager
def input_peaks(model: torch.nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """Collect the largest absolute input of every linear layer while the context is open."""
    peaks: dict[str, torch.Tensor] = {}

    def watch(name: str) -> Any:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            peak = inputs[0].detach().abs().max().float()
            peaks[name] = torch.maximum(peaks.get(name, peak), peak)

        return hook

    linear = [(name, m) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linear]
    try:
        yield peaks
    finally:
        for handle in handles:
            handle.remove()


def quantize(model: torch.nn.Module, recipe: dict[str, Any], calib_ids: list[list[int]]) -> None:
    """Quantize `model` in place as the recipe says; `calib_ids` is `[samples][tokens]`."""
    device = next(model.parameters()).device

    def forward(m: Any) -> None:
        with torch.no_grad():
            for batch in batches(calib_ids):
                m(torch.tensor(batch, device=device))

    config = config_of(recipe)
    if recipe["format"] != "nvfp4" or device.type == "cuda":
        mtq.quantize(model, config, forward if calib_ids else None)
        return
    # Without CUDA the dynamic block quantizer cannot run forward ("amax must be a CUDA tensor"). Its static scale is
    # the
    # peak of what enters a layer, which the unquantized model gives as well.
    with input_peaks(model) as peaks:
        forward(model)
    mtq.quantize(model, config, None)
    for name, module in model.named_modules():
        quantizer = getattr(module, "input_quantizer", None)
        if name in peaks and quantizer is not None and quantizer.is_enabled:
            quantizer.amax = peaks[name]


def export(
    source: Path, out: Path, recipe: dict[str, Any], calib_ids: list[list[int]], split: tuple[int, int], decoder: str
) -> None:
    """Quantize `source` and write its TensorRT-LLM checkpoint of `split` (tensor, pipeline ranks) to `out`."""
    torch.manual_seed(0)
    remote = bool(recipe.get("trust_remote_code"))
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", trust_remote_code=remote).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    if recipe["format"] not in UNQUANTIZED:
        quantize(model, recipe, calib_ids)
    dtype = torch.float16 if model.dtype == torch.float16 else torch.bfloat16
    export_tensorrt_llm_checkpoint(
        model, decoder, dtype, export_dir=out, inference_tensor_parallel=split[0], inference_pipeline_parallel=split[1]
    )

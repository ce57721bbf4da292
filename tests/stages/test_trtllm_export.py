"""ModelOpt's TensorRT-LLM export on a tiny Llama of random weights, on a CPU: proved, mended, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_backends import write_safetensors

from pipeline.checkpoint import read_header
from pipeline.trtllm.checkpoint import RankCheckpoint

pytestmark = pytest.mark.stages
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "dtype": "bfloat16",
    "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"}, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "x-fp8": {"format": "fp8-tensor", "algorithm": "max", "backend": "modelopt", "calib_set": "docs",
              "kv_cache": "fp8"},
    "x-awq": {"format": "int4-w4a16", "algorithm": "awq", "backend": "modelopt", "calib_set": "docs", "group_size": 64},
    "x-int4": {"format": "int4-w4a16", "algorithm": "rtn", "backend": "modelopt", "group_size": 128},
    "x-w4a8": {"format": "int4-w4a8", "algorithm": "awq", "backend": "modelopt", "calib_set": "docs",
               "group_size": 128},
    "x-sq": {"format": "int8-w8a8", "algorithm": "smoothquant", "backend": "modelopt", "calib_set": "docs"},
    "x-w8": {"format": "int8-w8a16", "algorithm": "rtn", "backend": "modelopt"},
    "x-nvfp4": {"format": "nvfp4", "algorithm": "max", "backend": "modelopt", "calib_set": "docs"},
}  # fmt: skip


def _write_model(folder: Path) -> None:
    rng = np.random.default_rng(0)

    def bf16(*shape: int) -> tuple[str, tuple[int, ...], bytes]:
        values = rng.normal(0, 0.02, shape).astype(np.float32) if len(shape) > 1 else np.ones(shape, np.float32)
        return "BF16", shape, (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()

    tensors = {
        "model.embed_tokens.weight": bf16(500, 256),
        "lm_head.weight": bf16(500, 256),
        "model.norm.weight": bf16(256),
    }
    shapes = {"self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256),
              "self_attn.o_proj": (256, 256), "mlp.gate_proj": (512, 256), "mlp.up_proj": (512, 256),
              "mlp.down_proj": (256, 512)}  # fmt: skip
    for layer in range(2):
        for name, shape in shapes.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = bf16(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = bf16(256)
    folder.mkdir(parents=True)
    write_safetensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.fixture(scope="session")
def tiny(workspace) -> str:  # type: ignore[no-untyped-def]
    """A model `tiny` in the workspace, with calibration ids that need no tokenizer."""
    _write_model(workspace.path / "artifacts/models/tiny")
    folder = workspace.path / "calib_data/docs.tiny"
    folder.mkdir(parents=True)
    ids = np.random.default_rng(1).integers(0, 500, (8, 32)).tolist()
    (folder / "tokens.json").write_text(json.dumps({"input_ids": ids}))
    (folder / "card.json").write_text(json.dumps({"warnings": [], "digest": "0"}))
    workspace.edit(lambda p: (
        p["models"].update(tiny={"source": "dir:artifacts/models/tiny", "instruct": False}),
        p["recipes"].update(RECIPES),
    ))  # fmt: skip
    return "tiny"


def _export(workspace: Any, recipe: str, tp: int, pp: int, check: bool = True) -> Any:
    arguments = ["--model", "tiny", "--recipe", recipe, "--tp", str(tp), "--pp", str(pp)]
    return workspace.run("pipeline", "run", "modelopt", "trtllm_checkpoint", *arguments, check=check)


@pytest.mark.parametrize(("recipe", "tp", "pp", "algo", "largest"), [
    ("x-fp8", 2, 2, "FP8", 0.03),
    ("x-awq", 2, 1, "W4A16_AWQ", 0.13),
    ("x-int4", 1, 1, "W4A16_AWQ", 0.13),
    ("x-w4a8", 1, 2, "W4A8_AWQ", 0.13),
    ("x-sq", 2, 1, "W8A8_SQ_PER_CHANNEL", 0.02),
    ("x-w8", 2, 1, "W8A16", 0.0),
    ("x-nvfp4", 2, 1, "NVFP4", 0.1),
    ("bf16", 2, 2, None, 0.0),
])  # fmt: skip
def test_a_checkpoint_is_exported_and_every_weight_is_the_sources(  # type: ignore[no-untyped-def]
    recipe: str, tp: int, pp: int, algo: str | None, largest: float, tiny: str, workspace
) -> None:
    _export(workspace, recipe, tp, pp)
    name = f"{tiny}.{recipe}.modelopt-trtllm" + ("" if tp * pp == 1 else f".tp{tp}pp{pp}")
    made = RankCheckpoint.open(workspace.path / "artifacts/checkpoints" / name)
    results = workspace.path / "artifacts/results" / name
    lint = json.loads((results / "lint.json").read_text())
    record = json.loads((results / "quantize.json").read_text())
    assert lint["passed"]
    assert lint["weight_bytes"] == lint["predicted_weight_bytes"]
    assert lint["dequantized"]["worst_relative_rms"] <= largest
    assert (made.split.tp, made.split.pp, len(made.ranks)) == (tp, pp, tp * pp)
    assert made.quantization["quant_algo"] == algo
    assert made.config["rotary_base"] == 50000.0  # ModelOpt 0.47 loses it with Transformers 5
    assert record["ranks"] == {"tp": tp, "pp": pp}
    assert not (made.folder / "quant_cfg.json").exists()
    if recipe == "x-int4":
        assert made.quantization["pre_quant_scale"] is False
    if recipe == "x-nvfp4":
        names = read_header(made.folder / "rank0.safetensors")
        assert any(n.endswith("activation_scaling_factor") for n in names)
    done = workspace.run("pipeline", "lint", f"artifacts/checkpoints/{name}", "--model", tiny, "--recipe", recipe)
    assert "whole" in done.stdout


@pytest.mark.parametrize(("recipe", "tp", "message"), [
    ("x-fp8", 3, "tensor parallel 3 does not divide 4 attention heads; possible: 1, 2, 4"),
    ("x-awq", 8, "tensor parallel 8 does not divide 4 attention heads"),
    ("x-int4", 4, "a rank gets 64 of hidden_size 256, which group size 128 does not divide; possible: 1, 2"),
    ("fp8-block", 1, "no backend stores fp8-block"),
    ("x-none", 1, "There is no recipe 'x-none'"),
])  # fmt: skip
def test_what_cannot_be_exported_is_refused_before_the_library(  # type: ignore[no-untyped-def]
    recipe: str, tp: int, message: str, tiny: str, workspace
) -> None:
    done = _export(workspace, recipe, tp, 1, check=False)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.strip()]) == 1, done.stderr

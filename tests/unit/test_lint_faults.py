"""Plant one fault after another in a clean checkpoint: the linter finds each and names the tensor or file."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from faults import drop, first, json_key, renew, swap, tensor
from packers import bf16, editing, editing_json, load, shard, value
from packers import lint_made as run
from packers import make_pair as make

from pipeline import layouts
from pipeline.checkpoint import INDEX

Q, UP, DOWN = (f"model.layers.0.{n}" for n in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"))
DOWN1 = "model.layers.1.mlp.down_proj"
NORM = "model.layers.1.input_layernorm.weight"


def unpack(folder: Path) -> None:
    """Put one layer back as bfloat16."""
    source = load(folder.parent / "source" / "model.safetensors")
    with editing(folder) as tensors:
        for name in [n for n in tensors if n.startswith(f"{Q}.")]:
            del tensors[name]
        tensors[f"{Q}.weight"] = source[f"{Q}.weight"]


def unpack_and_ignore(folder: Path) -> None:
    """Put one layer back as bfloat16 with other values and ignore it."""
    unpack(folder)
    first(f"{Q}.weight", 0x4000)(folder)
    json_key("config.json", "quantization_config.ignore", ["lm_head", f"re:.*{Q}$"])(folder)


def append(file: str, text: str = " ") -> Callable[[Path], None]:
    """Return a fault that appends to a file, or makes it."""

    def plant(folder: Path) -> None:
        with (folder / file).open("a") as stream:
            stream.write(text)

    return plant


def truncate(folder: Path) -> None:
    """Cut the last 4 bytes of the weights."""
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 4)


def flip_header_byte(folder: Path) -> None:
    """Flip one bit in the JSON header."""
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[8] ^= 4
    (folder / "model.safetensors").write_bytes(data)


def lose_a_shard(folder: Path) -> None:
    """Shard, then delete the second shard."""
    shard(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def index_names_a_ghost(folder: Path) -> None:
    """Shard, then let the index name a tensor that no shard has."""
    shard(folder)
    with editing_json(folder / INDEX) as index:
        index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"


def index_with_wrong_size(folder: Path) -> None:
    """Shard, then change the index's total size."""
    shard(folder)
    json_key(INDEX, "metadata.total_size", 7)(folder)


def untie(folder: Path) -> None:
    """Store a head that is not the embedding."""
    with editing(folder) as tensors:
        tensors["lm_head.weight"] = bf16(value(tensors["model.embed_tokens.weight"]) * 2)


def slightly_wrong_norm(folder: Path) -> None:
    """Change a smoothed norm by up to 9 percent, too little for the RMS bound of the layers that read it."""
    name = "model.layers.0.input_layernorm.weight"
    with editing(folder) as tensors:
        tensors[name] = bf16(value(tensors[name]) * np.random.default_rng(0).uniform(0.91, 1.09, 128))


GROUPS = "quantization_config.config_groups.group_0"
INF16, NAN16 = 0x7F80, 0x7FC0
# (kind, fault, rule, subject): the finding must be there, as an error unless the rule ends in "?".
FAULTS: dict[str, tuple[str, Callable[[Path], None], str, str]] = {
    "truncated": ("ct-int4", truncate, "unreadable", f"{DOWN1}.weight_shape"),
    "header bit": ("gptq", flip_header_byte, "unreadable", "model.safetensors"),
    "config gone": ("ct-int4", lambda d: (d / "config.json").unlink(), "unreadable", "config.json"),
    "shard gone": ("ct-int8", lose_a_shard, "unreadable", "model-00002-of-00002.safetensors"),
    "index ghost": ("ct-int8", index_names_a_ghost, "unreadable", "ghost"),
    "index size": ("ct-int8", index_with_wrong_size, "index-size?", INDEX),
    "nan norm": ("ct-fp8-dynamic", first(NORM, NAN16), "not-finite", NORM),
    "nan smoothed norm": ("ct-int8-smooth", first(NORM, NAN16), "not-finite", NORM),
    "inf embedding": (
        "bf16",
        first("model.embed_tokens.weight", INF16),
        "not-finite",
        "model.embed_tokens.weight",
    ),
    "nan f8 weight": ("modelopt-fp8", first(f"{Q}.weight", 0x7F), "not-finite", f"{Q}.weight"),
    "changed norm": ("gptq", first(NORM, 0x3F80), "tensor-differs", NORM),
    "changed final norm": ("ct-awq", first("model.norm.weight", 0), "tensor-differs", "model.norm.weight"),
    "one bit": ("bf16", first(f"{Q}.weight", 1), "tensor-differs", f"{Q}.weight"),
    "lost norm": ("ct-int8", drop(NORM), "tensor-missing", NORM),
    "lost weight": ("bf16", drop(f"{Q}.weight"), "tensor-missing", f"{Q}.weight"),
    "norm shape": ("ct-int8", renew(NORM, "F32", (64,)), "tensor-shape", NORM),
    "norm dtype": ("ct-int8", renew(NORM, "F32", (128,)), "tensor-dtype?", NORM),
    "norm dtype, values": ("ct-int8", renew(NORM, "F32", (128,)), "tensor-differs", NORM),
    "extra tensor": ("ct-int4", renew("model.extra", "F32", (1,)), "tensor-unexpected", "model.extra"),
    "leftover weight": ("ct-int4", renew(f"{Q}.weight", "F32", (1,)), "tensor-unexpected", f"{Q}.weight"),
    "zero scale": ("ct-int4", first(f"{Q}.weight_scale", 0), "scale-value", f"{Q}.weight_scale"),
    "negative scale": ("gptq", first(f"{UP}.scales", -1), "scale-value", f"{UP}.scales"),
    "inf scale": ("modelopt-fp8", first(f"{Q}.weight_scale", np.inf), "scale-value", f"{Q}.weight_scale"),
    "nan scale": ("ct-int8", first(f"{Q}.weight_scale", NAN16), "scale-value", f"{Q}.weight_scale"),
    "scale shape": ("ct-int8", renew(f"{Q}.weight_scale", "F32", (128,)), "scale-shape", f"{Q}.weight_scale"),
    "scale dtype": ("gptq", renew(f"{Q}.scales", "I32", (2, 128)), "scale-dtype", f"{Q}.scales"),
    "scale gone": ("ct-fp8-dynamic", drop(f"{Q}.weight_scale"), "scale-missing", f"{Q}.weight_scale"),
    "input scale gone": ("ct-fp8", drop(f"{Q}.input_scale"), "activation-scale-missing", f"{Q}.input_scale"),
    "input scale 0": (
        "modelopt-fp8",
        first(f"{Q}.input_scale", 0),
        "activation-scale-value",
        f"{Q}.input_scale",
    ),
    "packed shape": (
        "ct-int4",
        renew(f"{Q}.weight_packed", "I32", (128, 8)),
        "packed-shape",
        f"{Q}.weight_packed",
    ),
    "packed dtype": ("ct-int8", renew(f"{Q}.weight", "I32", (128, 128)), "packed-dtype", f"{Q}.weight"),
    "shape record": ("ct-int4", first(f"{Q}.weight_shape", 9), "shape-record-value", f"{Q}.weight_shape"),
    "zero point": ("gptq", first(f"{Q}.qzeros", 0), "zero-point-value", f"{Q}.qzeros"),
    "zero point gone": (
        "ct-int4-zero-points",
        drop(f"{Q}.weight_zero_point"),
        "zero-point-missing",
        f"{Q}.weight_zero_point",
    ),
    "group index range": ("gptq", first(f"{Q}.g_idx", 2), "group-index-value", f"{Q}.g_idx"),
    "group index counts": (
        "ct-int4-act-order",
        renew(f"{Q}.weight_g_idx", "I32", (128,)),
        "group-index-value",
        f"{Q}.weight_g_idx",
    ),
    "group index order": (
        "gptq-act-order",
        json_key("config.json", "quantization_config.desc_act", False),
        "group-index-value",
        f"{Q}.g_idx",
    ),
    "unpacked": ("ct-int4", unpack, "not-quantized", Q),
    "unpacked 8 bit": ("modelopt-fp8", unpack, "not-quantized", Q),
    "unpacked gptq": ("gptq", unpack, "not-quantized", Q),
    "lost layer": ("ct-int4", drop(f"{Q}.weight_packed"), "layer-missing", Q),
    "ignored, changed": ("ct-int4", unpack_and_ignore, "tensor-differs", f"{Q}.weight"),
    "ignored but packed": (
        "ct-int4",
        json_key("config.json", "quantization_config.ignore", ["lm_head", Q]),
        "ignored-but-packed",
        Q,
    ),
    "ignored by glob": (
        "modelopt-fp8",
        json_key("config.json", "quantization_config.ignore", ["lm_head", "*.0.*q_proj"]),
        "ignored-but-packed",
        Q,
    ),
    "ignored by dynamic": (
        "gptq",
        json_key("config.json", "quantization_config.dynamic", {r"-:.*\.q_proj": {}}),
        "ignored-but-packed",
        Q,
    ),
    "stale ignore": (
        "ct-int4",
        json_key("config.json", "quantization_config.ignore", ["lm_head", "re:.*visual"]),
        "ignore-stale",
        "re:.*visual",
    ),
    "bad pattern": (
        "ct-int4",
        json_key("config.json", "quantization_config.ignore", ["lm_head", "re:("]),
        "ignore-stale",
        "re:(",
    ),
    "head not ignored": (
        "ct-int8",
        json_key("config.json", "quantization_config.ignore", []),
        "not-quantized",
        "lm_head",
    ),
    "group size": (
        "ct-int4",
        json_key("config.json", f"{GROUPS}.weights.group_size", 32),
        "config-quantization",
        "config.json",
    ),
    "bits": (
        "gptq",
        json_key("config.json", "quantization_config.bits", 8),
        "config-quantization",
        "config.json",
    ),
    "strategy": (
        "ct-fp8",
        json_key("config.json", f"{GROUPS}.input_activations.dynamic", True),
        "config-quantization",
        "config.json",
    ),
    "bf16 says int8": (
        "bf16",
        json_key("config.json", "quantization_config", {"quant_method": "x"}),
        "config-quantization",
        "config.json",
    ),
    "no quantization": (
        "ct-int8",
        json_key("config.json", "quantization_config", ...),
        "layout",
        "config.json",
    ),
    "twin differs": (
        "modelopt-fp8",
        json_key("hf_quant_config.json", "quantization.quant_algo", "NVFP4"),
        "config-mirror",
        "hf_quant_config.json",
    ),
    "twin gone": (
        "gptq",
        lambda d: (d / "quantize_config.json").unlink(),
        "config-mirror",
        "quantize_config.json",
    ),
    "host path": (
        "gptq",
        json_key("config.json", "quantization_config.meta", {"p": "/tmp/x"}),
        "config-host-path?",
        "config.json",
    ),
    "dimension": ("ct-int4", json_key("config.json", "hidden_size", 96), "config-key", "hidden_size"),
    "dimension gone": ("ct-int4", json_key("config.json", "vocab_size", ...), "config-key", "vocab_size"),
    "rope": (
        "bf16",
        json_key("config.json", "rope_parameters.rope_theta", 1e6),
        "config-key",
        "rope.rope_theta",
    ),
    "new key": ("ct-int4", json_key("config.json", "novel", 1), "config-key?", "novel"),
    "untied flag": (
        "ct-int4",
        json_key("config.json", "tie_word_embeddings", False),
        "tied",
        "tie_word_embeddings",
    ),
    "untied head": ("ct-int4", untie, "tied", "lm_head.weight"),
    "tied twice": (
        "ct-int4",
        tensor(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]})),
        "tied?",
        "lm_head.weight",
    ),
    "tokenizer byte": ("ct-int4", append("tokenizer.json"), "file-differs", "tokenizer.json"),
    "no template": (
        "ct-int4",
        lambda d: (d / "chat_template.jinja").unlink(),
        "file-missing",
        "chat_template.jinja",
    ),
    "pickle": ("ct-int4", append("training_args.bin"), "pickle", "training_args.bin"),
    "code": ("ct-int4", append("modeling_x.py"), "remote-code", "modeling_x.py"),
    "odd file": ("ct-int4", append("notes.txt"), "file-unexpected?", "notes.txt"),
    "half quantized": ("ct-int4", unpack, "size", "made"),
    "swapped layers": (
        "ct-int8",
        swap("model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"),
        "weight-error",
        UP,
    ),
    "swapped packed": (
        "ct-int4",
        swap(f"{Q}.weight_packed", "model.layers.1.self_attn.q_proj.weight_packed"),
        "weight-error",
        Q,
    ),
    "swapped smoothed": (
        "ct-awq",
        swap(f"{DOWN}.weight_packed", "model.layers.1.mlp.down_proj.weight_packed"),
        "weight-error",
        DOWN,
    ),
    "smoothed norm": ("ct-awq", swap(NORM, "model.layers.0.input_layernorm.weight"), "weight-error", Q),
    "slightly wrong norm": ("ct-int8-smooth", slightly_wrong_norm, "weight-columns", Q),
    "doubled scale": (
        "gptq",
        tensor(lambda t: t[f"{Q}.scales"][1].__imul__(2)),
        "weight-error",
        Q,
    ),
    "one doubled row": (
        "gptq",
        tensor(lambda t: t[f"{Q}.scales"][1][:, 5:6].__imul__(2)),
        "weight-row",
        Q,
    ),
    "doubled row handed on": (
        "ct-awq",
        tensor(lambda t: t[f"{UP}.weight_scale"][1].__setitem__(slice(200), t[f"{UP}.weight_scale"][1][:200] + 256)),
        "weight-error",
        DOWN,
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_found(tmp_path: Path, name: str) -> None:
    kind, plant, rule, subject = FAULTS[name]
    plant(make(tmp_path, kind))
    result = run(tmp_path, kind)
    severity = "warning" if rule.endswith("?") else "error"
    found = {(f["severity"], f["rule"], f["subject"]) for f in result["findings"]}
    assert (severity, rule.rstrip("?"), subject) in found, found
    assert result["passed"] == all(f["severity"] == "warning" for f in result["findings"])
    assert all(f["message"].endswith(".") for f in result["findings"])


def test_every_rule_has_a_planted_fault() -> None:
    """A rule that no test can trigger may have died."""
    folder = Path(layouts.__file__).parent
    text = "".join((folder / f"{name}.py").read_text() for name in ("lint", "lint_config", "lint_tensors"))
    rules = set(re.findall(r'report\.(?:error|warn)\)?\(\s*"([a-z-]+)"', text))
    planted = {fault[2].rstrip("?") for fault in FAULTS.values()}
    tested_elsewhere = {"nothing-quantized", "group-size", "weight-drift"}
    assert len(rules) > 20 and rules - planted - tested_elsewhere == set()

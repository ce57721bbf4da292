"""Small checkpoints for the tests: a Llama of 2 layers and hidden size 128, packed as each backend does.

Written from the formats' descriptions and without pipeline's decoders, so that the two can disagree.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from packing_bits import Tensors, bf16, int4, interleaved, pack, to_f8, value
from packing_blocks import ALGOS, GROUP_SIZES, SCHEMES, compressed, kv_scales, modelopt

from pipeline.formats import GROUPED
from pipeline.lint import lint

__all__ = [
    "CONFIG", "FILES", "KINDS", "Tensors", "bf16", "editing", "editing_json", "lint_made", "load", "make_pair",
    "make_source", "quantize", "save", "shard", "value",
]  # fmt: skip
LAYERS = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (256, 128),
    "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "vocab_size": 64,
    "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "eos_token_id": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "dtype": "bfloat16",
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
}  # fmt: skip
FILES = {
    "tokenizer.json": '{"model": {"type": "BPE"}}',
    "tokenizer_config.json": '{"eos_token": "<e>"}',
    "chat_template.jinja": "{{ messages }}",
    "generation_config.json": '{"eos_token_id": 2}',
}
_RAW = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F8_E4M3": np.uint8, "I8": np.int8,
    "U8": np.uint8, "I32": np.int32, "I64": np.int64,
}  # fmt: skip


def save(path: Path, tensors: Tensors) -> None:
    """Write one safetensors file."""
    header, at, blobs = {}, 0, []
    for name, (dtype, raw) in tensors.items():
        blob = np.ascontiguousarray(raw).tobytes()
        header[name] = {"dtype": dtype, "shape": list(raw.shape), "data_offsets": [at, at + len(blob)]}
        at += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def load(path: Path) -> Tensors:
    """Read one safetensors file that `save` wrote."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    return {
        name: (
            entry["dtype"],
            np.frombuffer(
                data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]],
                _RAW[entry["dtype"]],
            )
            .reshape(entry["shape"])
            .copy(),
        )
        for name, entry in json.loads(data[8:start]).items()
    }


@contextmanager
def editing(folder: Path) -> Iterator[Tensors]:
    """Read the tensors of a folder, let the caller change them, write them back."""
    tensors = load(folder / "model.safetensors")
    yield tensors
    save(folder / "model.safetensors", tensors)


@contextmanager
def editing_json(path: Path) -> Iterator[dict[str, Any]]:
    """Read a JSON file, let the caller change it, write it back."""
    content = json.loads(path.read_text())
    yield content
    path.write_text(json.dumps(content))


def make_source(folder: Path, *, tied: bool = True, bias: bool = False) -> Path:
    """Write the source checkpoint: bfloat16, tokenizer files, a chat template."""
    rng = np.random.default_rng(0)
    tensors: Tensors = {"model.embed_tokens.weight": bf16(rng.normal(0, 0.05, (64, 128)))}
    for i in range(2):
        block = f"model.layers.{i}"
        for name, shape in LAYERS.items():
            tensors[f"{block}.{name}.weight"] = bf16(rng.normal(0, 0.05, shape))
            if bias and name == "self_attn.q_proj":
                tensors[f"{block}.{name}.bias"] = bf16(rng.normal(0, 0.05, shape[:1]))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}.{norm}.weight"] = bf16(rng.uniform(0.5, 2, 128))
    tensors["model.norm.weight"] = bf16(rng.uniform(0.5, 2, 128))
    if not tied:
        tensors["lm_head.weight"] = bf16(rng.normal(0, 0.05, (64, 128)))
    folder.mkdir(parents=True)
    save(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    for name, text in FILES.items():
        (folder / name).write_text(text)
    return folder


@dataclass
class Kind:
    """One way to store a checkpoint.

    `act_order` shuffles which columns share a group; layers whose name ends in one of `pre` have factors of inputs.
    """

    fmt: str
    method: str
    sym: bool = True
    act_order: bool = False
    v2: bool = False
    group: int = 64
    recipe: str = ""
    algorithm: str | None = None
    pre: tuple[str, ...] = ()
    kv: str = "bf16"


KINDS = {
    "ct-int4": Kind("int4-w4a16", "compressed-tensors"),
    "ct-int4-zero-points": Kind("int4-w4a16", "compressed-tensors", sym=False),
    "ct-int4-act-order": Kind("int4-w4a16", "compressed-tensors", act_order=True),
    "ct-int8": Kind("int8-w8a8", "compressed-tensors"),
    "ct-int8-smooth": Kind("int8-w8a8", "compressed-tensors", recipe="SmoothQuantModifier:"),
    "ct-awq": Kind("int4-w4a16", "compressed-tensors", recipe="AWQModifier:"),
    "ct-fp8": Kind("fp8-tensor", "compressed-tensors"),
    "ct-fp8-dynamic": Kind("fp8-channel-token", "compressed-tensors"),
    "modelopt-fp8": Kind("fp8-tensor", "modelopt"),
    "modelopt-fp8-rows": Kind("fp8-channel-token", "modelopt"),
    "ct-fp8-kv": Kind("fp8-tensor", "compressed-tensors", kv="fp8"),
    "modelopt-fp8-kv": Kind("fp8-tensor", "modelopt", kv="fp8"),
    **{f"ct-{fmt}": Kind(fmt, "compressed-tensors") for fmt in SCHEMES},
    **{f"modelopt-{fmt}": Kind(fmt, "modelopt", pre=("",) if fmt == "int8-w8a8" else ()) for fmt in ALGOS},
    "modelopt-awq": Kind("int4-w4a16", "modelopt", algorithm="awq", pre=("o_proj", "down_proj")),
    "modelopt-w4a8-awq": Kind("int4-w4a8", "modelopt", algorithm="awq", pre=("o_proj", "down_proj")),
    "gptq": Kind("int4-w4a16", "gptq"),
    "gptq-v2-zero-points": Kind("int4-w4a16", "gptq", sym=False, v2=True),
    "gptq-act-order": Kind("int4-w4a16", "gptq", act_order=True),
    "autoawq": Kind("int4-w4a16", "awq", sym=False, recipe="AWQModifier:"),
}


def pack_layer(name: str, w: NDArray[Any], kind: Kind) -> Tensors:
    """Return what a layer is stored as."""
    out, width = w.shape
    if kind.method == "modelopt" and kind.fmt in ALGOS:
        return modelopt(name, w, kind.fmt, any(name.endswith(end) for end in kind.pre))
    if kind.fmt in SCHEMES:
        return compressed(name, w, kind.fmt)
    if kind.fmt == "int4-w4a16":
        index = np.arange(width) // kind.group
        if kind.act_order:
            index = np.random.default_rng(1).permutation(index)
        codes, zero, scale = int4(w, kind.group, kind.sym, index)
        g_idx = ("I32", index.astype(np.int32))
        if kind.method == "awq":
            return {
                f"{name}.qweight": ("I32", pack(interleaved(codes.T))),
                f"{name}.qzeros": ("I32", pack(interleaved(zero.T))),
                f"{name}.scales": ("F16", scale.T.astype(np.float16)),
            }
        if kind.method == "gptq":
            stored_zero = zero if kind.v2 else zero - 1
            return {
                f"{name}.qweight": ("I32", np.ascontiguousarray(pack(codes).T)),
                f"{name}.qzeros": ("I32", pack(np.ascontiguousarray(stored_zero.T))),
                f"{name}.scales": ("F16", scale.T.astype(np.float16)),
                f"{name}.g_idx": g_idx,
            }
        parts: Tensors = {
            f"{name}.weight_packed": ("I32", pack(codes)),
            f"{name}.weight_scale": bf16(scale),
            f"{name}.weight_shape": ("I64", np.array([out, width])),
        }
        if not kind.sym:
            zeros = pack(np.ascontiguousarray(zero.T)).T
            parts[f"{name}.weight_zero_point"] = ("I32", np.ascontiguousarray(zeros))
        return parts | ({f"{name}.weight_g_idx": g_idx} if kind.act_order else {})
    per_tensor = kind.fmt == "fp8-tensor"
    top = np.abs(w).max(axis=None if per_tensor else 1, keepdims=True)
    if kind.fmt == "int8-w8a8":
        scale = top / 127
        return {
            f"{name}.weight": ("I8", np.round(w / scale).astype(np.int8)),
            f"{name}.weight_scale": bf16(scale),
        }
    scale = top / 448
    parts = {f"{name}.weight": ("F8_E4M3", to_f8(w / scale))}
    shape: tuple[int, ...] = () if kind.method == "modelopt" else (1,)
    if per_tensor:
        scales = {"weight_scale": scale.reshape(shape), "input_scale": np.full(shape, 0.02)}
        for suffix, number in scales.items():  # float32 in ModelOpt, the model's dtype in compressed-tensors
            narrow = bf16(number) if kind.method != "modelopt" else ("F32", number.astype(np.float32))
            parts[f"{name}.{suffix}"] = narrow
        return parts
    parts[f"{name}.weight_scale"] = ("F32", scale[:, 0].astype(np.float32))
    return parts if kind.method == "modelopt" else parts | {f"{name}.weight_scale": bf16(scale)}


def quantization_config(kind: Kind) -> dict[str, Any]:
    """Return what the backend writes into config.json."""
    if kind.method == "modelopt" and kind.fmt in ALGOS:
        return {"quant_method": "modelopt", "quant_algo": ALGOS[kind.fmt], "ignore": ["lm_head", "model.embed_tokens"]}
    if kind.fmt in SCHEMES:
        form, weights, inputs = SCHEMES[kind.fmt]
        group = {"weights": {"group_size": None, "symmetric": True} | weights, "input_activations": inputs}
        return {
            "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"],
        }  # fmt: skip
    if kind.method == "gptq":
        form = "gptq_v2" if kind.v2 else "gptq"
        return {
            "quant_method": "gptq", "bits": 4, "group_size": kind.group, "sym": kind.sym, "lm_head": False,
            "desc_act": kind.act_order, "checkpoint_format": form, "pack_dtype": "int32",
        }  # fmt: skip
    if kind.method == "awq":
        return {
            "quant_method": "awq", "bits": 4, "group_size": kind.group, "version": "gemm", "zero_point": True,
            "modules_to_not_convert": None,
        }  # fmt: skip
    bits = 4 if kind.fmt == "int4-w4a16" else 8
    number = "float" if kind.fmt.startswith("fp8") else "int"
    if kind.method == "modelopt":
        group = {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}
        algo = {"fp8-tensor": "FP8", "fp8-channel-token": "FP8_PER_CHANNEL_PER_TOKEN"}[kind.fmt]
        ignore = ["lm_head", "model.embed_tokens"]
        return {
            "quant_method": "modelopt", "quant_algo": algo, "ignore": ignore,
            "config_groups": {"group_0": group},
        }  # fmt: skip
    strategy = {4: "group", 8: "tensor" if kind.fmt == "fp8-tensor" else "channel"}[bits]
    form = {"int4-w4a16": "pack-quantized", "int8-w8a8": "int-quantized"}.get(kind.fmt, "float-quantized")
    weights = {
        "num_bits": bits, "type": number, "strategy": strategy, "symmetric": kind.sym,
        "group_size": kind.group if bits == 4 else None, "actorder": "group" if kind.act_order else None,
    }  # fmt: skip
    tensor = kind.fmt == "fp8-tensor"
    inputs = {
        "num_bits": 8,
        "type": number,
        "strategy": "tensor" if tensor else "token",
        "dynamic": not tensor,
    }
    group = {"weights": weights, "input_activations": None if bits == 4 else inputs, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"],
    }  # fmt: skip


def _smooth(tensors: Tensors, weights: dict[str, NDArray[Any]], rows: bool) -> None:
    """Move factors as SmoothQuant (norm -> readers) and, with `rows`, as AWQ does (up_proj -> down_proj)."""
    rng = np.random.default_rng(2)
    readers = {
        "input_layernorm": ("q_proj", "k_proj", "v_proj"),
        "post_attention_layernorm": ("gate_proj", "up_proj"),
    }
    for i in range(2):
        for norm, names in readers.items():
            factor, name = rng.uniform(0.3, 3, 128), f"model.layers.{i}.{norm}.weight"
            tensors[name] = bf16(value(tensors[name]) / factor)
            for layer in weights:
                if layer.startswith(f"model.layers.{i}.") and layer.endswith(names):
                    weights[layer] = weights[layer] * factor
        if rows:
            factor = rng.uniform(0.3, 3, 256)
            weights[f"model.layers.{i}.mlp.up_proj"] /= factor[:, None]
            weights[f"model.layers.{i}.mlp.down_proj"] *= factor


def quantize(source: Path, out: Path, kind: Kind) -> Path:
    """Write `source` into `out` stored as `kind`."""
    shutil.copytree(source, out)
    tensors = load(source / "model.safetensors")
    names = [f"model.layers.{i}.{name}" for i in range(2) for name in LAYERS]
    weights = {name: value(tensors.pop(f"{name}.weight")).astype(np.float64) for name in names}
    if kind.recipe:
        (out / "recipe.yaml").write_text(kind.recipe)
        _smooth(tensors, weights, rows="AWQ" in kind.recipe)
    elif kind.algorithm == "awq":
        _smooth(tensors, weights, rows=False)
    for name, w in weights.items():
        tensors |= pack_layer(name, w, kind)
    qconfig = quantization_config(kind)
    if kind.kv == "fp8":
        qconfig["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "dynamic": False}
        for i in range(2):
            tensors |= kv_scales(f"model.layers.{i}", kind.method)
    save(out / "model.safetensors", tensors)
    with editing_json(out / "config.json") as config:
        config["quantization_config"] = qconfig
    if kind.method == "gptq":
        (out / "quantize_config.json").write_text(json.dumps(qconfig))
    if kind.method == "modelopt":
        facts = {"quant_algo": qconfig["quant_algo"], "exclude_modules": qconfig["ignore"]}
        facts |= {"kv_cache_quant_algo": "FP8" if kind.kv == "fp8" else None}
        if kind.fmt in GROUP_SIZES:
            facts |= {"group_size": GROUP_SIZES[kind.fmt], "has_zero_point": False, "pre_quant_scale": True}
        (out / "hf_quant_config.json").write_text(json.dumps({"quantization": facts}))
    return out


def shard(folder: Path) -> None:
    """Split a folder's one file into two shards with an index."""
    tensors = load(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, weight_map = list(tensors), {}
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-0000{i}-of-00002.safetensors"
        save(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(raw.nbytes for _, raw in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_pair(folder: Path, kind: str, **options: bool) -> Path:
    """Make folder/source and folder/made, stored as `kind` (a key of KINDS, or 'bf16'); return the latter."""
    source = make_source(folder / "source", **options)
    if kind == "bf16":
        return make_source(folder / "made", **options)
    return quantize(source, folder / "made", KINDS[kind])


def lint_made(folder: Path, kind: str, algorithm: str | None = None) -> dict[str, Any]:
    """Lint folder/made against folder/source; the result must be JSON."""
    how = Kind("bf16", "none") if kind == "bf16" else KINDS[kind]
    group = how.group if how.fmt in GROUPED else None
    result = lint(folder / "made", folder / "source", how.fmt, group, algorithm or how.algorithm, how.kv)
    json.dumps(result, allow_nan=False)
    return result

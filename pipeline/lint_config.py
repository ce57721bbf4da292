"""Lint rules on config.json: the same model as the source, quantized as the recipe says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline import layouts
from pipeline.checkpoint import CheckpointError, read_object
from pipeline.layout_parts import Layout
from pipeline.lint_case import Case, Report

# Keys of config.json that say who wrote the file, not what the model is. Everything else must survive.
MAY_DIFFER = frozenset({
    "quantization_config", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "_name_or_path", "_model_name_or_path", "_attn_implementation", "_attn_implementation_autoset",
})  # fmt: skip
# Keys that a writer may not even leave out; another key that is left out had its default, which is worth a
# warning.
DIMENSIONS = frozenset({
    "model_type", "architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window",
    "eos_token_id", "bos_token_id", "tie_word_embeddings", "rms_norm_eps", "hidden_act", "rope_theta",
    "rope_type",
})  # fmt: skip


def check_config(case: Case, report: Report) -> None:
    """config.json describes the same model as the source's."""
    want, have = (dict(_flat(_canonical(ck.config))) for ck in (case.source, case.made))
    for key in sorted(want.keys() | have.keys()):
        if want.get(key) == have.get(key):
            continue
        message = f"config.json has {key} = {have.get(key)!r}, the source has {want.get(key)!r}."
        needed = key.rsplit(".", 1)[-1] in DIMENSIONS
        (report.error if needed or (key in want and key in have) else report.warn)("config-key", key, message)


def _canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what may differ and what is null; write RoPE the one way that transformers 5 writes it."""
    out = {key: value for key, value in config.items() if key not in MAY_DIFFER and value is not None}
    rope = {"rope_theta": out.pop("rope_theta", None)}
    for key in ("rope_scaling", "rope_parameters"):
        value = out.pop(key, None)
        rope |= value if isinstance(value, dict) else {}
    if any(value is not None for value in rope.values()):
        kind = rope.pop("type", None)
        out["rope"] = {"rope_type": kind or "default"} | rope
    if isinstance(out.get("architectures"), list):
        out["architectures"] = sorted(map(str, out["architectures"]))
    return {
        key: _canonical(value) if isinstance(value, dict) and key != "rope" else value for key, value in out.items()
    }


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_quantization_config(case: Case, report: Report) -> None:
    """quantization_config says what the recipe says, and a second file that repeats it agrees."""
    rule, method = "config-quantization", case.qconfig.get("quant_method")
    if case.fmt == "bf16":
        if "quantization_config" in case.made.config:
            report.error(rule, "config.json", f"config.json says quant_method {method!r}, but the format is bf16.")
        return
    if case.layout is None:
        known = sorted(entry.method for entry in layouts.LAYOUTS if entry.fmt == case.fmt)
        report.error(
            "layout",
            "config.json",
            f"config.json has quant_method {method!r}; {case.fmt} is known as {' or '.join(known)}.",
        )
        return
    for path, allowed in case.layout.config.items():
        wanted = [case.group_size if value == layouts.GROUP else value for value in allowed]
        for value in layouts.look_up(case.qconfig, path):
            if value not in wanted:
                report.error(
                    rule,
                    "config.json",
                    f"quantization_config.{path} is {value!r}; the recipe needs {wanted[0]!r}.",
                )
    if case.layout.mirror:
        _check_mirror(case, case.layout, case.layout.mirror, report)
    for key, value in _flat(case.qconfig):
        if isinstance(value, str) and value.startswith("/"):
            # It changes from run to run, so the artifact's digest does too, and it tells where it was made.
            report.warn(
                "config-host-path",
                "config.json",
                f"quantization_config.{key} is a path of the host: {value}.",
            )


def _check_mirror(case: Case, layout: Layout, mirror: tuple[str, Mapping[str, str]], report: Report) -> None:
    name, paths = mirror
    try:
        content = read_object(case.made.folder / name)
    except CheckpointError as error:
        report.error("config-mirror", name, str(error))
        return
    for path, twin in paths.items():
        here, there = layouts.look_up(content, path)[0], layouts.look_up(case.qconfig, twin)[0]
        if isinstance(here, list) and isinstance(there, list):
            here, there = sorted(map(str, here)), sorted(map(str, there))
        if here != there:
            report.error("config-mirror", name, f"{name} says {path} = {here!r}, config.json says {twin} = {there!r}.")
    for path, allowed in layout.mirror_config.items():
        wanted = [case.group_size if value == layouts.GROUP else value for value in allowed]
        if (value := layouts.look_up(content, path)[0]) not in wanted:
            report.error("config-mirror", name, f"{name} says {path} = {value!r}; the recipe needs {wanted[0]!r}.")

"""The YAML of `trtllm-serve --config`: written from parameters, and held against the keys that LlmArgs has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import InputError, nearest
from pipeline.trtllm.tables import parameter, read

_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "share": (int, float),
    "str": (str, bool),
    "list": (list,),
}


def document(values: Mapping[str, Any], version: str, where: str = "params.yaml") -> dict[str, Any]:
    """Return the YAML's content for parameters by their names here; what the YAML does not hold is left out.

    Raises:
        InputError: an unknown parameter.
    """
    made: dict[str, Any] = {}
    for name, value in values.items():
        path = parameter(name, version, where).spellings.get("yaml")
        if path and value is not None:
            put(made, path, value)
    return made


def put(made: dict[str, Any], path: str, value: Any) -> None:
    """Set a dotted path in nested mappings."""
    *sections, last = path.split(".")
    for section in sections:
        made = made.setdefault(section, {})
    made[last] = value


def merge(made: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return `made` with the user's own keys on top, section by section."""
    out = dict(made)
    for key, value in own.items():
        both = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merge(dict(out[key]), value) if both else value
    return out


def problems(content: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield one sentence for each key that LlmArgs does not have, and each value of another type."""
    table = read("llm_args")
    keys: dict[str, Any] = table["keys"]
    sections = {".".join(k.split(".")[:n]) for k in keys for n in range(1, k.count(".") + 1)}
    for key, value in content.items():
        path = f"{prefix}{key}"
        if path in table["opaque"]:
            continue
        if path in sections:
            if isinstance(value, Mapping):
                yield from problems(value, f"{path}.")
            else:
                yield f"{path} is {value!r}, a mapping is expected"
        elif path not in keys:
            yield f"'{path}' is no key of TensorRT-LLM's LlmArgs.{nearest(path, keys)}"
        elif problem := _wrong(keys[path], value):
            yield f"{path} is {value!r}, {problem}"


def _wrong(entry: Mapping[str, Any], value: Any) -> str | None:
    if value is None:
        return None
    kind: str = entry["type"]
    number: Any = value
    if not isinstance(value, _TYPES[kind]) or (kind in ("int", "float", "share") and isinstance(value, bool)):
        return f"{kind} is expected"
    if isinstance(value, float) and not math.isfinite(value):
        return "a finite number is expected"
    if kind == "share" and not 0 <= number <= 1:
        return "a share from 0 to 1 is expected"
    if "choices" in entry and value not in entry["choices"]:
        return f"known: {', '.join(entry['choices'])}"
    return None


def need_known(content: Mapping[str, Any], where: str) -> None:
    """Refuse a YAML that `trtllm-serve` would stop at.

    Raises:
        InputError: with every problem.
    """
    said = list(problems(content))
    if said:
        raise InputError(f"{where}: " + "; ".join(said))

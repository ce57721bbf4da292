"""Names of old TensorRT-LLM releases in a user's params: an error with the current name and the value worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from pipeline.errors import InputError
from pipeline.trtllm.tables import read

DEFAULT_INPUT = 1024  # trtllm-build's own default of max_input_len
_OFF = (False, 0, "0", "false", "False", "disable", "off", "no", None)


class Old(NamedTuple):
    """A row of data/migration.yaml; `becomes`: what to write instead, `advice`: the rest."""

    name: str
    status: str
    since: str
    where: str
    becomes: Mapping[str, Any]
    advice: str
    sources: tuple[str, ...]


def rows() -> dict[str, Old]:
    """Return every old name, without the one that is still current."""
    table = read("migration")
    return {
        row["old"]: Old(
            row["old"], row["status"], row.get("since", ""), row.get("where", ""), row.get("becomes", {}),
            row.get("advice", ""), tuple(table["sources"][key] for key in row["sources"]),
        )
        for row in (*table["rows"], *table["more"])
        if row["status"] != "current"
    }  # fmt: skip


def _sum(value: Any, beside: Mapping[str, Any]) -> Any:
    """Old lengths counted the output alone; the sum with the input's is what counts now."""
    try:
        return int(value) + int(beside.get("max_input_len") or DEFAULT_INPUT)
    except (TypeError, ValueError):
        return "max_input_len + max_output_len"


def _ranks(value: Any, beside: Mapping[str, Any]) -> Any:
    sizes = [beside.get(name) or 1 for name in ("tensor_parallel_size", "pipeline_parallel_size")]
    return sizes[0] * sizes[1] if value not in _OFF and all(isinstance(n, int) for n in sizes) else 1


def _plugin(value: Any, _: Mapping[str, Any]) -> Any:
    if value in _OFF:
        return "disable"
    return "auto" if value in (True, "enable", "", "true", "True") else value


# What a value of `becomes` that starts with $ stands for: (the user's value, the options beside it) -> the new value.
RULES: dict[str, Callable[[Any, Mapping[str, Any]], Any]] = {
    "$value": lambda value, _: value,
    "$input_plus_value": _sum,
    "$plugin": _plugin,
    "$switch": lambda value, _: "disable" if value in _OFF else "enable",
    "$bool": lambda value, _: value not in _OFF,
    "$not": lambda value, _: value in _OFF,
    "$cache_type": lambda value, _: "continuous" if value in _OFF else "paged",
    "$weight_only": lambda value, _: "int4-w4a16" if str(value).startswith("int4") else "int8-w8a16",
    "$directory": lambda value, _: value if isinstance(value, str) else "network",
    "$ranks": _ranks,
}


def instead(old: Old, value: Any, beside: Mapping[str, Any]) -> dict[str, Any]:
    """Return what to write instead of `old: value`, with values worked out from the options `beside` it."""
    return {
        name: RULES[new](value, beside) if isinstance(new, str) and new in RULES else new
        for name, new in old.becomes.items()
    }


def sentence(old: Old, value: Any, beside: Mapping[str, Any]) -> str:
    """Return one sentence: since when the name is gone, what to write today and why."""
    gone = {
        "removed": f"was removed in TensorRT-LLM {old.since}",
        "renamed": f"has another name since TensorRT-LLM {old.since}",
        "moved": f"moved in TensorRT-LLM {old.since}",
        "deprecated": f"is deprecated since TensorRT-LLM {old.since}",
        "implicit": f"is implied since TensorRT-LLM {old.since}",
        "alias": "is an old alias",
    }[old.status]
    new = instead(old, value, beside)
    write = ", ".join(f"{name}: {_yaml(text)}" for name, text in new.items())
    parts = [f"write {write}" + (f" ({old.where})" if old.where else "")] if write else []
    parts += [old.advice] if old.advice else []
    return f"{old.name} {gone}; {'; '.join(parts)}."


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def found_in(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each old name among options of any spelling, nested ones too."""
    table = rows()
    beside = {_plain(key): value for key, value in options.items()}
    for key, value in options.items():
        if _plain(key) in table:
            yield sentence(table[_plain(key)], value, beside)
        elif isinstance(value, Mapping):
            yield from found_in(value)


def _plain(key: Any) -> str:
    return str(key).lstrip("-").replace("-", "_")


def refuse_old(options: Mapping[str, Any], where: str) -> None:
    """Refuse options that hold an old name.

    Raises:
        InputError: one sentence for each of them.
    """
    said = list(found_in(options))
    if said:
        raise InputError(f"{where}: " + " ".join(said))

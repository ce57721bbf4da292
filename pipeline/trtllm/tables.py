"""Read the tables in data/: flags of each tool, spellings of each parameter, keys of the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline.errors import InputError, unknown
from pipeline.trtllm.version import inside

DATA = Path(__file__).parent / "data"
TOOLS = ("build", "serve", "bench")


class Flag(NamedTuple):
    """One flag of a tool at one version. `type`: int, float, str, path, flag, list or choice; `choices` of a choice."""

    name: str
    type: str
    default: Any
    choices: tuple[str, ...]
    aliases: tuple[str, ...]
    source: str
    deprecated: str | None = None
    raises_on_sm: Mapping[int, str] = {}
    note: str | None = None


class Tool(NamedTuple):
    """A command of TensorRT-LLM at one version: `name` as typed, `positional` arguments, flags by name."""

    name: str
    version: str
    positional: tuple[str, ...]
    flags: Mapping[str, Flag]

    def flag(self, name: str, where: str) -> Flag:
        """Return a flag by its name or an alias of it.

        Raises:
            InputError: there is none; with the nearest one.
        """
        for flag in self.flags.values():
            if name == flag.name or name in flag.aliases:
                return flag
        raise unknown(f"flag of {self.name} {self.version}", name, self.flags, where)


class Parameter(NamedTuple):
    """One serving parameter: its `spellings` per tool (build, serve, bench, yaml, checkpoint) at one version."""

    name: str
    type: str
    spellings: Mapping[str, str]
    values: Mapping[str, Mapping[str, Any]]


@cache
def read(name: str) -> dict[str, Any]:
    """Return the raw table data/<name>.yaml."""
    return dict(yaml.safe_load((DATA / f"{name}.yaml").read_text(encoding="utf-8")))


@cache
def tool(name: str, version: str) -> Tool:
    """Return the flags that a tool (build, serve or bench) has at `version`.

    Raises:
        InputError: the table does not hold for this version.
    """
    raw = read(name)
    if not inside(version, raw["versions"]):
        raise InputError(
            f"The flags of {raw['tool']} are known for TensorRT-LLM {raw['versions']}, not for {version}; "
            + ("use the runtime trtllm-bundle, which needs no build." if name == "build" else "name another version.")
        )
    flags = {}
    for flag_name, entries in raw["flags"].items():
        for entry in entries if isinstance(entries, list) else [entries]:
            if inside(version, entry.get("versions", "")):
                flags[flag_name] = _flag(flag_name, entry, raw)
    return Tool(raw["tool"], version, tuple(raw.get("positional", ())), flags)


def _flag(name: str, entry: Mapping[str, Any], raw: Mapping[str, Any]) -> Flag:
    choices = entry.get("choices", ())
    return Flag(
        name, entry["type"], entry.get("default"),
        tuple(raw["choice_sets"][choices] if isinstance(choices, str) else choices),
        tuple(entry.get("aliases", ())), raw["sources"][entry["source"]], entry.get("deprecated"),
        entry.get("raises_on_sm", {}), entry.get("note"),
    )  # fmt: skip


@cache
def parameters(version: str) -> dict[str, Parameter]:
    """Return every serving parameter with its spellings at `version`."""
    found = {}
    for name, entry in read("parameters")["parameters"].items():
        spellings = {}
        for place in (*TOOLS, "yaml", "checkpoint"):
            said = entry.get(place)
            if isinstance(said, list):
                said = next((text for ranges, text in said if inside(version, ranges)), None)
            if said:
                spellings[place] = said
        found[name] = Parameter(name, entry["type"], spellings, entry.get("values", {}))
    return found


def parameter(name: str, version: str, where: str = "params.yaml") -> Parameter:
    """Return one parameter.

    Raises:
        InputError: there is none of this name; with the nearest one.
    """
    table = parameters(version)
    if name not in table:
        raise unknown("TensorRT-LLM parameter", name, table, where)
    return table[name]

"""Turn parameters into the command line of a TensorRT-LLM tool, and read such a command back against the flag table."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pipeline.errors import InputError
from pipeline.trtllm.tables import TOOLS, Flag, Tool, parameter, tool
from pipeline.trtllm.version import need_engine_builder


def flags_of(values: Mapping[str, Any], name: str, version: str, where: str = "params.yaml") -> dict[str, Any]:
    """Return `{flag: value}` of the parameters that the tool (build, serve, bench) takes itself at `version`.

    A parameter that the tool leaves to something else (tensor_parallel_size of a build, which the checkpoint says) is
    left out.

    Raises:
        InputError: an unknown parameter or tool.
    """
    if name not in TOOLS:
        raise InputError(f"There is no TensorRT-LLM tool '{name}'; known: {', '.join(TOOLS)}.")
    found = {}
    for key, value in values.items():
        entry = parameter(key, version, where)
        if value is not None and name in entry.spellings:
            found[entry.spellings[name]] = entry.values.get(name, {}).get(value, value)
    return found


def arguments(name: str, version: str, flags: Mapping[str, Any], where: str = "params.yaml") -> list[str]:
    """Return the arguments of a tool, each flag checked against the table: name, type, choices.

    Raises:
        InputError: an unknown flag (nearest given) or a value of another type.
    """
    if name == "build":
        need_engine_builder(version, where)
    made: list[str] = []
    table = tool(name, version)
    for key, value in flags.items():
        flag = table.flag(key.removeprefix("--").replace("-", "_"), where)
        made += _render(table, flag, value, where)
    return made


def _render(table: Tool, flag: Flag, value: Any, where: str) -> list[str]:
    problem = why_not(flag, value)
    if problem:
        raise InputError(f"{where}: {table.name} --{flag.name} {problem}.")
    if flag.type == "flag":
        return [f"--{flag.name}"] if value else []
    if flag.type == "list":
        return [f"--{flag.name}", *map(str, value)]
    return [f"--{flag.name}", _text(flag, value)]


def _text(flag: Flag, value: Any) -> str:
    """Return a value as the tool reads it: true is `enable` where a flag has such choices."""
    if isinstance(value, bool):
        return "enable" if value else "disable"
    return str(value)


def why_not(flag: Flag, value: Any) -> str | None:
    """Return why a flag does not take a value, or None."""
    if flag.type == "flag":
        return None if isinstance(value, bool) else f"takes no value and is {value!r}; write true or false"
    if flag.type == "choice":
        said = _text(flag, value)
        return None if said in flag.choices else f"is {value!r}; known: {', '.join(flag.choices)}"
    if flag.type == "list":
        return None if isinstance(value, list) and value else f"is {value!r}; a list is expected"
    if flag.type in ("int", "float"):
        number = isinstance(value, int) if flag.type == "int" else isinstance(value, int | float)
        if isinstance(value, bool) or not number or not math.isfinite(value):
            return f"is {value!r}; {'a whole number' if flag.type == 'int' else 'a number'} is expected"
        return None
    return None if isinstance(value, str) and value and "\n" not in value else f"is {value!r}; text is expected"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self.prog}: {message}")


def read_back(name: str, version: str, made: Sequence[str]) -> dict[str, Any]:
    """Parse a tool's arguments as the tool itself would, and return the flags that were given.

    Raises:
        InputError: an unknown flag, a wrong type, a value that is no choice, or a missing value.
    """
    table = tool(name, version)
    parser = _Parser(prog=table.name, add_help=False, allow_abbrev=False)
    for argument in table.positional:
        parser.add_argument(argument)
    for flag in table.flags.values():
        spellings = [f"--{text}" for text in (flag.name, *flag.aliases)]
        if flag.type == "flag":
            parser.add_argument(*spellings, action="store_true", default=argparse.SUPPRESS)
            continue
        kind = {"int": int, "float": float}.get(flag.type, str)
        parser.add_argument(
            *spellings, type=kind, choices=flag.choices or None, default=argparse.SUPPRESS, dest=flag.name,
            nargs="+" if flag.type == "list" else None,
        )  # fmt: skip
    return vars(parser.parse_args(list(made)))


def raises_on(version: str, flags: Mapping[str, Any], sm: int) -> list[str]:
    """Return one sentence for each plugin of trtllm-build that raises on this SM unless it is off."""
    table = tool("build", version)
    found = []
    for key, value in flags.items():
        flag = table.flag(key, "params.yaml")
        # PluginConfig.validate asks for SM100; its family (103) has the same kernels.
        error = flag.raises_on_sm.get(100 if sm in (100, 103) else sm)
        if error and _text(flag, value) != "disable":
            found.append(f"{flag.name} {value} raises {error} on SM{sm} ({flag.source}); leave it out")
    return found

"""Reads the files a report is made from, and turns every absent number into a reason.

A fact is `{"value": number | None, "ci95": [low, high] | None, "not_measured": reason | None}`: either a
value or a reason, never neither. That is how `not measured (reason)` stays a value all the way to the page.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from pipeline.speed.definitions import SAMPLES_NEEDED

Fact = dict[str, Any]


def measured(value: float, ci95: list[float] | None = None) -> Fact:
    """Return the fact for a number that was measured, in the unit its name carries."""
    if not math.isfinite(value) or not all(map(math.isfinite, ci95 or ())):
        return absent("what the results give for it is not a finite number")
    return {"value": value, "ci95": ci95, "not_measured": None}


def absent(reason: str) -> Fact:
    """Return the fact for a number that was not measured."""
    return {"value": None, "ci95": None, "not_measured": reason}


def is_number(value: object) -> bool:
    """Tell whether `value` is a finite int or float (JSON true is not a number, nor is 1e999)."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def interval(value: object) -> list[float] | None:
    """Return [low, high] if `value` is an ordered pair of finite numbers, else None."""
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(is_number, value)):
        return None
    return [float(value[0]), float(value[1])] if value[0] <= value[1] else None


@dataclass(frozen=True)
class Doc:
    """One file of the data contract. `data` is None exactly when `problem` says why."""

    path: str
    data: dict[str, Any] | None
    problem: str | None = None

    def raw(self, *keys: str) -> Any:
        """Return what stands under nested `keys`, or None where any step is absent or is no mapping."""
        node: Any = self.data
        for key in keys:
            node = node.get(key) if isinstance(node, dict) else None
        return node

    def mapping(self, *keys: str) -> dict[str, Any]:
        """Return the mapping under `keys`; an empty one where there is none."""
        node = self.raw(*keys)
        return node if isinstance(node, dict) else {}

    def items(self, *keys: str) -> list[Any]:
        """Return the list under `keys`; an empty one where there is none."""
        node = self.raw(*keys)
        return node if isinstance(node, list) else []

    def fact(self, *keys: str, ci: str | None = None, why: str | None = None) -> Fact:
        """Return the number under `keys` as a fact; its interval is the sibling named `ci`.

        The reason for an absent one is, in this order: what is wrong with the file, what the file itself
        gives in a sibling `not_measured` mapping, `why`, or the name of the missing key and of the file.
        """
        if self.problem is not None:
            return absent(self.problem)
        *parents, key = keys
        value = self.raw(*keys)
        if is_number(value):
            return measured(value, interval(self.raw(*parents, ci)) if ci else None)
        given = self.raw(*parents, "not_measured", key)
        if isinstance(given, str):
            return absent(given)
        if value is not None:
            return absent(f"{self.path} has {value!r} for {'.'.join(keys)}, which is not a finite number")
        return absent(why or f"{self.path} has no {'.'.join(keys)}")


def read_doc(root: Path, path: str, schema: str | None, *older: str) -> Doc:
    """Read one JSON file of the contract; whatever is wrong with it becomes `problem`, which names the file.

    `older` are schemas that are still understood beside `schema`.

    Paths below `root` are printed relative, so that a report does not depend on where the repository lies.
    """
    try:
        text = (root / path).read_text(encoding="utf-8")
        data = json.loads(text.replace(f"{root.resolve()}/", ""), parse_constant=_no_constant, parse_float=_finite)
    except FileNotFoundError:
        return Doc(path, None, f"{path} is missing")
    except (OSError, ValueError) as error:
        return Doc(path, None, f"{path} cannot be read: {_one_line(error)}")
    if not isinstance(data, dict):
        return Doc(path, None, f"{path} cannot be read: it holds a {type(data).__name__}, not an object")
    if schema is not None and data.get("schema") not in (schema, *older):
        return Doc(path, None, f"{path} cannot be read: its schema is {data.get('schema')!r}, not {schema!r}")
    return Doc(path, data)


def read_yaml(root: Path, path: str) -> Doc:
    """Read params.yaml or plan.yaml, with the same rule: a fault becomes `problem`."""
    try:
        data = yaml.safe_load((root / path).read_text(encoding="utf-8"))
        # YAML also knows dates, infinities and keys that are no strings; report.json does not.
        data = json.loads(json.dumps(data, default=str, skipkeys=True), parse_constant=str)
    except FileNotFoundError:
        return Doc(path, None, f"{path} is missing")
    except (OSError, ValueError, yaml.YAMLError) as error:
        return Doc(path, None, f"{path} cannot be read: {_one_line(error)}")
    if not isinstance(data, dict):
        return Doc(path, None, f"{path} cannot be read: it holds a {type(data).__name__}, not a mapping")
    return Doc(path, data)


def percentile(doc: Doc, *keys: str) -> Fact:
    """Return a latency statistic (`mean`, `p50`, `p90`, `p95`, `p99`; last of `keys`) if n is large enough.

    The gate is applied here again, whatever the file holds: a tail read from too few samples misleads.
    """
    *stat, key = keys
    if doc.problem is not None:
        return absent(doc.problem)
    if not doc.mapping(*stat):
        return absent(f"{doc.path} has no {'.'.join(stat)}")
    n, needed = doc.raw(*stat, "n"), SAMPLES_NEEDED.get(key, 1)
    if not is_number(n):
        return absent(f"{doc.path} does not say how many samples {'.'.join(stat)} has")
    if n < needed:
        return absent(f"n too small ({n} < {needed})")
    return doc.fact(*keys)


def plain(value: object, limit: int = 400) -> str:
    """Return a value of a foreign file as one line of text of at most `limit` characters."""
    text = " ".join(str(value).split())
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _one_line(error: Exception) -> str:
    return plain(error, 200)


def _finite(text: str) -> float | str:
    """Keep a number that overflows, such as 1e999, as text: it is no number, and the reason shows it."""
    value = float(text)
    return value if math.isfinite(value) else text


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON knows")

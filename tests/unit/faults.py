"""Faults to plant in a checkpoint: each function returns one that takes the checkpoint's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from packers import editing, editing_json


def json_key(file: str, path: str, new: Any) -> Callable[[Path], None]:
    """Return a fault that sets one key (dotted path) of a JSON file, or removes it if `new` is ...."""

    def plant(folder: Path) -> None:
        with editing_json(folder / file) as content:
            *parents, last = path.split(".")
            for key in parents:
                content = content[key]
            if new is ...:
                del content[last]
            else:
                content[last] = new

    return plant


def tensor(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Return a fault that changes the tensors, a dict of name to (dtype, raw)."""

    def plant(folder: Path) -> None:
        with editing(folder) as tensors:
            change(tensors)

    return plant


def first(name: str, number: Any) -> Callable[[Path], None]:
    """Return a fault that overwrites the first element of a tensor's raw bits."""
    return tensor(lambda t: t[name][1].reshape(-1).__setitem__(0, number))


def renew(name: str, dtype: str, shape: tuple[int, ...]) -> Callable[[Path], None]:
    """Return a fault that replaces a tensor by ones of another dtype or shape."""
    kinds = {"F32": np.float32, "F16": np.float16, "I32": np.int32, "I8": np.int8, "I64": np.int64}
    return tensor(lambda t: t.__setitem__(name, (dtype, np.ones(shape, kinds[dtype]))))


def drop(name: str) -> Callable[[Path], None]:
    """Return a fault that removes a tensor."""
    return tensor(lambda t: t.pop(name))


def swap(a: str, b: str) -> Callable[[Path], None]:
    """Return a fault that exchanges two tensors."""
    return tensor(lambda t: t.update({a: t[b], b: t[a]}))


def bump(name: str, by: int, rows: int | None = None) -> Callable[[Path], None]:
    """Return a fault that adds to the raw numbers of a tensor's first `rows` (all if None)."""
    return tensor(lambda t: t[name][1][:rows].__iadd__(np.asarray(by, t[name][1].dtype)))


def zero(name: str) -> Callable[[Path], None]:
    """Return a fault that sets a tensor to zero."""
    return tensor(lambda t: t[name][1].fill(0))


def invert(name: str) -> Callable[[Path], None]:
    """Return a fault that stores one over each number."""
    return tensor(lambda t: t.update({name: (t[name][0], 1 / t[name][1])}))

"""One module a group of commands; each has `register(add)`. Imports stay inside the functions, so --help is quick."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

PARAMS = Path("params.yaml")
Call = Callable[[argparse.Namespace], int]


class Add(Protocol):
    """Add a command: its name, what it calls and one line of help; returns its parser for arguments."""

    def __call__(self, name: str, call: Call, text: str) -> argparse.ArgumentParser:
        """Return the parser of the new command."""

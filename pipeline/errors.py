"""Errors a person can act on: what was wanted, what was found, the nearest known names, the next command."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuantpressError(Exception):
    """A failure with a sentence for people and an exit code for machines (design.md, section Errors)."""

    exit_code = 1


class WorkError(QuantpressError):
    """The work itself failed (exit code 1)."""

    exit_code = 1


class InputError(QuantpressError):
    """The input or the command line is wrong (exit code 2)."""

    exit_code = 2


class HostError(QuantpressError):
    """This host cannot do it (exit code 3)."""

    exit_code = 3


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ' Did you mean X? Known: a, b.' for an unknown `name`; without a near name only the list."""
    names = sorted(map(str, known))
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f" Did you mean '{close[0]}'?" if close else ""
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    return f"{hint} Known: {shown or 'none'}."


def unknown(kind: str, name: str, known: Iterable[str], where: str) -> InputError:
    """Return the error for a name that is not in a table, e.g. unknown('recipe', 'fp9', recipes, 'params.yaml')."""
    return InputError(f"There is no {kind} '{name}' in {where}.{nearest(name, known)}")

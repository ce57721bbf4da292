"""Facts as text, one way for the page, the cards and the answer box, so that they never disagree."""

from __future__ import annotations

from typing import Any

from pipeline.report.sources import Fact

# kind -> (factor on the stored value, format, unit). MB is 10^6 bytes.
KINDS: dict[str, tuple[float, str, str]] = {
    "mb": (1e-6, ",.1f", " MB"),
    "bits": (1, ".2f", " bits"),
    "smaller": (1, ".2f", "×"),
    "share": (100, ".1f", "%"),
    "pct": (1, ".1f", "%"),
    "pct2": (1, ".2f", "%"),
    "pp": (1, "+.1f", " pp"),
    "kl": (1, ".4f", ""),
    "ppl": (1, ".2f", ""),
    "ratio3": (1, ".3f", "×"),
    "speed": (1, ".2f", "×"),
    "tok_s": (1, ",.1f", ""),
    "ms": (1, ",.1f", ""),
    "s": (1, ",.1f", " s"),
    "gib": (1, ".2f", " GiB"),
    "count": (1, ",.0f", ""),
    "pct_of": (100, ".2f", "%"),
    "change": (1, "+.1f", "%"),
}


def number(value: float, kind: str, unit: bool = True) -> str:
    """Return a stored value as people read it, e.g. number(0.61, 'share') -> '61.0%'."""
    factor, spec, suffix = KINDS[kind]
    text = format(value * factor, spec).replace("-", "−")
    return text + (suffix if unit else "")


def span(ci95: list[float] | None, kind: str) -> str:
    """Return a 95% interval as '[1.25, 1.38]', in the unit of `kind`; 'no interval' where there is none."""
    if ci95 is None:
        return "no interval"
    return f"[{number(ci95[0], kind, unit=False)}, {number(ci95[1], kind, unit=False)}]"


def missing(reason: str) -> str:
    """Return how an absent number is printed. "n too small" stands in its own words."""
    return reason if reason.startswith(("n too small", "not measured")) else f"not measured ({reason})"


def show(fact: Fact, kind: str, with_interval: bool = False) -> str:
    """Return a fact as text: its value, its interval if asked for, or why it was not measured."""
    if fact["value"] is None:
        return missing(fact["not_measured"])
    text = number(fact["value"], kind)
    return f"{text} {span(fact['ci95'], kind)}" if with_interval else text


def lookup(node: Any, path: str) -> Any:
    """Return what stands under a '/'-separated path of keys and list positions, e.g. 'speed/workloads/0'.

    Raises:
        KeyError: there is nothing there; a template that names a wrong path must not print an empty cell.
    """
    for key in path.split("/"):
        node = node[int(key)] if isinstance(node, list) else node[key]
    return node


def and_list(names: list[str]) -> str:
    """Return 'a', 'a and b' or 'a, b and c'."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

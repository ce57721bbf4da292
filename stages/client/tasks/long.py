"""Contexts of many lines, one of which holds the answer: the same ones at every call."""

from __future__ import annotations

import random
from typing import Any

PLACES = ("harbour", "library", "station", "garden", "museum", "bakery", "chapel", "market", "bridge", "tower")
COLOURS = ("amber", "azure", "coral", "ivory", "jade", "lilac", "olive", "pearl", "ruby", "teal")
CHOICES = 4


def make(items: int = 64, lines: int = 80, seed: int = 29, **_: object) -> dict[str, Any]:
    """Return `{"test": dataset}`; each document has an id, a prompt, four choices and the position of the right one.

    Args:
        items: how many documents.
        lines: lines of a context; a line is about 15 tokens.
        seed: of the generator.
    """
    import datasets

    rng = random.Random(seed)
    documents: list[dict[str, object]] = []
    for number in range(items):
        pairs = [(c, p) for c in COLOURS for p in PLACES]
        rng.shuffle(pairs)
        codes = rng.sample(range(1000, 9999), lines)
        rows = [f"The code of the {c} {p} is {code}." for (c, p), code in zip(pairs, codes, strict=False)]
        asked = rng.randrange(len(rows))
        (colour, place), code = pairs[asked], codes[asked]
        wrong = rng.sample([x for x in codes[: len(rows)] if x != code], CHOICES - 1)
        choices = [str(x) for x in (code, *wrong)]
        rng.shuffle(choices)
        documents.append({
            "id": f"long-{number:03d}", "depth": round(asked / len(rows), 2), "choices": choices,
            "prompt": "\n".join(rows) + f"\nThe code of the {colour} {place} is", "gold": choices.index(str(code)),
        })  # fmt: skip
    return {"test": datasets.Dataset.from_list(documents)}

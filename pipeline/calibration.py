"""Frozen token ids: drawing rows, the overlap check, and the card. Pure; the tokenizer stays in the stage."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from typing import Any, NamedTuple

from pipeline.errors import InputError
from pipeline.specs import CalibSet

OVERLAP_TOKENS = 24
FEW_SAMPLES = 128


class Document(NamedTuple):
    """One text and what a person would call it."""

    title: str
    text: str


def paragraphs(text: str) -> str:
    """Return the prose of a reST text: markup lines and hard line breaks inside paragraphs are dropped."""
    blocks = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        joined = " ".join(line for line in lines if not re.fullmatch(r"[=\-*^~.:#|+\s]+", line))
        if len(joined) > 40 and not joined.startswith((".. ", ":", "|", "+")):
            blocks.append(joined)
    return "\n\n".join(blocks)


def draw_rows(
    plain: list[list[int]], chat: list[list[int]], spec: CalibSet, held_out: list[list[int]]
) -> tuple[list[list[int]], int]:
    """Return `spec.samples` rows of exactly `spec.tokens_per_sample` ids, and how many windows were left out.

    `chat_share` of the rows come from `chat`, those first that begin a conversation and so hold the template. With
    both kinds wanted no document gives rows of both. A window that shares OVERLAP_TOKENS ids in a row with `held_out`
    is left out: a model must not be judged on what it was calibrated on. The order is shuffled by the seed.

    Raises:
        InputError: not enough text.
    """
    want_chat = round(spec.samples * spec.chat_share) if chat else 0
    want_plain = spec.samples - want_chat
    if want_chat and want_plain:
        chat, plain = chat[::2], plain[1::2]
    elif want_chat:
        plain = []
    else:
        chat = []
    template = common_runs(chat)
    banned = {run for row in held_out for run in runs(row)} - template
    width = spec.tokens_per_sample
    chat_rows, dropped_chat = _windows(chat, width, banned)
    plain_rows, dropped_plain = _windows(plain, width, banned)
    if len(chat_rows) < want_chat or len(plain_rows) < want_plain:
        raise InputError(
            f"The sources give {len(plain_rows)} plain and {len(chat_rows)} chat rows of {width} tokens; "
            f"{want_plain} and {want_chat} are wanted. Add sources, or lower samples or tokens_per_sample."
        )
    rng = random.Random(spec.seed)
    rows = _starts_first(chat_rows, want_chat, rng) + [row for _, row in rng.sample(plain_rows, want_plain)]
    rng.shuffle(rows)
    return rows, dropped_chat + dropped_plain


def runs(row: list[int], length: int = OVERLAP_TOKENS) -> set[tuple[int, ...]]:
    """Return every run of `length` ids of a row."""
    return {tuple(row[i : i + length]) for i in range(len(row) - length + 1)}


def common_runs(documents: list[list[int]], length: int = OVERLAP_TOKENS) -> set[tuple[int, ...]]:
    """Return the runs that more than three documents begin with: a chat template's system prompt, not text."""
    counts = Counter(run for document in documents for run in runs(document[: 4 * length], length))
    return {run for run, n in counts.items() if n > 3}


def _windows(
    documents: list[list[int]], width: int, banned: set[tuple[int, ...]]
) -> tuple[list[tuple[int, list[int]]], int]:
    """Return `(position in its document, ids)` of every whole window without a banned run, and the number dropped."""
    found = [(s, d[s : s + width]) for d in documents for s in range(0, len(d) - width + 1, width)]
    kept = [(s, row) for s, row in found if not banned or banned.isdisjoint(runs(row))]
    return kept, len(found) - len(kept)


def _starts_first(rows: list[tuple[int, list[int]]], count: int, rng: random.Random) -> list[list[int]]:
    """Choose `count` rows, those that begin a conversation first."""
    starts = [row for position, row in rows if position == 0]
    rest = [row for position, row in rows if position > 0]
    rng.shuffle(starts)
    rng.shuffle(rest)
    return (starts + rest)[:count]


def make_card(
    name: str,
    model: str,
    spec: CalibSet,
    rows: list[list[int]],
    revisions: dict[str, str],
    template: bool,
) -> dict[str, Any]:
    """Return the card of a frozen set: where it is from, what it holds, and what to be careful about."""
    warnings = []
    if spec.split == "calibration" and len(rows) < FEW_SAMPLES:
        warnings.append(f"{len(rows)} samples, fewer than the usual {FEW_SAMPLES}")
    if spec.split == "calibration" and not template:
        warnings.append("no row went through a chat template")
    lengths = Counter(len(row) for row in rows)
    return {
        "schema": "quantpress.calib/1",
        "set": name,
        "model": model,
        "split": spec.split,
        "sources": revisions,
        "license": spec.license,
        "samples": len(rows),
        "tokens": sum(map(len, rows)),
        "distinct_tokens": len({i for row in rows for i in row}),
        "length_histogram": {str(k): v for k, v in sorted(lengths.items())},
        "chat_share": spec.chat_share if template else 0.0,
        "chat_template": template,
        "seed": spec.seed,
        "digest": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        "warnings": warnings,
    }

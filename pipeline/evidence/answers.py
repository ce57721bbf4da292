"""Generated answers: how long they are, how many are empty, repeated, cut off or cannot be parsed. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from pipeline.evidence.resample import ratio_of_sums

COUNTS = ("empty", "repeated", "unparsable", "cut")


class Answer(NamedTuple):
    """One generated answer.

    tokens: its length. cut: it ended at the limit of tokens. empty, repeated: see canary.fault. unparsable: the task's
    filter found no answer in it. prompt_tokens: length of the prompt after the chat template, None where unknown.
    """

    id: str
    tokens: int
    cut: bool
    empty: bool
    repeated: bool
    unparsable: bool
    prompt_tokens: int | None = None


def tally(answers: list[Answer]) -> dict[str, Any]:
    """Return the number of answers, of each fault, and the mean length in tokens."""
    counts = {name: sum(bool(getattr(a, name)) for a in answers) for name in COUNTS}
    mean = float(np.mean([a.tokens for a in answers])) if answers else None
    return {"answers": len(answers), **counts, "tokens_mean": mean}


def compare_answers(baseline: list[Answer] | None, candidate: list[Answer]) -> dict[str, Any]:
    """Return the tally, and with a baseline its tally and the ratio of lengths over the same prompts.

    The ratio is of summed tokens, with a paired bootstrap over prompts. Answers cut at the limit pull it to 1, so
    `both_cut` says how many prompts were cut on both sides.

    Raises:
        ValueError: the two did not answer the same prompts.
    """
    result = tally(candidate) | {
        "baseline": None,
        "both_cut": None,
        "length_ratio": None,
        "length_ratio_ci95": None,
        "length_log_ratio_se": None,
        "prompt_tokens_differ": None,
    }
    if baseline is None:
        return result
    theirs, mine = {a.id: a for a in baseline}, {a.id: a for a in candidate}
    if theirs.keys() != mine.keys() or len(theirs) != len(baseline) or len(mine) != len(candidate):
        raise ValueError(f"baseline and candidate answered different prompts: {len(theirs)} and {len(mine)}")
    pairs = [(theirs[key], mine[key]) for key in sorted(mine)]
    result |= {
        "baseline": tally(baseline),
        "both_cut": sum(a.cut and b.cut for a, b in pairs),
        "prompt_tokens_differ": sum(
            None not in (a.prompt_tokens, b.prompt_tokens) and a.prompt_tokens != b.prompt_tokens for a, b in pairs
        ),
    }
    before, after = (np.array([side.tokens for side in sides], dtype=float) for sides in zip(*pairs, strict=True))
    if before.sum() > 0 and after.sum() > 0:
        found = ratio_of_sums(after, before, log=True)
        ci = found.interval()
        result |= {
            "length_ratio": float(np.exp(found.value)),
            "length_ratio_ci95": None if ci is None else [float(np.exp(x)) for x in ci],
            "length_log_ratio_se": found.se,
        }
    return result

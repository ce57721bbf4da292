"""The coherence canary: fixed greedy prompts, judged before any slower measurement. Pure."""

from __future__ import annotations

import re
from typing import Any

from pipeline.evidence.answers import Answer, compare_answers

KNOWN_NEEDED = 2
ENDS_NEEDED = 2


def judge(
    prompts: list[dict[str, Any]], answers: list[dict[str, Any]], baseline: list[Answer] | None = None
) -> dict[str, Any]:
    """Judge the answers to the canary prompts.

    It fails on any empty, repeated or wholly non-ASCII text, when fewer than two known answers are right, and when a
    prompt has another number of tokens than in the baseline: then the chat template or the tokenizer is another one.

    Args:
        prompts: dicts with id, prompt, max_tokens and, where the answer is known, known_answers (any one counts).
        answers: in the same order, dicts with text, finish_reason, tokens and prompt_tokens.
        baseline: the baseline's answers to the same prompts, from `of_canary`.
    """
    failures = []
    asked = right = ended = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text = answer["text"].strip()
        reason = fault(text)
        if reason:
            failures.append({"id": prompt["id"], "reason": reason, "text": text[:160]})
        ended += answer["finish_reason"] == "stop"
        if known := prompt.get("known_answers"):
            asked += 1
            right += any(_holds(text, option) for option in known)
    # A short limit cuts most open answers off; what may not happen is that nothing ever ends.
    if ended < min(ENDS_NEEDED, len(prompts)):
        failures.append({"id": "all", "reason": f"endless: {ended} answers ended by themselves", "text": ""})
    if right < min(KNOWN_NEEDED, asked):
        failures.append({"id": "known", "reason": f"only {right} of {asked} known answers are right", "text": ""})
    lengths = compare_answers(baseline, of_canary(prompts, answers))
    if differ := lengths["prompt_tokens_differ"]:
        reason = (
            f"another chat template or tokenizer: {differ} prompts have another number of tokens than in the baseline"
        )
        failures.append({"id": "template", "reason": reason, "text": ""})
    return {
        "passed": not failures,
        "prompts": len(prompts),
        "ended_by_itself": ended,
        "failures": failures,
        "known": {"asked": asked, "right": right},
        "lengths": lengths,
        "answers": [{"id": p["id"], "text": a["text"][:300]} for p, a in zip(prompts, answers, strict=True)],
    }


def of_canary(prompts: list[dict[str, Any]], answers: list[dict[str, Any]]) -> list[Answer]:
    """Return the answers with their lengths and faults, as they are paired with another run's."""
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        reason = fault(answer["text"].strip()) or ""
        found.append(
            Answer(
                id=prompt["id"],
                tokens=int(answer.get("tokens") or 0),
                cut=answer["finish_reason"] == "length",
                empty=reason == "empty",
                repeated=reason.startswith("repeated"),
                unparsable=False,
                prompt_tokens=answer.get("prompt_tokens"),
            )
        )
    return found


def _holds(text: str, option: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(option)}(?!\w)", text, re.IGNORECASE) is not None


def fault(text: str) -> str | None:
    """Return what is wrong with one answer: empty, repeated, or not the asked language; None if nothing is."""
    if not text:
        return "empty"
    if sum(c.isascii() for c in text) < 0.7 * len(text):
        return "not English: most characters are outside ASCII"
    words = text.lower().split()
    if len(words) >= 6 and max(words.count(w) for w in set(words)) > len(words) / 2:
        return "repeated: one word makes up over half of the answer"
    if len(words) >= 12:
        triples = [tuple(words[i : i + 3]) for i in range(len(words) - 2)]
        if max(triples.count(t) for t in set(triples)) > max(3, len(triples) // 4):
            return "repeated: one run of three words makes up over a quarter of the answer"
    if re.search(r"(.)\1{19,}", text):
        return "repeated: one character twenty times in a row"
    return None

"""Builds the default evaluation items of quantpress from a table of facts.

``facts.yaml`` (rows ``key: answer`` under a few topics) becomes ``tasks/facts.jsonl``: four-way multiple
choice items that the lm-eval task ``qp_facts`` reads offline. The program is pure and deterministic: each
choice that looks random is a SHA-256 hash of the seed in ``facts.yaml`` and of the id of the item, so the
result depends neither on the Python version nor on the order of a set.

Usage, from the root of the repository::

    python -m stages.client.make_tasks            # write tasks/facts.jsonl
    python -m stages.client.make_tasks --check    # exit 1 if tasks/facts.jsonl is stale
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import yaml

HERE = Path(__file__).resolve().parent
FACTS_PATH = HERE / "facts.yaml"
ITEMS_PATH = HERE / "tasks" / "facts.jsonl"

CHOICES = 4
"""Number of choices of an item: the answer and three distractors."""

NEAR_STEP = 6
"""Width of a step of numeric distance: numbers in the same step are equally good `near` distractors."""

OPERATORS: dict[str, Callable[[int, int], int]] = {"+": lambda a, b: a + b, "*": lambda a, b: a * b}


class FactsError(ValueError):
    """``facts.yaml`` cannot give a valid set of items; the message says which row or field and why."""


class Item(TypedDict):
    """One line of ``facts.jsonl``.

    Attributes:
        id: Unique id, ``<topic>-<row>``, such as ``capitals-017`` (rows count from 0).
        topic: Id of the topic.
        prompt: The cloze, without a trailing space.
        choices: Four distinct strings without leading or trailing space.
        gold: Index of the right choice, 0 to 3.
    """

    id: str
    topic: str
    prompt: str
    choices: list[str]
    gold: int


@dataclass(frozen=True)
class Fact:
    """One row of a topic.

    Attributes:
        key: What the prompt asks about.
        answer: The right answer that the item offers.
        also: Other right answers; never offered as distractors.
    """

    key: str
    answer: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Topic:
    """Rows that share a prompt, and that lend each other their answers as distractors.

    Attributes:
        id: Prefix of the item ids.
        prompt: Template with one ``{key}``.
        near: Whether distractors that resemble the answer are preferred.
        rows: The facts, in file order.
    """

    id: str
    prompt: str
    near: bool
    rows: tuple[Fact, ...]


@dataclass(frozen=True)
class Facts:
    """The content of ``facts.yaml``.

    Attributes:
        seed: String mixed into every hash.
        items: Number of items to keep.
        topics: The topics, in file order.
    """

    seed: str
    items: int
    topics: tuple[Topic, ...]


def _text(value: object, where: str) -> str:
    """Returns ``value`` if it is a clean string.

    Raises:
        FactsError: If it is not a string (YAML reads an unquoted ``No`` as false), is empty, or has spaces
            around it.
    """
    if not isinstance(value, str):
        raise FactsError(f"{where}: {value!r} is not a string; quote it.")
    if not value or value != value.strip():
        raise FactsError(f"{where}: {value!r} is empty or has spaces around it.")
    return value


def _mapping(value: object, where: str) -> dict[Any, Any]:
    """Returns ``value`` if it is a mapping.

    Raises:
        FactsError: If it is not.
    """
    if not isinstance(value, dict):
        raise FactsError(f"{where}: expected a mapping, got {type(value).__name__}.")
    return value


def _repeated_keys(node: object) -> list[str]:
    """Lists the keys that some mapping under the YAML node ``node`` has twice (PyYAML keeps the last)."""
    repeated: list[str] = []
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = str(key.value)
            if name in seen:
                repeated.append(name)
            seen.add(name)
            repeated += _repeated_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            repeated += _repeated_keys(value)
    return repeated


def arithmetic_rows(operators: Sequence[str], low: int, high: int) -> tuple[Fact, ...]:
    """Generates sums and products of small numbers.

    Args:
        operators: Keys of ``OPERATORS``, each used once, in this order.
        low: Smallest operand.
        high: Largest operand.

    Returns:
        One fact such as ``7 + 9`` -> ``16`` for each operator and each pair ``low <= a <= b <= high``:
        ``len(operators) * n * (n + 1) / 2`` facts, where n is ``high - low + 1``.

    Raises:
        FactsError: If an operator is unknown or the range is empty.
    """
    unknown = [name for name in operators if name not in OPERATORS]
    if unknown or low > high:
        raise FactsError(f"generate: unknown operators {unknown} or empty range {low}..{high}.")
    pairs = [(a, b) for a in range(low, high + 1) for b in range(a, high + 1)]
    return tuple(Fact(f"{a} {name} {b}", str(OPERATORS[name](a, b))) for name in operators for a, b in pairs)


def _load_rows(raw: dict[Any, Any], where: str) -> tuple[Fact, ...]:
    """Reads the rows of a topic, or generates them.

    Raises:
        FactsError: If the topic has both or neither of ``rows`` and ``generate``, or if one is malformed.
    """
    if ("rows" in raw) == ("generate" in raw):
        raise FactsError(f"{where}: give either rows or generate.")
    if "generate" in raw:
        spec = _mapping(raw["generate"], f"{where}, generate")
        try:
            operators = [str(name) for name in spec["operators"]]
            low, high = int(spec["low"]), int(spec["high"])
        except (KeyError, TypeError, ValueError) as error:
            raise FactsError(f"{where}: generate needs operators (a list), low and high.") from error
        return arithmetic_rows(operators, low, high)
    rows: list[Fact] = []
    for key, value in _mapping(raw["rows"], f"{where}, rows").items():
        name = _text(key, f"{where}, a key")
        answers = [_text(v, f"{where}, {name}") for v in (value if isinstance(value, list) else [value])]
        if not answers:
            raise FactsError(f"{where}, {name}: the list of answers is empty.")
        rows.append(Fact(name, answers[0], tuple(answers[1:])))
    return tuple(rows)


def load_facts(path: Path = FACTS_PATH) -> Facts:
    """Reads and validates a facts file.

    Args:
        path: A YAML file in the format that the head of ``facts.yaml`` explains.

    Returns:
        The facts, with generated topics expanded into rows.

    Raises:
        FactsError: If the file is not valid YAML, has a repeated key or a field that is missing or malformed.
        OSError: If the file cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    try:
        repeated = _repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader))
        raw = _mapping(yaml.safe_load(text), path.name)
    except yaml.YAMLError as error:
        raise FactsError(f"{path.name} is not valid YAML: {error}") from error
    if repeated:
        raise FactsError(f"{path.name} has repeated keys: {', '.join(repeated)}.")
    items = raw.get("items")
    if not isinstance(items, int) or items <= 0 or not isinstance(raw.get("topics"), list):
        raise FactsError(f"{path.name}: items must be a positive integer and topics a list.")
    topics: list[Topic] = []
    for entry in raw["topics"]:
        topic = _mapping(entry, "a topic")
        topic_id = _text(topic.get("id"), "id of a topic")
        where = f"topic {topic_id}"
        prompt = _text(topic.get("prompt"), f"{where}, prompt")
        distractors = topic.get("distractors", "any")
        if not re.fullmatch(r"[a-z0-9-]+", topic_id) or topic_id in {known.id for known in topics}:
            raise FactsError(f"{where}: the id is malformed or repeated.")
        if prompt.count("{key}") != 1:
            raise FactsError(f"{where}: the prompt must hold {{key}} exactly once.")
        if distractors not in ("any", "near"):
            raise FactsError(f"{where}: distractors must be any or near, not {distractors!r}.")
        topics.append(Topic(topic_id, prompt, distractors == "near", _load_rows(topic, where)))
    return Facts(_text(raw.get("seed"), "seed"), items, tuple(topics))


def _digest(*parts: str) -> str:
    """Returns the SHA-256 of the parts, 64 hexadecimal digits: the only source of 'randomness' here."""
    return hashlib.sha256("\0".join(parts).encode("utf-8")).hexdigest()


def _distance(answer: str, candidate: str) -> int:
    """Says how unlike the answer a candidate is; 0 is the most alike.

    Numbers: steps of ``NEAR_STEP``, plus 1000 for each digit that one has more (a shorter continuation
    would be more likely whatever the model knows). Words: 0 if the first letters agree, else 1.
    """
    if answer.isdecimal() and candidate.isdecimal():
        steps = abs(int(answer) - int(candidate)) // NEAR_STEP
        return steps + 1000 * abs(len(answer) - len(candidate))
    return int(answer[0].casefold() != candidate[0].casefold())


def pick_distractors(topic: Topic, fact: Fact, item_id: str, seed: str) -> list[str]:
    """Chooses the wrong answers of one item among the other answers of its topic.

    Args:
        topic: The topic, whose answers are the candidates.
        fact: A row of the topic. Its answer, its other right answers and its key are never chosen;
            letter case is ignored.
        item_id: Id of the item.
        seed: Seed of the facts.

    Returns:
        ``CHOICES - 1`` distinct strings, in hash order, the most alike first in a `near` topic.

    Raises:
        FactsError: If the topic has too few other answers.
    """
    barred = {text.casefold() for text in (fact.answer, fact.key, *fact.also)}
    candidates: dict[str, str] = {}
    for row in topic.rows:
        if row.answer.casefold() not in barred:
            candidates.setdefault(row.answer.casefold(), row.answer)
    if len(candidates) < CHOICES - 1:
        raise FactsError(f"{item_id}: only {len(candidates)} values of topic {topic.id} can be distractors.")

    def rank(candidate: str) -> tuple[int, str]:
        alike = _distance(fact.answer, candidate) if topic.near else 0
        return alike, _digest(seed, "distractor", item_id, candidate)

    return sorted(candidates.values(), key=rank)[: CHOICES - 1]


def build_items(facts: Facts) -> list[Item]:
    """Turns facts into multiple choice items.

    All rows become items; they are put in the order of the hash of their id, which interleaves the topics
    so that any prefix (lm-eval's ``--limit``) is a fair sample, and the first ``facts.items`` are kept.
    Each run of four consecutive items then gets the four gold positions, in an order drawn by hash.

    Args:
        facts: The facts, as ``load_facts`` returns them.

    Returns:
        ``facts.items`` items, in file order.

    Raises:
        FactsError: If there are fewer rows than ``facts.items``, or a topic has too few distinct answers.
    """
    rows = [(f"{topic.id}-{n:03d}", topic, row) for topic in facts.topics for n, row in enumerate(topic.rows)]
    if len(rows) < facts.items:
        raise FactsError(f"{len(rows)} rows cannot give {facts.items} items.")
    rows.sort(key=lambda row: _digest(facts.seed, "order", row[0]))
    items: list[Item] = []
    for position, (item_id, topic, fact) in enumerate(rows[: facts.items]):
        block, offset = divmod(position, CHOICES)
        golds = sorted(range(CHOICES), key=lambda g: _digest(facts.seed, "gold", str(block), str(g)))
        choices = pick_distractors(topic, fact, item_id, facts.seed)
        choices.insert(golds[offset], fact.answer)
        prompt = topic.prompt.replace("{key}", fact.key)
        items.append(Item(id=item_id, topic=topic.id, prompt=prompt, choices=choices, gold=golds[offset]))
    return items


def render_items(items: Iterable[Item]) -> str:
    """Returns the text of ``facts.jsonl``: one JSON object a line, each line ended by a newline."""
    return "".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items)


def write_items(items: Iterable[Item], path: Path = ITEMS_PATH) -> None:
    """Writes the items as JSON lines (UTF-8), and makes the folder if need be.

    Raises:
        OSError: If the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(render_items(items).encode("utf-8"))


def is_fresh(items: Iterable[Item], path: Path = ITEMS_PATH) -> bool:
    """Says whether the file at ``path`` exists and holds exactly these items."""
    return path.is_file() and path.read_bytes() == render_items(items).encode("utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    """Writes or checks the items.

    Args:
        argv: Command line without the program name; ``sys.argv`` if None.

    Returns:
        0 if the file was written or is fresh, 1 if ``--check`` finds it stale or missing, 2 if the facts
        are not valid or a file cannot be read or written.
    """
    parser = argparse.ArgumentParser(prog="make_tasks", description="Build facts.jsonl from facts.yaml.")
    parser.add_argument("--facts", type=Path, default=FACTS_PATH, help="facts file to read")
    parser.add_argument("--out", type=Path, default=ITEMS_PATH, help="items file to write or check")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the items are stale")
    args = parser.parse_args(argv)
    try:
        items = build_items(load_facts(args.facts))
        if not args.check:
            write_items(items, args.out)
            print(f"Wrote {len(items)} items to {args.out}.")
            return 0
        fresh = is_fresh(items, args.out)
    except (FactsError, OSError) as error:
        print(f"make_tasks: {error}", file=sys.stderr)
        return 2
    if fresh:
        print(f"{args.out} is up to date ({len(items)} items).")
        return 0
    remedy = "run `python -m stages.client.make_tasks` and commit the result."
    print(f"{args.out} does not match {args.facts}: {remedy}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

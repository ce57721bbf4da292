"""Tests of the pure part of the default evaluation task: facts, items and the canary prompts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from stages.client import make_tasks
from stages.client.make_tasks import Fact, Facts, FactsError, Item, Topic

CLIENT = Path(make_tasks.__file__).resolve().parent

ROWS = "rows: {a: w, b: x, c: y, d: z}"

MINI = f"""
seed: s
items: 4
topics:
  - id: pets
    prompt: "A {{key}} is"
    {ROWS}
"""


@pytest.fixture(scope="module")
def facts() -> Facts:
    """The facts of the repository."""
    return make_tasks.load_facts()


@pytest.fixture(scope="module")
def items(facts: Facts) -> list[Item]:
    """The items built from them."""
    return make_tasks.build_items(facts)


def write(folder: Path, text: str) -> Path:
    """Writes a facts file into a temporary folder."""
    path = folder / "facts.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_counts(facts: Facts, items: list[Item]) -> None:
    assert len(facts.topics) == 6
    assert sum(len(topic.rows) for topic in facts.topics) >= 420
    assert len(items) == facts.items == 400
    assert len({item["id"] for item in items}) == 400
    assert len({item["prompt"] for item in items}) == 400
    by_topic = Counter(item["topic"] for item in items)
    assert set(by_topic) == {topic.id for topic in facts.topics}
    assert min(by_topic.values()) >= 40


def test_choices_are_four_clean_distinct_strings(items: list[Item]) -> None:
    for item in items:
        choices = item["choices"]
        assert len(choices) == 4
        assert len({choice.casefold() for choice in choices}) == 4, item
        assert all(choice and choice == choice.strip() for choice in choices), item
        assert item["prompt"] == item["prompt"].strip()
        assert "{" not in item["prompt"]


def test_gold_is_the_answer_and_balanced(facts: Facts, items: list[Item]) -> None:
    rows = {f"{topic.id}-{n:03d}": row for topic in facts.topics for n, row in enumerate(topic.rows)}
    for item in items:
        assert 0 <= item["gold"] <= 3
        assert item["choices"][item["gold"]] == rows[item["id"]].answer
        assert rows[item["id"]].key in item["prompt"]
    assert Counter(item["gold"] for item in items) == {0: 100, 1: 100, 2: 100, 3: 100}
    for topic in facts.topics:
        golds = Counter(item["gold"] for item in items if item["topic"] == topic.id)
        assert max(golds.values()) < 0.45 * sum(golds.values()), topic.id


def test_no_distractor_is_also_right(facts: Facts, items: list[Item]) -> None:
    # By text rather than by row: two rows with the same key would lend each other right answers.
    right: dict[str, set[str]] = {}
    for topic in facts.topics:
        for row in topic.rows:
            prompt = topic.prompt.replace("{key}", row.key)
            right.setdefault(prompt, set()).update({row.answer.casefold(), *(a.casefold() for a in row.also)})
    for item in items:
        wrong = [choice for n, choice in enumerate(item["choices"]) if n != item["gold"]]
        assert not right[item["prompt"]] & {choice.casefold() for choice in wrong}, item


def test_arithmetic_is_right(items: list[Item]) -> None:
    sums = [item for item in items if item["topic"] == "arithmetic"]
    assert sums
    for item in sums:
        left, operator, right, _ = item["prompt"].split()
        value = int(left) + int(right) if operator == "+" else int(left) * int(right)
        assert [int(choice) == value for choice in item["choices"]] == [n == item["gold"] for n in range(4)]


def test_topics_are_interleaved(facts: Facts, items: list[Item]) -> None:
    topics = {topic.id for topic in facts.topics}
    assert len({item["topic"] for item in items[:20]}) >= 4
    assert {item["topic"] for item in items[:50]} == topics
    assert {item["topic"] for item in items[-50:]} == topics
    assert [item["id"] for item in items] != sorted(item["id"] for item in items)


def test_committed_items_are_fresh(items: list[Item]) -> None:
    assert make_tasks.is_fresh(items), "run `python -m stages.client.make_tasks` and commit the result"
    lines = make_tasks.ITEMS_PATH.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == items


def test_check_tells_stale_from_fresh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = write(tmp_path, MINI), tmp_path / "tasks" / "items.jsonl"
    args = ["--facts", str(source), "--out", str(out)]
    assert make_tasks.main([*args, "--check"]) == 1
    assert not out.exists()
    assert make_tasks.main(args) == 0
    assert make_tasks.main([*args, "--check"]) == 0
    out.write_text(out.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    capsys.readouterr()
    assert make_tasks.main([*args, "--check"]) == 1
    assert "does not match" in capsys.readouterr().err


def test_order_does_not_depend_on_file_order(facts: Facts) -> None:
    turned = Facts(facts.seed, facts.items, facts.topics[::-1])
    assert make_tasks.build_items(turned) == make_tasks.build_items(facts)


def test_also_right_values_and_the_key_are_barred() -> None:
    rows = (Fact("old", "young", ("New",)), *(Fact(value, value) for value in ("new", "old", "x", "y", "z")))
    topic = Topic("t", "{key}", near=False, rows=rows)
    assert sorted(make_tasks.pick_distractors(topic, rows[0], "t-000", "seed")) == ["x", "y", "z"]


def test_near_prefers_alike_values() -> None:
    values = ["bit", "went", "sold", "blew", "began", "ran", "broke"]
    words = [Fact(str(n), value) for n, value in enumerate(values)]
    topic = Topic("t", "{key}", near=True, rows=tuple(words))
    assert set(make_tasks.pick_distractors(topic, words[0], "t-000", "seed")) == {"blew", "began", "broke"}
    numbers = make_tasks.arithmetic_rows(["*"], 2, 9)
    topic = Topic("t", "{key}", near=True, rows=numbers)
    fact = next(row for row in numbers if row.key == "8 * 9")
    assert all(abs(int(d) - 72) < 20 for d in make_tasks.pick_distractors(topic, fact, "t-000", "seed"))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a: w", "a: w, a: v", "repeated keys: a"),
        ("a: w", "No: w", "not a string"),
        ("a: w", "a: 1", "not a string"),
        ("a: w", "a: []", "empty"),
        ("a: w", 'a: " w"', "spaces"),
        ("items: 4", "items: 5", "cannot give 5 items"),
        ("items: 4", "items: 0", "positive integer"),
        ("d: z", "d: w", "can be distractors"),
        ("{key} is", "key is", "exactly once"),
        ("id: pets", "id: My Pets", "malformed"),
        ("rows: {", "distractors: far\n    rows: {", "any or near"),
        (ROWS, "", "either rows or generate"),
        (ROWS, "generate: {operators: ['/'], low: 1, high: 2}", "unknown operators"),
        (ROWS, "generate: {low: 1, high: 2}", "needs operators"),
        ("seed: s", "seed: [", "not valid YAML"),
    ],
)
def test_bad_facts_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = write(tmp_path, MINI.replace(old, new))
    with pytest.raises(FactsError, match=message):
        make_tasks.build_items(make_tasks.load_facts(path))
    assert make_tasks.main(["--facts", str(path), "--out", str(tmp_path / "items.jsonl")]) == 2


def test_task_yaml_matches_the_items() -> None:
    task: dict[str, Any] = yaml.safe_load((CLIENT / "tasks" / "qp_facts.yaml").read_text(encoding="utf-8"))
    data = task["dataset_kwargs"]["data_files"][task["test_split"]]
    assert CLIENT.parents[1] / data == make_tasks.ITEMS_PATH
    expected = {
        "task": "qp_facts",
        "dataset_path": "json",
        "output_type": "multiple_choice",
        "doc_to_text": "{{prompt}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "target_delimiter": " ",
        "metadata": {"version": 1},
    }
    assert expected.items() <= task.items()
    assert [metric["metric"] for metric in task["metric_list"]] == ["acc", "acc_norm"]
    assert all(m["aggregation"] == "mean" and m["higher_is_better"] is True for m in task["metric_list"])


def test_canary_is_well_formed() -> None:
    canary: dict[str, Any] = yaml.safe_load((CLIENT / "canary.yaml").read_text(encoding="utf-8"))
    prompts: list[dict[str, Any]] = canary["prompts"]
    assert len(prompts) == 24
    assert len({entry["id"] for entry in prompts}) == len({entry["prompt"] for entry in prompts}) == 24
    for entry in prompts:
        assert set(entry) - {"known_answers"} == {"id", "prompt", "max_tokens"}
        assert isinstance(entry["prompt"], str) and entry["prompt"] == entry["prompt"].strip() != ""
        assert 16 <= entry["max_tokens"] <= 32
    known = [entry for entry in prompts if "known_answers" in entry]
    assert len(known) >= 6
    for entry in known:
        answers = entry["known_answers"]
        assert answers and all(isinstance(answer, str) and answer.strip() for answer in answers)
        # A reply that only echoes the prompt must not count as right.
        assert not any(answer.casefold() in entry["prompt"].casefold() for answer in answers), entry["id"]

"""Run lm-eval tasks against a running server, on chosen items, and score every item."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from pipeline import jsonio
from pipeline.canary import fault
from pipeline.errors import WorkError, unknown
from pipeline.evidence.answers import Answer
from pipeline.evidence.tiers import Run, choose, digest
from pipeline.program import first_line
from pipeline.serving import Server
from pipeline.specs import Task

HERE = Path("stages/client")
# What lm-eval's filters leave where they find no answer, and its own limit of generated tokens.
INVALID = ("[invalid]", "")
MAX_GEN_TOKENS = 256

Samples = dict[str, list[dict[str, Any]]]


class Answered(NamedTuple):
    """What one task gave. scores: `{item id: 0..1}`, repeats averaged. answers: of generating tasks, else empty."""

    scores: dict[str, float]
    answers: list[Answer]
    samples: list[dict[str, Any]]
    about: dict[str, Any]


class Chosen(NamedTuple):
    """The leaf tasks with the chosen items: ids by subtask and position, and how many items there were."""

    tasks: list[Any]
    ids: dict[str, dict[int, str]]
    total: int


def run_task(server: Server, run: Run, max_length: int, tokenizer: Any) -> Answered:
    """Run one task on its chosen items, `run.repeats` times each.

    Args:
        server: ready.
        run: the task, how many items and repeats.
        max_length: tokens that fit the server's context.
        tokenizer: of the model, to count truncated prompts and lengths of answers.

    Raises:
        InputError: lm-eval does not know the task, its metric or its filter.
        WorkError: the server died or stopped answering, or no item came back.
    """
    chosen = choose_items(run.task, run.items)
    passes: list[dict[str, float]] = []
    answers: list[Answer] = []
    kept: list[dict[str, Any]] = []
    truncated = 0
    chance: float | None = None
    for number in range(run.repeats):
        samples = harness(server, run.task, chosen, max_length, number)
        passes.append(item_scores(samples, run.task, chosen.ids))
        answers += generated(samples, run.task, chosen.ids, tokenizer, f"#{number}" if run.repeats > 1 else "")
        kept += [slim(row, run.task) for rows in samples.values() for row in rows]
        truncated += cut_prompts(samples, run.task, tokenizer, max_length)
        chance = chance_level(samples)
    scores = {key: sum(found[key] for found in passes) / run.repeats for key in passes[0]}
    about = {
        "lm_eval": run.task.lm_eval,
        "tier": run.task.tier,
        "repeats": run.repeats,
        "chosen": {
            "items": len(scores),
            "of": chosen.total,
            "by": "all" if len(scores) == chosen.total else "smallest SHA-256 of the item id",
            "ids_digest": digest(list(scores)),
        },
        "chance": chance,
        "truncated_prompts": truncated,
    }
    return Answered(scores, answers, kept, about)


def choose_items(task: Task, count: int | None) -> Chosen:
    """Load a task or group and choose items over all its subtasks by a hash of their ids."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(HERE / "tasks"))
    if task.lm_eval not in manager.all_tasks:
        raise unknown("lm-eval task", task.lm_eval, manager.all_tasks, "lm-eval or stages/client/tasks")
    try:
        leaves = manager.load([task.lm_eval])["tasks"]
        named = {name: item_ids(list(leaf.eval_docs)) for name, leaf in leaves.items()}
    except Exception as error:
        hint = " It needs the hub." if task.hub else ""
        raise WorkError(f"lm-eval cannot load {task.lm_eval}: {first_line(error)}.{hint}") from error
    flat = [(name, index, f"{name}/{key}") for name, keys in named.items() for index, key in enumerate(keys)]
    picked: dict[str, dict[int, str]] = {}
    for position in choose([key for _, _, key in flat], count):
        name, index, key = flat[position]
        picked.setdefault(name, {})[index] = key
    # An empty choice would make lm-eval run the whole subtask, so that subtask is left out.
    return Chosen([leaves[name] for name in picked], picked, len(flat))


def item_ids(docs: list[dict[str, Any]]) -> list[str]:
    """Return an id for each document: its own `id` where those are unique, else its position and a hash of its text."""
    own = [str(doc.get("id", "")) for doc in docs]
    if all(own) and len(set(own)) == len(own):
        return own
    texts = [json.dumps(doc, sort_keys=True, default=str) for doc in docs]
    return [f"{i}-{hashlib.sha256(text.encode()).hexdigest()[:12]}" for i, text in enumerate(texts)]


def harness(server: Server, task: Task, chosen: Chosen, max_length: int, number: int) -> Samples:
    """Run lm-eval once and return its samples by subtask; `number` seeds the sampling of a repeat."""
    from lm_eval import simple_evaluate

    options = {
        "model": server.cell.model,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": f"artifacts/models/{server.cell.model}",
        "tokenized_requests": True,
        "num_concurrent": 2,
        "max_length": max_length,
        "timeout": 300,
        "max_retries": 2,
        "seed": 1234 + number,
    }
    sampling = {"do_sample": True, "temperature": task.temperature} if task.temperature else None
    try:
        done = simple_evaluate(
            model="local-completions", model_args=options, tasks=list(chosen.tasks), batch_size=64,
            samples={name: sorted(ids) for name, ids in chosen.ids.items()}, num_fewshot=task.num_fewshot,
            gen_kwargs=sampling, log_samples=True, bootstrap_iters=0,
            random_seed=0, numpy_random_seed=0, torch_random_seed=0, fewshot_random_seed=0,
        )  # fmt: skip
    except Exception as error:
        time.sleep(1.0)
        server.check_alive(f"during {task.lm_eval}")
        raise WorkError(f"lm-eval stopped in {task.lm_eval}: {first_line(error)}; server log {server.log}.") from error
    samples: Samples = dict(done["samples"]) if done else {}
    if not any(samples.values()):
        raise WorkError(f"lm-eval gave no samples for {task.lm_eval}.")
    return samples


def filtered(rows: list[dict[str, Any]], task: Task, subtask: str) -> list[dict[str, Any]]:
    """Return the rows of the task's filter; an InputError names the filters there are."""
    chosen = [row for row in rows if row.get("filter", "none") == task.filter]
    if rows and not chosen:
        raise unknown("filter", task.filter, {r.get("filter", "none") for r in rows}, f"lm-eval task {subtask}")
    return chosen


def item_scores(samples: Samples, task: Task, ids: dict[str, dict[int, str]]) -> dict[str, float]:
    """Return `{subtask/item: score}` of the task's metric and filter.

    Raises:
        InputError: the samples have no such metric or filter; what they have is named.
        WorkError: an item is missing, unasked or came twice, so that pairing would be wrong.
    """
    scores: dict[str, float] = {}
    for subtask, rows in samples.items():
        for row in filtered(rows, task, subtask):
            if task.metric not in row:
                raise unknown("metric", task.metric, row.get("metrics") or row, f"lm-eval task {subtask}")
            key = ids.get(subtask, {}).get(row["doc_id"])
            if key is None or key in scores:
                raise WorkError(f"lm-eval gave item {row['doc_id']} of {subtask} twice or unasked.")
            scores[key] = float(row[task.metric])
    asked = sum(map(len, ids.values()))
    if len(scores) != asked:
        raise WorkError(f"lm-eval answered {len(scores)} of the {asked} items of {task.lm_eval}.")
    return scores


def generated(
    samples: Samples, task: Task, ids: dict[str, dict[int, str]], tokenizer: Any, suffix: str
) -> list[Answer]:
    """Return the answers of a generating task with their lengths in tokens; none of a multiple-choice task."""
    found = []
    for subtask, rows in samples.items():
        for row in filtered(rows, task, subtask):
            settings = row["arguments"][0][-1] if row.get("arguments") else None
            if not isinstance(settings, dict):
                continue
            text = str(row["resps"][0][0])
            tokens = len(tokenizer.encode(text, add_special_tokens=False))
            reason = fault(text.strip()) or ""
            found.append(
                Answer(
                    id=ids[subtask][row["doc_id"]] + suffix,
                    tokens=tokens,
                    cut=tokens >= int(settings.get("max_gen_toks", MAX_GEN_TOKENS)),
                    empty=reason == "empty",
                    repeated=reason.startswith("repeated"),
                    unparsable=str(row["filtered_resps"][0]).strip() in INVALID,
                )
            )
    return found


def cut_prompts(samples: Samples, task: Task, tokenizer: Any, max_length: int) -> int:
    """Return how many items have a prompt that lm-eval cut from the left to fit the context."""
    count = 0
    for subtask, rows in samples.items():
        for row in filtered(rows, task, subtask):
            longest = 0
            for argument in row.get("arguments", []):
                prompt, last = str(argument[0]), argument[-1]
                room = int(last.get("max_gen_toks", MAX_GEN_TOKENS)) if isinstance(last, dict) else 0
                text = prompt if isinstance(last, dict) else prompt + str(last)
                # A token is at least one byte, so a text with fewer bytes than fit needs no tokenizer.
                if len(text.encode()) + room > max_length:
                    longest = max(longest, len(tokenizer.encode(text, add_special_tokens=False)) + room)
            count += longest > max_length
    return count


def chance_level(samples: Samples) -> float | None:
    """Return the accuracy of a guess in a multiple-choice task, the mean of 1 / choices; None of any other task."""
    rows = [row for rows in samples.values() for row in rows]
    sizes = [len(row["arguments"]) for row in rows if len(row.get("arguments", [])) > 1]
    return sum(1 / size for size in sizes) / len(sizes) if sizes and len(sizes) == len(rows) else None


def slim(sample: dict[str, Any], task: Task) -> dict[str, Any]:
    """Keep what a reader needs to check an item: the document, its score, the filtered answers, the text generated."""
    kept = {key: sample[key] for key in ("doc_id", "doc", "target", task.metric, "filtered_resps") if key in sample}
    if sample.get("arguments") and isinstance(sample["arguments"][0][-1], dict):
        kept["resps"] = sample["resps"]
    return dict(json.loads(json.dumps(kept, default=str)))


def context_length(server: Server) -> int:
    """Return the tokens that a prompt and its answer may have together, from the package's serve.yaml."""
    serve = yaml.safe_load((server.cell.deploy / "serve.yaml").read_text(encoding="utf-8"))
    plan = server.cell.deploy / "plan.json"  # of TensorRT-LLM, whose engines have their length from the build
    if plan.is_file():
        serve = {entry["name"]: entry["value"] for entry in jsonio.read_json(plan)["serving"]}
    return int(serve.get("max-model-len") or serve.get("max_seq_len") or 2048) - 1


def scores_prompts(task: Task) -> bool:
    """Say whether a task reads log-probabilities of its prompts (multiple choice, perplexity) rather than an answer.

    Raises:
        InputError: lm-eval does not know the task.
    """
    leaves = choose_items(task, 1).tasks
    return any(str(leaf.OUTPUT_TYPE or leaf.config.output_type) != "generate_until" for leaf in leaves)

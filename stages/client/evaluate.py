"""Evaluate one cell on its own server: coherence canary, token fidelity against the baseline, lm-eval tasks."""

from __future__ import annotations

import concurrent.futures
import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline import fidelity, host, jsonio
from pipeline.canary import judge
from pipeline.errors import InputError, WorkError, unknown
from pipeline.fidelity import Logprobs
from pipeline.making import arguments
from pipeline.package import Cell
from pipeline.paired import compare_items
from pipeline.params import load_params
from pipeline.program import first_line, lock_sha256, run_main, versions
from pipeline.serving import Server
from pipeline.specs import Params, Task

HERE = Path("stages/client")
WINDOWS_IN_FLIGHT = 4


def main() -> None:
    """Evaluate the cell named by --model --recipe --runtime --target."""
    args = arguments("model", "recipe", "runtime", "target")
    cell = Cell(args.model, args.recipe, args.runtime, args.target)
    params = load_params()
    cell.check(params)
    baseline = Cell(cell.model, params.baseline, cell.runtime, cell.target)
    raw = Path("artifacts/raw") / cell.name / "eval"
    reference = None if cell == baseline else Path("artifacts/raw") / baseline.name / "eval/reference"
    if reference and not reference.is_dir():
        raise InputError(f"{reference} is missing. Run `uv run dvc repro evaluate@{baseline.name}` first.")
    scratch = Path(".quantpress/scratch") / f"eval.{cell.name}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    start = time.monotonic()
    with Server(cell, params, scratch / "server.log", threads=host.usable_cores()) as server:
        # The harness takes ten seconds to import; the server starts meanwhile.
        import lm_eval  # noqa: F401

        server.wait_ready()
        print(f"server ready after {server.startup_s} s", flush=True)
        canary = run_canary(server)
        print(f"{time.monotonic() - start:.0f} s  canary: {'passed' if canary['passed'] else 'FAILED'}", flush=True)
        token_level = run_fidelity(server, cell, params, reference, scratch)
        numbers = f"perplexity {token_level['perplexity']:.3f}, KL {token_level['kl_mean']}"
        print(f"{time.monotonic() - start:.0f} s  fidelity: {numbers}", flush=True)
        tasks, not_run = run_tasks(server, cell, params, reference, scratch)
        server.check_alive("during the tasks")
        facts = server.facts()
    facts["log"] = (raw / "server.log").as_posix()
    record = {
        "schema": "quantpress.eval/1",
        "cell": cell.name,
        **cell._asdict(),
        "baseline": None if cell == baseline else baseline.name,
        "package_digest": jsonio.read_json(cell.deploy / "manifest.json")["checkpoint"]["digest"],
        "server": facts,
        "host": host.fingerprint(),
        "load_average": host.load_average(),
        "versions": versions("lm-eval", "transformers"),
        "locks": {env: lock_sha256(env) for env in ("client", str(facts["environment"]))},
        "git_commit": host.git_commit(),
        "remote_code": params.models[cell.model].trust_remote_code,
        "canary": canary,
        "tasks": tasks,
        "not_run": not_run,
        "fidelity": token_level,
        "finished_at": host.now(),
        "wall_s": round(time.monotonic() - start, 1),
    }
    shutil.rmtree(raw, ignore_errors=True)
    raw.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(scratch, raw)
    jsonio.write_json(Path("artifacts/results") / cell.name / "eval.json", record)
    print(json.dumps({"cell": cell.name, "canary": canary["passed"], "wall_s": record["wall_s"]}), flush=True)


def run_canary(server: Server) -> dict[str, Any]:
    """Ask the fixed prompts greedily through the chat API and judge the answers."""
    prompts = yaml.safe_load((HERE / "canary.yaml").read_text(encoding="utf-8"))["prompts"]

    def ask(prompt: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": server.cell.model,
            "messages": [{"role": "user", "content": prompt["prompt"]}],
            "max_tokens": prompt["max_tokens"],
            "temperature": 0,
        }
        choice = server.request("/v1/chat/completions", body)["choices"][0]
        return {"text": choice["message"]["content"] or "", "finish_reason": choice["finish_reason"]}

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return judge(prompts, list(pool.map(ask, prompts)))


def run_fidelity(server: Server, cell: Cell, params: Params, reference: Path | None, scratch: Path) -> dict[str, Any]:
    """Read the held-out windows through the server and compare with the baseline's stored distributions."""
    held_out = Path("calib_data") / f"{params.evaluation.held_out}.{cell.model}" / "tokens.json"
    rows: list[list[int]] = jsonio.read_json(held_out)["input_ids"]
    k = params.evaluation.top_k

    def read(row: list[int]) -> list[dict[str, Any] | None]:
        body = {"model": cell.model, "prompt": row, "max_tokens": 1, "temperature": 0, "prompt_logprobs": k}
        return list(server.request("/v1/completions", body)["choices"][0]["prompt_logprobs"])

    with concurrent.futures.ThreadPoolExecutor(WINDOWS_IN_FLIGHT) as pool:
        answers = list(pool.map(read, rows))
    mine = to_arrays(rows, answers, k)
    (scratch / "reference").mkdir()
    np.savez_compressed(scratch / "reference/logprobs.npz", **mine._asdict())
    theirs = None
    if reference:
        with np.load(reference / "logprobs.npz", allow_pickle=False) as stored:
            theirs = Logprobs(**{name: stored[name] for name in Logprobs._fields})
    return fidelity.summarize(theirs, mine, k)


def to_arrays(rows: list[list[int]], answers: list[list[dict[str, Any] | None]], k: int) -> Logprobs:
    """Turn the servers' answers into arrays; the first position of a window has no prediction."""
    ids, logprobs, actual, window = [], [], [], []
    for number, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        if len(answer) != len(row):
            raise WorkError(f"Held-out window {number} has {len(row)} tokens and the server scored {len(answer)}.")
        for token, entry in zip(row[1:], answer[1:], strict=True):
            if not entry or str(token) not in entry:
                raise WorkError(f"The server gave no log-probability for a token of held-out window {number}.")
            # The text's own token comes besides the k best ones, so it is dropped unless it is one of them.
            ranked = sorted(entry.items(), key=lambda item: item[1]["rank"])[:k]
            ids.append([int(key) for key, _ in ranked])
            logprobs.append([value["logprob"] for _, value in ranked])
            actual.append(entry[str(token)]["logprob"])
            window.append(number)
    return Logprobs(np.array(ids), np.array(logprobs, dtype=float), np.array(actual, dtype=float), np.array(window))


def run_tasks(
    server: Server, cell: Cell, params: Params, reference: Path | None, scratch: Path
) -> tuple[dict[str, Any], dict[str, str]]:
    """Run the tasks with lm-eval, keep every sample, and pair them with the baseline's by item."""
    found: dict[str, Any] = {}
    not_run: dict[str, str] = {}
    for name, task in params.tasks.items():
        if name not in params.evaluation.tasks:
            reason = "needs data from the hub; " if task.hub else ""
            not_run[name] = f"not measured ({reason}add it to evaluation.tasks in params.yaml to run it)"
            continue
        samples = harness(server, cell, task)
        scores = item_scores(samples, task)
        lines = "".join(json.dumps(_slim(s)) + "\n" for rows in samples.values() for s in rows)
        jsonio.write_text(scratch / f"samples.{name}.jsonl", lines)
        jsonio.write_json(scratch / "reference" / f"scores.{name}.json", scores)
        theirs = jsonio.read_json(reference / f"scores.{name}.json") if reference else None
        found[name] = {"lm_eval": task.lm_eval, **compare_items(theirs, scores)}
        print(f"{name}: accuracy {found[name]['accuracy']:.3f} of {len(scores)}", flush=True)
    return found, not_run


def item_scores(samples: dict[str, list[dict[str, Any]]], task: Task) -> dict[str, float]:
    """Return `{subtask/item: score}` of the task's metric and filter.

    Raises:
        InputError: the samples have no such metric or filter; what they have is named.
        WorkError: two items have one key, so that pairing would be wrong.
    """
    scores: dict[str, float] = {}
    for subtask, rows in samples.items():
        chosen = [r for r in rows if r.get("filter", "none") == task.filter]
        if not chosen:
            raise unknown("filter", task.filter, {r.get("filter", "none") for r in rows}, f"lm-eval task {subtask}")
        for row in chosen:
            if task.metric not in row:
                raise unknown("metric", task.metric, row.get("metrics") or row, f"lm-eval task {subtask}")
            key = f"{subtask}/{row['doc'].get('id', row['doc_id'])}"
            if key in scores:
                raise WorkError(f"lm-eval gave item {key} twice; items cannot be paired.")
            scores[key] = float(row[task.metric])
    return scores


def harness(server: Server, cell: Cell, task: Task) -> dict[str, list[dict[str, Any]]]:
    """Run one lm-eval task or group against the server and return its samples by subtask.

    Raises:
        InputError: lm-eval does not know the task.
        WorkError: the server died or stopped answering, or no item came back.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(HERE / "tasks"))
    if task.lm_eval not in manager.all_tasks:
        raise unknown("lm-eval task", task.lm_eval, manager.all_tasks, "lm-eval or stages/client/tasks")
    serve = yaml.safe_load((cell.deploy / "serve.yaml").read_text(encoding="utf-8"))
    options = {
        "model": cell.model,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": f"artifacts/models/{cell.model}",
        "tokenized_requests": True,
        "num_concurrent": 2,
        "max_length": int(serve.get("max-model-len", 2048)) - 1,
        "timeout": 300,
        "max_retries": 2,
    }
    try:
        done = simple_evaluate(
            model="local-completions", model_args=options, tasks=[task.lm_eval], task_manager=manager, batch_size=64,
            limit=task.limit, num_fewshot=task.num_fewshot, log_samples=True, bootstrap_iters=0,
            random_seed=0, numpy_random_seed=0, torch_random_seed=0, fewshot_random_seed=0,
        )  # fmt: skip
    except Exception as error:
        time.sleep(1.0)
        server.check_alive(f"during {task.lm_eval}")
        raise WorkError(f"lm-eval stopped in {task.lm_eval}: {first_line(error)}; server log {server.log}.") from error
    samples: dict[str, list[dict[str, Any]]] = dict(done["samples"]) if done else {}
    if not any(samples.values()):
        raise WorkError(f"lm-eval gave no samples for {task.lm_eval}.")
    return samples


def _slim(sample: dict[str, Any]) -> dict[str, Any]:
    """Keep what a reader needs to check an item: the document, its score, the log-likelihoods of the choices."""
    kept = {
        key: sample[key] for key in ("doc_id", "doc", "target", "acc", "exact_match", "filtered_resps") if key in sample
    }
    return dict(json.loads(json.dumps(kept, default=str)))


if __name__ == "__main__":
    run_main(main)

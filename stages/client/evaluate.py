"""Evaluate one cell on its own server: coherence canary, token fidelity against the baseline, lm-eval tasks."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline import fidelity, host, jsonio
from pipeline.canary import judge
from pipeline.errors import InputError, WorkError
from pipeline.fidelity import Logprobs
from pipeline.making import arguments
from pipeline.package import Cell
from pipeline.paired import compare_items
from pipeline.program import lock_sha256, run_main, versions
from pipeline.serving import Server
from pipeline.specs import Params, load_params

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
    reference = None if cell == baseline else Path("artifacts/raw") / baseline.name / "eval"
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
    np.savez_compressed(scratch / "logprobs.npz", **mine._asdict())
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
        samples = harness(server, cell, task.lm_eval, task.limit, task.num_fewshot)
        scores = {str(s["doc"].get("id", s["doc_id"])): float(s["acc"]) for s in samples}
        lines = "".join(json.dumps(_slim(s)) + "\n" for s in samples)
        jsonio.write_text(scratch / f"samples.{name}.jsonl", lines)
        jsonio.write_json(scratch / f"scores.{name}.json", scores)
        theirs = jsonio.read_json(reference / f"scores.{name}.json") if reference else None
        found[name] = {"lm_eval": task.lm_eval, **compare_items(theirs, scores)}
        print(f"{name}: accuracy {found[name]['accuracy']:.3f} of {len(scores)}", flush=True)
    return found, not_run


def harness(server: Server, cell: Cell, task: str, limit: int | None, num_fewshot: int | None) -> list[dict[str, Any]]:
    """Run one lm-eval task against the server and return its per-item samples.

    Raises:
        InputError: lm-eval does not know the task.
        WorkError: fewer items came back than were asked.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(HERE / "tasks"))
    if task not in manager.all_tasks:
        from pipeline.errors import unknown

        raise unknown("lm-eval task", task, manager.all_tasks, "lm-eval or stages/client/tasks")
    options = {
        "model": cell.model,
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": f"artifacts/models/{cell.model}",
        "tokenized_requests": True,
        "num_concurrent": 2,
        "max_length": 2047,
        "timeout": 300,
        "max_retries": 2,
    }
    done = simple_evaluate(
        model="local-completions", model_args=options, tasks=[task], task_manager=manager, batch_size=64,
        limit=limit, num_fewshot=num_fewshot, log_samples=True, bootstrap_iters=0,
        random_seed=0, numpy_random_seed=0, torch_random_seed=0, fewshot_random_seed=0,
    )  # fmt: skip
    samples = [s for rows in done["samples"].values() for s in rows] if done else []
    if not samples:
        raise WorkError(f"lm-eval gave no samples for {task}.")
    return samples


def _slim(sample: dict[str, Any]) -> dict[str, Any]:
    """Keep what a reader needs to check an item: the document, its score, the log-likelihoods of the choices."""
    kept = {key: sample[key] for key in ("doc_id", "doc", "target", "acc", "filtered_resps") if key in sample}
    return json.loads(json.dumps(kept, default=str))


if __name__ == "__main__":
    os.environ |= {"HF_DATASETS_OFFLINE": os.environ.get("HF_DATASETS_OFFLINE", "0")}
    run_main(main)

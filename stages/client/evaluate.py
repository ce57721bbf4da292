"""Evaluate one cell on its own server: coherence canary, token fidelity against the baseline, tasks, noise floor."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline import fidelity, host, jsonio
from pipeline.canary import judge, of_canary
from pipeline.errors import InputError, WorkError
from pipeline.evidence.answers import Answer, compare_answers
from pipeline.evidence.tiers import TIERS, Run, choose, runs
from pipeline.fidelity import Logprobs
from pipeline.making import arguments
from pipeline.package import Cell
from pipeline.paired import compare_items
from pipeline.params import load_params
from pipeline.program import lock_hashes, run_main, versions
from pipeline.serving import Server, no_prompt_logprobs
from pipeline.shapes import SPEED_ONLY, is_random
from pipeline.specs import Params
from stages.client.asking import ask_canary, canary_prompts, held_out_rows, read_windows
from stages.client.harness import Answered, context_length, run_task, scores_prompts

SCHEMA = "quantpress.eval/2"


class Evaluation:
    """One evaluation of one cell; `reference` is the baseline's folder, None when the cell is the baseline."""

    def __init__(self, server: Server, params: Params, reference: Path | None, scratch: Path) -> None:
        """Remember what every part needs and read what the parts share."""
        self.server, self.params, self.reference = server, params, reference
        self.keep = scratch / "reference"
        self.scratch = scratch
        self.keep.mkdir()
        self.level = TIERS.index(params.evaluation.tier)
        self.no_logprobs = no_prompt_logprobs(server.cell.runtime)
        self.start = time.monotonic()
        self.texts: list[str] = []
        self.logprobs: Logprobs | None = None
        self.answered: dict[str, Answered] = {}

    def say(self, text: str) -> None:
        """Print a line with the time since the start."""
        print(f"{time.monotonic() - self.start:.0f} s  {text}", flush=True)

    def canary(self) -> dict[str, Any]:
        """Ask the fixed prompts and judge the answers."""
        prompts = canary_prompts()
        answers = ask_canary(self.server, prompts)
        self.texts = [a["text"] for a in answers]
        jsonio.write_json(self.keep / "answers.canary.json", [a._asdict() for a in of_canary(prompts, answers)])
        found = self.pair(lambda: judge(prompts, answers, self.their_answers("canary")))
        self.say(f"canary: {'passed' if found['passed'] else 'FAILED'}")
        return found

    def their_answers(self, name: str) -> list[Answer] | None:
        """Return the baseline's answers of the canary or a task, or None for the baseline itself."""
        if self.reference is None:
            return None
        path = self.reference / f"answers.{name}.json"
        if not path.is_file():
            raise WorkError(f"{path} is missing. {self.again()}")
        return [Answer(**row) for row in jsonio.read_json(path)]

    def again(self) -> str:
        """Return the advice for a baseline whose reference does not fit."""
        cell = self.server.cell
        baseline = ".".join((cell.model, self.params.baseline, cell.runtime, cell.target))
        return f"Evaluate the baseline again: `uv run dvc repro -f evaluate@{baseline}`."

    def pair(self, compare: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return what `compare` gives; items that cannot be paired end in one sentence."""
        try:
            return compare()
        except ValueError as error:
            raise WorkError(f"{self.server.cell.name}: {error}. {self.again()}") from None

    def fidelity(self) -> dict[str, Any] | None:
        """Read the held-out windows and compare with the baseline's stored distributions."""
        if self.level < TIERS.index("fidelity") or self.no_logprobs:
            return None
        rows, k = held_out_rows(self.params, self.server.cell.model), self.params.evaluation.top_k
        mine = read_windows(self.server, rows, list(range(len(rows))), k)
        np.savez_compressed(self.keep / "logprobs.npz", **mine._asdict())
        self.logprobs = mine
        theirs = None
        if self.reference:
            with np.load(self.reference / "logprobs.npz", allow_pickle=False) as stored:
                theirs = Logprobs(**{name: stored[name] for name in Logprobs._fields})
        found = self.pair(lambda: fidelity.summarize(theirs, mine, k))
        self.say(f"fidelity: perplexity {found['perplexity']:.3f}, KL {found['kl_mean']}")
        return found

    def tasks(self) -> tuple[dict[str, Any], dict[str, str]]:
        """Run the tasks of the tier, keep every sample, and pair them with the baseline's by item."""
        cell = self.server.cell
        serve = yaml.safe_load((cell.deploy / "serve.yaml").read_text(encoding="utf-8"))
        chosen, not_run = runs(self.params, self.params.recipes[cell.recipe], serve)
        if self.no_logprobs:
            not_run["fidelity"] = self.no_logprobs
            not_run |= {name: self.no_logprobs for name, run in chosen.items() if scores_prompts(run.task)}
            chosen = {name: run for name, run in chosen.items() if name not in not_run}
        found = {name: self.task(name, run) for name, run in chosen.items()}
        return found, not_run

    def task(self, name: str, run: Run) -> dict[str, Any]:
        """Run one task and compare it with the baseline's scores and answers."""
        done = run_task(self.server, run, context_length(self.server), self.tokenizer())
        self.answered[name] = done
        jsonio.write_text(self.scratch / f"samples.{name}.jsonl", "".join(json.dumps(s) + "\n" for s in done.samples))
        jsonio.write_json(self.keep / f"scores.{name}.json", done.scores)
        jsonio.write_json(self.keep / f"answers.{name}.json", [a._asdict() for a in done.answers])
        theirs = jsonio.read_json(self.reference / f"scores.{name}.json") if self.reference else None
        answers = None
        if done.answers:
            answers = self.pair(lambda: compare_answers(self.their_answers(name), done.answers))
        found = done.about | self.pair(lambda: compare_items(theirs, done.scores)) | {"answers": answers}
        self.say(f"{name}: accuracy {found['accuracy']:.3f} of {found['n']} items")
        return found

    def tokenizer(self) -> Any:
        """Return the model's tokenizer."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(f"artifacts/models/{self.server.cell.model}", local_files_only=True)

    def noise_floor(self) -> dict[str, Any] | None:
        """Answer a share of everything a second time on the same server and compare the run with itself.

        Only for the baseline. The share is chosen by the same hash, so it is a part of what was answered first. How
        requests are batched differs from run to run, and with it the order of additions: that is the noise.
        """
        share = self.params.evaluation.noise_floor
        if self.reference is not None or share is None:
            return None
        prompts = canary_prompts()
        again = [a["text"] for a in ask_canary(self.server, prompts)]
        changed = sum(a != b for a, b in zip(self.texts, again, strict=True))
        found: dict[str, Any] = {
            "how": "the baseline answered a part of the same items and windows twice on the same server",
            "canary": {"prompts": len(prompts), "answers_changed": changed},
            "fidelity": None,
            "tasks": {},
        }
        if self.logprobs is not None:
            found["fidelity"] = self.fidelity_again(share.windows)
        for name, first in self.answered.items():
            task = self.params.tasks[name]
            items = min(share.items, len(first.scores))
            second = run_task(self.server, Run(task, items, 1), context_length(self.server), self.tokenizer())
            same = {key: first.scores[key] for key in second.scores}
            found["tasks"][name] = self.pair(lambda s=same, t=second: compare_items(s, t.scores))
        self.say(f"noise floor: {changed} of {len(prompts)} canary answers changed")
        return found

    def fidelity_again(self, windows: int) -> dict[str, Any]:
        """Read some of the windows again and compare them with the first reading."""
        assert self.logprobs is not None
        rows, k = held_out_rows(self.params, self.server.cell.model), self.params.evaluation.top_k
        numbers = choose([f"window {i}" for i in range(len(rows))], windows)
        part = np.isin(self.logprobs.window, numbers)
        first = Logprobs(*(values[part] for values in self.logprobs))
        return self.pair(lambda: fidelity.summarize(first, read_windows(self.server, rows, numbers, k), k))


def main() -> None:
    """Evaluate the cell named by --model --recipe --runtime --target."""
    args = arguments("model", "recipe", "runtime", "target")
    cell = Cell(args.model, args.recipe, args.runtime, args.target)
    params = load_params()
    cell.check(params)
    if is_random(params.models[cell.model].source):
        raise InputError(f"{cell.model} has {SPEED_ONLY}; its quality says nothing. Use its benchmark stage only.")
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
        run = Evaluation(server, params, reference, scratch)
        measured: dict[str, Any] = {"canary": run.canary(), "fidelity": run.fidelity()}
        measured["tasks"], measured["not_run"] = run.tasks()
        measured["noise_floor"] = run.noise_floor()
        server.check_alive("during the tasks")
        facts = server.facts()
    facts["log"] = (raw / "server.log").as_posix()
    record = {
        "schema": SCHEMA,
        "cell": cell.name,
        **cell._asdict(),
        "baseline": None if cell == baseline else baseline.name,
        "package_digest": jsonio.read_json(cell.deploy / "manifest.json")["checkpoint"]["digest"],
        "server": facts,
        "host": host.fingerprint(),
        "load_average": host.load_average(),
        "versions": versions("lm-eval", "transformers"),
        "locks": lock_hashes("client", facts["environment"]),
        "git_commit": host.git_commit(),
        "remote_code": params.models[cell.model].trust_remote_code,
        "tier": params.evaluation.tier,
        **measured,
        "finished_at": host.now(),
        "wall_s": round(time.monotonic() - start, 1),
    }
    shutil.rmtree(raw, ignore_errors=True)
    raw.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(scratch, raw)
    jsonio.write_json(Path("artifacts/results") / cell.name / "eval.json", record)
    passed = measured["canary"]["passed"]
    print(json.dumps({"cell": cell.name, "canary": passed, "wall_s": record["wall_s"]}), flush=True)


if __name__ == "__main__":
    run_main(main)

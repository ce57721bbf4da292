"""The real lm-eval against a stand-in server: chosen items, repeats, lengths and faults of answers, truncation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.stages
GEN = """
task: qp_gen
dataset_path: json
dataset_kwargs: {data_files: {test: stages/client/tasks/facts.jsonl}}
test_split: test
output_type: generate_until
num_fewshot: 0
doc_to_text: "{{prompt}}"
doc_to_target: "{{gold}}"
generation_kwargs: {until: ["ZZ"], max_gen_toks: 16}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
filter_list:
  - name: flex
    filter: [{function: regex, regex_pattern: "(-?[0-9]+)"}, {function: take_first}]
"""
CODE = r"""
import json, sys, types, urllib.request
from pathlib import Path
sys.path.insert(0, "tests/stages")
import loopback
from pipeline.evidence.tiers import Run
from pipeline.specs import Task
from pipeline.package import Cell
from pipeline.params import load_params
from stages.client.evaluate import Evaluation
from stages.client.harness import run_task
from transformers import AutoTokenizer
cell = types.SimpleNamespace(model="smollm2-135m")
server = types.SimpleNamespace(url=loopback.start(), cell=cell, log="server.log", check_alive=lambda when: None)
tokenizer = AutoTokenizer.from_pretrained("artifacts/models/smollm2-135m", local_files_only=True)
def run(items, times=1, length=2047, **task):
    try:
        done = run_task(server, Run(Task(**task), items, times), length, tokenizer)
    except Exception as error:
        return str(error)
    return {"scores": done.scores, "about": done.about, "answers": [a._asdict() for a in done.answers],
            "samples": len(done.samples)}
gen = {"lm_eval": "qp_gen", "metric": "exact_match", "filter": "flex", "repeats": 2, "temperature": 0.7}
found = {
    "fifty": run(50, lm_eval="qp_facts"),
    "twenty": run(20, lm_eval="qp_facts"),
    "long": run(3, length=1000, lm_eval="qp_long"),
    "generated": run(8, 2, **gen),
    "task": run(5, lm_eval="qp_fact"),
    "metric": run(5, lm_eval="qp_facts", metric="acx"),
    "filter": run(5, lm_eval="qp_facts", filter="x"),
}
def request(path, body):
    sent = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(sent))
params = load_params()
facts = params.tasks["facts"].model_copy(update={"smoke_items": 120})
params = params.model_copy(update={"tasks": params.tasks | {"facts": facts}})
def evaluate(recipe, reference, salt="", template=0):
    loopback.SALT.update(model=salt, template=template)
    cell, scratch = Cell("smollm2-135m", recipe, "vllm", "cpu"), Path(".quantpress/try") / f"{recipe}{salt}{template}"
    scratch.mkdir(parents=True)
    cell.deploy.mkdir(parents=True, exist_ok=True)
    (cell.deploy / "serve.yaml").write_text("max-model-len: 2048\n")
    stand_in = types.SimpleNamespace(**vars(server) | {"cell": cell, "request": request})
    run = Evaluation(stand_in, params, reference, scratch)
    try:
        made = {"canary": run.canary(), "fidelity": run.fidelity()}
        made["tasks"], made["not_run"] = run.tasks()
        return made | {"noise_floor": run.noise_floor()}
    except Exception as error:
        return str(error)
found["baseline"] = evaluate("bf16", None)
reference = Path(".quantpress/try/bf160/reference")
found["candidate"] = evaluate("int8", reference, "other")
found["swapped"] = evaluate("int8", reference, "other", 3)
(reference / "scores.facts.json").write_text('{"qp_facts/X": 1.0}')
found["unlike"] = evaluate("int8", reference, "unlike")
sent = [x for x in loopback.Handler.seen if x.get("temperature") == 0.7]
print("FOUND" + json.dumps(found | {"seeds": sorted({x["seed"] for x in sent})}))
"""


@pytest.fixture(scope="module")
def found(workspace: Any, fetched: Path) -> dict[str, Any]:
    """What the cases gave, run once in the client's environment."""
    (workspace.path / "stages/client/tasks/gen.yaml").write_text(GEN, encoding="utf-8")
    ask = "from pipeline.runstage import env_python; print(env_python('client'))"
    python = subprocess.run(
        [sys.executable, "-c", ask], cwd=workspace.path, capture_output=True, text=True, check=True
    ).stdout.splitlines()[-1]
    try:
        done = subprocess.run([python, "-c", CODE], cwd=workspace.path, capture_output=True, text=True, timeout=600)
    finally:
        (workspace.path / "stages/client/tasks/gen.yaml").unlink()
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.split("FOUND")[1]))


def test_the_smaller_choice_is_a_part_of_the_larger_and_scores_the_same(found: dict[str, Any]) -> None:
    fifty, twenty = found["fifty"], found["twenty"]
    assert len(fifty["scores"]) == 50
    assert twenty["scores"].items() <= fifty["scores"].items()
    assert fifty["about"]["chosen"] | {"ids_digest": ""} == {
        "items": 50, "of": 400, "by": "smallest SHA-256 of the item id", "ids_digest": "",
    }  # fmt: skip
    assert fifty["about"]["chance"] == 0.25
    assert fifty["about"]["truncated_prompts"] == 0


def test_prompts_that_do_not_fit_are_counted(found: dict[str, Any]) -> None:
    assert found["long"]["about"]["truncated_prompts"] == 3


def test_repeats_are_sampled_with_their_own_seeds_and_answers_are_described(found: dict[str, Any]) -> None:
    done = found["generated"]
    assert len(done["answers"]) == 16
    assert len(done["scores"]) == 8
    assert found["seeds"] == [1234, 1235]
    assert sum(a["empty"] for a in done["answers"]) == 2
    assert sum(a["repeated"] and a["cut"] for a in done["answers"]) == 2
    assert sum(a["unparsable"] for a in done["answers"]) == 4
    assert done["about"]["chance"] is None


def test_the_baseline_answers_a_hashed_part_twice_and_the_candidate_is_paired_with_it(found: dict[str, Any]) -> None:
    base, mine = found["baseline"], found["candidate"]
    floor = base["noise_floor"]
    assert (floor["tasks"]["facts"]["n"], floor["fidelity"]["windows"]) == (100, 16)
    assert (
        floor["tasks"]["facts"]["flips_pct"] == floor["fidelity"]["kl_max"] == floor["canary"]["answers_changed"] == 0
    )
    assert mine["noise_floor"] is None
    task = mine["tasks"]["facts"]
    assert task["n"] == 120
    assert task["baseline_accuracy"] == base["tasks"]["facts"]["accuracy"]
    assert task["flips_right_to_wrong"] > 5
    assert mine["fidelity"]["perplexity_ratio"] != 1
    assert mine["fidelity"]["kl_mean_se"] is not None
    assert mine["canary"]["lengths"]["length_ratio"] == 1


def test_a_swapped_template_fails_the_canary_and_other_items_are_one_sentence(found: dict[str, Any]) -> None:
    assert found["swapped"]["canary"]["failures"][0]["id"] == "template"
    assert found["unlike"] == (
        "smollm2-135m.int8.vllm.cpu: baseline and candidate answered different items: 121 differ, first qp_facts/X. "
        "Evaluate the baseline again: `uv run dvc repro -f evaluate@smollm2-135m.bf16.vllm.cpu`."
    )


def test_wrong_names_are_told_with_the_nearest(found: dict[str, Any]) -> None:
    assert "Did you mean 'qp_facts'?" in found["task"]
    assert "Did you mean 'acc'?" in found["metric"]
    assert "no filter 'x'" in found["filter"]

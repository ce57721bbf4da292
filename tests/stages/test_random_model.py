"""Random weights of a published shape: the same for the same seed, loadable, words only, marked everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Workspace

pytestmark = pytest.mark.stages
LOAD = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype="auto")
ids = model.generate(torch.tensor([[100, 200, 300]]), max_new_tokens=8, do_sample=False)[0, 3:].tolist()
head = model.lm_head.weight
print(json.dumps({"ids": ids, "std": float(head[head.any(dim=1)].float().std()), "rows": int(head.any(dim=1).sum())}))
"""


@pytest.fixture(scope="module")
def made(workspace: Workspace, fetched: Path) -> dict[str, dict[str, Any]]:
    """Three tiny models: two of one seed, one of another."""

    def add(raw: dict[str, Any]) -> None:
        for name, seed in (("tiny-a", 3), ("tiny-b", 3), ("tiny-c", 4)):
            raw["models"][name] = {
                "source": f"random:tiny-llama@{seed}", "tokenizer_of": "smollm2-135m", "instruct": False,
            }  # fmt: skip

    workspace.edit(add)
    found = {}
    for name in ("tiny-a", "tiny-b", "tiny-c"):
        workspace.run("pipeline", "run", "source", "fetch", "--model", name)
        found[name] = json.loads((workspace.path / f"artifacts/results/{name}/model.json").read_text(encoding="utf-8"))
    return found


def test_the_seed_decides_every_weight(made: dict[str, dict[str, Any]]) -> None:
    a, b, c = (made[name]["files"]["model.safetensors"]["sha256"] for name in ("tiny-a", "tiny-b", "tiny-c"))
    assert a == b != c


def test_it_is_marked_and_was_not_asked_anything(made: dict[str, dict[str, Any]]) -> None:
    record = made["tiny-a"]
    assert record["facts"]["speed_only"] == "random weights: speed only"
    assert record["facts"]["tokenizer_of"] == "smollm2-135m"
    assert "speed only" in record["sanity"]["answer"]
    assert record["parameters"] == 2 * 49280 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 2 * 64) + 64


def test_transformers_loads_it_and_only_words_come_out(made: dict[str, dict[str, Any]], workspace: Workspace) -> None:
    import subprocess

    folder = workspace.path / "artifacts/models/tiny-a"
    python = workspace.path / "stages/source/.venv/bin/python"
    done = subprocess.run([python, "-c", LOAD, folder], capture_output=True, text=True, check=True, cwd=workspace.path)
    found = json.loads(done.stdout.splitlines()[-1])
    vocab = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    tokens = {number: token for token, number in vocab.items()}
    assert all(tokens[i].removeprefix("Ġ").isalpha() for i in found["ids"])
    assert found["std"] == pytest.approx(0.02, rel=0.02)
    assert 20_000 < found["rows"] < 49_152


def test_its_quality_is_refused(workspace: Workspace, made: dict[str, dict[str, Any]]) -> None:
    cell = ["--model", "tiny-a", "--recipe", "bf16", "--runtime", "vllm", "--target", "cpu"]
    done = workspace.run("pipeline", "run", "client", "evaluate", *cell, check=False)
    assert done.returncode == 2
    assert "tiny-a has random weights: speed only; its quality says nothing" in done.stderr


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"source": "random:tiny-lama@3"}, "no shape 'tiny-lama'.*Did you mean 'tiny-llama'"),
        ({"source": "random:tiny-llama"}, "is none of pypi:.*random:<shape>@<seed>"),
        ({"tokenizer_of": None}, "needs tokenizer_of and instruct: false"),
        ({"instruct": True}, "needs tokenizer_of and instruct: false"),
        ({"tokenizer_of": "smollm"}, "no model 'smollm'"),
    ],
)
def test_bad_entries_end_in_one_sentence(
    made: dict[str, dict[str, Any]], workspace: Workspace, change: dict[str, Any], message: str
) -> None:
    import re

    import yaml

    path = workspace.path / "params.yaml"
    before = path.read_text(encoding="utf-8")
    raw = yaml.safe_load(before)
    raw["models"]["tiny-a"] |= change
    path.write_text(yaml.safe_dump(raw, sort_keys=False), encoding="utf-8")
    try:
        done = workspace.run("pipeline", "plan", check=False)
    finally:
        path.write_text(before, encoding="utf-8")
    assert done.returncode == 2
    assert re.search(message, done.stderr)

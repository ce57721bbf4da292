"""Invents the results that the gate judges, for the cells of the real params.yaml. Every number here is synthetic."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from pipeline.paired import compare_items

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"
INT8, BF16 = f"{MODEL}.int8.vllm.cpu", f"{MODEL}.bf16.vllm.cpu"
SERVER = {"runtime": "vllm", "version": "0.32.0", "kv_cache_tokens": 46592}


def put(path: Path, value: Any) -> None:
    """Write a JSON file, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit a JSON file in place."""
    data = json.loads(path.read_text(encoding="utf-8"))
    edit(data)
    put(path, data)


def edit_policy(root: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Edit policy.yaml in place."""
    data = yaml.safe_load((root / "policy.yaml").read_text(encoding="utf-8"))
    edit(data)
    (root / "policy.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")


def task(worse: int, better: int, n: int = 2000) -> dict[str, Any]:
    """A task's entry with these flips."""
    base = {str(i): float(i < 0.8 * n) for i in range(n)}
    mine = base | {str(i): 0.0 for i in range(worse)} | {str(n - 1 - i): 1.0 for i in range(better)}
    return {"lm_eval": "qp_facts", "chance": 0.25, "answers": None, **compare_items(base, mine)}


def eval_json(cell: str, is_baseline: bool) -> dict[str, Any]:
    """An evaluation in which nothing is wrong, with enough items to show it."""
    n = 2000
    alone = {"lm_eval": "qp_facts", "chance": 0.25, "answers": None}
    alone |= compare_items(None, {str(i): float(i < 0.8 * n) for i in range(n)})
    lengths: dict[str, Any] = {
        "answers": 24,
        "empty": 0,
        "repeated": 0,
        "unparsable": 0,
        "cut": 20,
        "tokens_mean": 20.0,
    }
    fidelity: dict[str, Any] = {"tokens": 16384, "windows": 64, "perplexity": 20.4}
    if not is_baseline:
        lengths |= {"baseline": dict(lengths), "length_ratio": 1.0, "length_log_ratio_se": 0.02}
        fidelity |= {"perplexity_ratio": 1.01, "log_perplexity_ratio_se": 0.002, "kl_mean": 0.02, "kl_mean_se": 0.002}
        fidelity |= {"top1_agreement_pct": 95.0, "top1_agreement_pct_se": 0.5}
    floor = {"canary": {"prompts": 24, "answers_changed": 0}, "tasks": {}, "fidelity": {"kl_mean": 0.0001}}
    return {
        "schema": "quantpress.eval/2", "cell": cell, "baseline": None if is_baseline else BF16,
        "server": SERVER, "host": {"gpus": []}, "package_digest": "d1",
        "canary": {"passed": True, "failures": [], "lengths": lengths},
        "tasks": {"facts": alone if is_baseline else task(20, 20)},
        "fidelity": fidelity, "noise_floor": floor if is_baseline else None,
    }  # fmt: skip


def bench_json(ratio: float = 1.2) -> dict[str, Any]:
    """A benchmark with one point."""
    side = {"errors": 0, "output_tokens_ok": True, "repeats": {"n": 2, "output_tok_s": [90.0, 90.0]}}
    point = {"concurrency": 4, "requests": 32, "candidate": side, "baseline": side}
    point |= {"ratio": {"output_tok_s": ratio, "ttft_ms": 0.9}}
    point |= {"ratio_ci95": {"output_tok_s": [ratio - 0.03, ratio + 0.03], "ttft_ms": [0.85, 0.95]}}
    server = {"candidate": SERVER, "baseline": SERVER}
    return {"schema": "quantpress.bench/1", "server": server, "host": {"gpus": []}, "package_digest": "d1",
            "workloads": {"smoke-64-16": {"points": [point]}}}  # fmt: skip


def build(root: Path) -> Path:
    """Fill `root` with a project whose gate is PASS."""
    (root / "pipeline").mkdir(parents=True)
    for name in ("params.yaml", "policy.yaml", "pipeline/plan.yaml"):
        shutil.copyfile(ROOT / name, root / name)
    results = root / "artifacts/results"
    for cell in (INT8, BF16):
        put(results / cell / "eval.json", eval_json(cell, cell == BF16))
        put(root / f"artifacts/packages/{cell}/deploy/manifest.json", {"checkpoint": {"digest": "d1"}})
    put(results / INT8 / "bench.json", bench_json())
    weights = {"weight_bytes": 163_000_000, "source_weight_bytes": 269_000_000}
    put(results / f"{MODEL}.int8/quantize.json", {"schema": "quantpress.quantize/1", **weights})
    put(results / f"{MODEL}.int8/lint.json", {"schema": "quantpress.lint/1", "passed": True})
    put(results / f"{MODEL}/model.json", {"schema": "quantpress.model/1", "weight_bytes": 269_000_000})
    return root

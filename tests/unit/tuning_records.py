"""Invents tune.json and scaling.json for the tests. Every number here is synthetic: no model ran."""

from __future__ import annotations

from typing import Any

from pipeline.speed.steady import Row
from pipeline.speed.workloads import Point
from pipeline.tuning import rank, scaling

VARIANTS: dict[str, dict[str, Any]] = {
    "short-steps": {"options": {"max-num-batched-tokens": 2048, "no-enable-prefix-caching": None}},
    "other-checkpoint": {"recipe": "int4", "changes_answers": True},
    "by-variable": {"variables": {"VLLM_X": "1"}},
    "broken": {"options": {"linear-backend": "none"}},
}
LOADS = (Point(concurrency=1, requests=8, warmup=1), Point(concurrency=4, requests=16, warmup=1))


def leg(speed: float, load: Point, errors: int = 0) -> list[Row]:
    """Requests of a closed loop whose token rate is `speed` times that of the own options."""
    rows: list[Row] = []
    width = load.concurrency or 1
    length = int(1e9 / speed)
    for number in range(load.count or 8):
        start = (number // width) * length
        rows.append({
            "start_ns": start, "end_ns": start + length, "e2e_ms": length / 1e6, "ttft_ms": length / 1e7,
            "tpot_ms": length / 1e8, "inter_chunk_ms": [length / 1e8] * 10, "output_tokens": 16,
            "expected_tokens": 16,
        })  # fmt: skip
    return rows + [{"start_ns": 0, "end_ns": 1, "error": "refused", "e2e_ms": 0.0}] * errors


def tune_json(cell: str, digest: str, speeds: dict[str, float], noise: float = 0.01) -> dict[str, Any]:
    """A tune.json whose variants have these speeds over the own options, whose legs lie `noise` apart."""
    model, recipe, runtime, target = cell.split(".")
    empty: dict[str, Any] = {"options": {}, "variables": {}, "recipe": None, "changes_answers": False}
    points = []
    for load in LOADS:
        legs = {"own": [leg(1 + sign * noise / 2, load) for sign in (-1, 1, -1, 1)]}
        points.append(rank.point(load, legs | {name: [leg(speed, load)] for name, speed in speeds.items()}))
    return {
        "schema": rank.SCHEMA, "cell": cell, "model": model, "recipe": recipe, "runtime": runtime, "target": target,
        "package_digest": digest, "workload": "smoke-64-16", "common_options": {"kv-cache-memory-bytes": 1000},
        "variants": {name: empty | VARIANTS[name] for name in (*speeds, "broken")}, "points": points,
        "front_end_pct": {"own": {"c1": 12.0, "c4": 97.3}, "short-steps": {"c1": None, "c4": 55.0}},
        "client_bound": ["c1"], "failed": {"broken": "ValueError: no such backend."},
        "server": {
            name: {"runtime": runtime, "version": "0.26.0", "kernels": [f"Kernel-{name}"], "startup_s": 61.0,
                   "command": f"serve --{name}"}
            for name in ("own", *speeds)
        },
        "host": {"cpu": "Synthetic CPU", "cores": 2, "gpus": [{"name": "Synthetic GPU"}]}, "order": ["own", "own"],
        "client": {"tool": "aiperf"}, "git_commit": "beef" * 10, "finished_at": "2026-11-30T12:00:00Z", "wall_s": 9.0,
    }  # fmt: skip


def scaling_json(cell: str, both: float = 0.98, parallel: float = 1.5) -> dict[str, Any]:
    """A scaling.json of two GPUs: each of two servers at `both` of alone, one over both at `parallel` times alone."""
    model, recipe = cell.split(".")[:2]
    points = [
        scaling.point(load, 2, [leg(1, load)] * 2, {"0": leg(both, load), "1": leg(both, load)}, [leg(parallel, load)])
        for load in LOADS
    ]
    return tune_json(cell, "d", {}) | {
        "schema": scaling.SCHEMA, "model": model, "recipe": recipe, "gpus": 2, "points": points,
        "server": {name: {"version": "0.26.0", "command": f"serve on {name}"} for name in ("0", "1", "all")},
    }  # fmt: skip

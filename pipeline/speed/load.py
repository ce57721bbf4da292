"""What AIPerf is told to send: payloads with prompts of exact length, all distinct, and the phases of a leg. Pure.

Prompts are token ids cut from frozen text, so that lengths are exact for every model, neither side tokenizes while it
is timed, and AIPerf needs no dataset of its own (which costs it 3 s a leg, and cannot force mixed lengths).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import InputError
from pipeline.speed.workloads import Lengths, Point, Workload

CHUNK_TOKENS = 64
MARK_TOKENS = 4
# AIPerf 0.13 needs these: its dataset cache would fill the user's home.
ENVIRONMENT = {"AIPERF_DATASET_MMAP_CACHE_ENABLED": "false", "HF_HUB_DISABLE_TELEMETRY": "1"}
# It fails with either of these on a tokenizer folder, so they are left out of its environment.
DROPPED = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
# On AIPerf's path while a leg runs: without it a closed loop uses a core for waiting (its strategy.py says how).
PLUGIN = Path("stages/client/aiperf_plugin")
PLUGIN_SAYS = "quantpress: waits for a free slot"


class Request(NamedTuple):
    """One prompt and the forced length of its answer."""

    id: str
    prompt: list[int]
    output_tokens: int


def prompts(pool: list[list[int]], lengths: list[int], rng: random.Random, shared: int = 0) -> list[list[int]]:
    """Return token ids of the given lengths, cut from `pool`; no two start with the same MARK_TOKENS ids.

    Apart from the `shared` first ids, which all prompts have in common, a server's prefix cache finds nothing to share.

    Raises:
        InputError: the pool has too few distinct ids to tell the prompts apart.
    """
    rows = [row for row in pool if row]
    ids = sorted({i for row in rows for i in row})
    if len(ids) < 2 or len(ids) ** MARK_TOKENS < 4 * len(lengths):
        raise InputError(f"{len(ids)} distinct ids cannot make {len(lengths)} distinct prompts; use a larger set.")
    head = _text(rows, shared, rng)
    marks: set[tuple[int, ...]] = set()
    found = []
    for length in lengths:
        mark = tuple(rng.choices(ids, k=MARK_TOKENS))
        while mark in marks:
            mark = tuple(rng.choices(ids, k=MARK_TOKENS))
        marks.add(mark)
        body = length - len(head)
        found.append([*head, *mark[:body], *_text(rows, body - MARK_TOKENS, rng)])
    return found


def _text(rows: list[list[int]], length: int, rng: random.Random) -> list[int]:
    """Return `length` ids: pieces of random rows from random places."""
    out: list[int] = []
    while len(out) < length:
        row = rng.choice(rows)
        start = rng.randrange(len(row))
        out += row[start : start + min(CHUNK_TOKENS, length - len(out))]
    return out


def shares(mix: list[Lengths], count: int) -> list[Lengths]:
    """Return `count` lengths in the mix's proportions, by largest remainder; in the mix's order."""
    exact = [m.share * count for m in mix]
    whole = [int(x) for x in exact]
    by_rest = sorted(range(len(mix)), key=lambda i: whole[i] - exact[i])
    for i in by_rest[: count - sum(whole)]:
        whole[i] += 1
    return [m for m, n in zip(mix, whole, strict=True) for _ in range(n)]


def make_requests(workload: Workload, points: list[Point], pool: list[list[int]], seed: str) -> list[Request]:
    """Return the requests of one leg in the order in which they are sent: each point's warm-up, then what counts."""
    rng = random.Random(seed)
    lengths: list[Lengths] = []
    for point in points:
        for count in (point.warmup, point.count):
            block = shares(workload.lengths, count)
            rng.shuffle(block)
            lengths += block
    texts = prompts(pool, [m.prompt_tokens for m in lengths], rng, workload.shared_prefix_tokens)
    return [
        Request(f"q{i:06d}", text, m.output_tokens)
        for i, (text, m) in enumerate(zip(texts, lengths, strict=True))
    ]  # fmt: skip


def payloads(requests: list[Request], model: str, streaming: bool) -> dict[str, Any]:
    """Return AIPerf's inputs_json: each request as the body that is sent, byte for byte."""
    usage: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if streaming else {}
    fixed = {"model": model, "temperature": 0, "ignore_eos": True} | usage
    return {
        "data": [
            {
                "session_id": r.id,
                "payloads": [
                    fixed | {"prompt": r.prompt, "max_tokens": r.output_tokens, "min_tokens": r.output_tokens}
                ],
            }
            for r in requests
        ]
    }


def phases(points: list[Point]) -> list[dict[str, Any]]:
    """Return AIPerf's phases: for each point a warm-up that is not counted and a phase that is."""
    found = []
    for point in points:
        load: dict[str, Any]
        if point.concurrency:
            load = {"type": "concurrency", "concurrency": point.concurrency}
        else:
            load = {"type": "poisson", "rate": point.rate}
        found.append({"name": f"warm-{point.name}", "kind": "warmup", **load, "requests": point.warmup})
        found.append({"name": point.name, "kind": "profiling", **load, "requests": point.count})
    return found


def aiperf_config(
    points: list[Point], url: str, model: str, folder: str, streaming: bool, tokenizer: str, cores: int
) -> dict[str, Any]:
    """Return AIPerf's configuration of one leg. Its own telemetry is off: it costs 2 s a leg, and pipeline.speed.watch
    keeps the server's metrics and the GPU's state beside its export."""
    busiest = max((p.concurrency or 0 for p in points), default=1)
    workers = max(1, min(8, (cores - 1) // 4, -(-busiest // 16)))
    return {
        "schemaVersion": "2.0",
        "randomSeed": 7,
        "benchmark": {
            "model": model,
            "endpoint": {"url": url, "type": "completions", "streaming": streaming, "useServerTokenCount": True},
            "tokenizer": {"name": tokenizer},
            "dataset": {
                "type": "file", "path": f"{folder}/inputs.json", "format": "inputs_json", "sampling": "sequential",
            },
            "phases": phases(points),
            "gpuTelemetry": {"enabled": False},
            "serverMetrics": {"enabled": False},
            "artifacts": {"dir": folder},
            "runtime": {"ui": "none", "workers": workers, "recordProcessors": max(1, workers // 2)},
        },
    }  # fmt: skip


def leg_limit_s(workload: Workload, points: list[Point]) -> float:
    """Return how long a leg may take: two minutes, and for every round of requests half a second a token."""
    total = 120.0
    a_round = 0.5 * workload.mean_output + 0.02 * workload.mean_prompt
    for point in points:
        if point.concurrency:
            total += (point.count + point.warmup) / point.concurrency * a_round
        else:
            total += 2 * (point.count + point.warmup) / (point.rate or 1) + 10 * a_round
    return total

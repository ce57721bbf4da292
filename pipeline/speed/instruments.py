"""Two load generators on one server at one load: do they read the same speed? stages/client/instruments.py runs it.

The other one is `vllm bench serve` (vLLM, vllm/benchmarks/serve.py). Its output throughput counts every token over the
whole run, ramp and drain included, so ours is taken the same way here, and not over the steady window as in bench.json.
Its TTFT and TPOT are what ours are (pipeline/speed/definitions.py), apart from the server's tokenizing of its prompts,
which are text.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean, median
from typing import Any

from pipeline.errors import WorkError
from pipeline.speed.steady import Row
from pipeline.speed.workloads import Point, Workload

WITHIN = 0.05
FIELDS = {
    "output_tok_s": "output_throughput",
    "ttft_ms_mean": "mean_ttft_ms",
    "ttft_ms_median": "median_ttft_ms",
    "tpot_ms_mean": "mean_tpot_ms",
    "tpot_ms_median": "median_tpot_ms",
}


def ours(rows: list[Row]) -> dict[str, float]:
    """Return a leg's numbers over its whole run.

    Raises:
        WorkError: a request failed.
    """
    failed = [r for r in rows if r.get("error")]
    if failed or not rows:
        raise WorkError(f"{len(failed)} of {len(rows)} requests failed; the instruments cannot be compared.")
    seconds = (max(r["end_ns"] for r in rows) - min(r["start_ns"] for r in rows)) / 1e9
    return {
        "output_tok_s": sum(r["output_tokens"] for r in rows) / seconds,
        "ttft_ms_mean": mean(r["ttft_ms"] for r in rows),
        "ttft_ms_median": median(r["ttft_ms"] for r in rows),
        "tpot_ms_mean": mean(r["tpot_ms"] for r in rows),
        "tpot_ms_median": median(r["tpot_ms"] for r in rows),
    }


def theirs(result: dict[str, Any], point: Point, workload: Workload) -> dict[str, float]:
    """Read the JSON of `vllm bench serve --save-result`.

    Raises:
        WorkError: a field is missing, or not every request ended with the forced length.
    """
    missing = [field for field in (*FIELDS.values(), "completed", "total_output_tokens") if field not in result]
    if missing:
        raise WorkError(f"The result of `vllm bench serve` has no {', '.join(missing)}; is it another version's?")
    wanted = point.count * workload.longest_output
    if result["completed"] != point.count or result["total_output_tokens"] != wanted:
        raise WorkError(
            f"`vllm bench serve` completed {result['completed']} of {point.count} requests with "
            f"{result['total_output_tokens']} of {wanted} tokens."
        )
    return {ours_name: float(result[field]) for ours_name, field in FIELDS.items()}


def command(url: str, model: str, tokenizer: str, workload: Workload, point: Point, seed: int, out: str) -> list[str]:
    """Return the arguments after `python` that run `vllm bench serve` with one point's load."""
    size = workload.lengths[0]
    return [
        "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai", "--base-url", url,
        "--endpoint", "/v1/completions", "--model", model, "--tokenizer", tokenizer, "--dataset-name", "random",
        "--random-input-len", str(size.prompt_tokens), "--random-output-len", str(size.output_tokens),
        "--random-range-ratio", "0", "--ignore-eos", "--temperature", "0", "--num-prompts", str(point.count),
        "--num-warmups", str(point.warmup),
        "--max-concurrency", str(point.concurrency), "--seed", str(seed), "--disable-tqdm", "--save-result",
        "--result-filename", out, "--percentile-metrics", "ttft,tpot,itl,e2el",
    ]  # fmt: skip


def agreement(mine: Sequence[dict[str, float]], other: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return each number's mean on both sides, their ratio, and whether they agree within WITHIN.

    `spread` is the largest difference between two legs of one side over their mean: what a ratio can hardly beat.
    """
    found: dict[str, Any] = {}
    for name in FIELDS:
        a, b = [leg[name] for leg in mine], [leg[name] for leg in other]
        spread = max((max(x) - min(x)) / mean(x) for x in (a, b))
        ratio = mean(a) / mean(b)
        found[name] = {
            "ours": round(mean(a), 3), "theirs": round(mean(b), 3), "ratio": round(ratio, 4),
            "spread": round(spread, 4), "within_5_percent": abs(ratio - 1) <= WITHIN,
        }  # fmt: skip
    return found

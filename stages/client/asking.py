"""Ask a running server: the canary's prompts, and log-probabilities of the held-out tokens."""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline import jsonio
from pipeline.errors import WorkError
from pipeline.fidelity import Logprobs
from pipeline.serving import Server
from pipeline.specs import Params

HERE = Path("stages/client")
WINDOWS_IN_FLIGHT = 4


def canary_prompts() -> list[dict[str, Any]]:
    """Return the fixed prompts."""
    return list(yaml.safe_load((HERE / "canary.yaml").read_text(encoding="utf-8"))["prompts"])


def ask_canary(server: Server, prompts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ask the prompts greedily through the chat API; each answer has text, finish_reason, tokens and prompt_tokens."""

    def ask(prompt: dict[str, Any]) -> dict[str, Any]:
        body = {
            "model": server.cell.model,
            "messages": [{"role": "user", "content": prompt["prompt"]}],
            "max_tokens": prompt["max_tokens"],
            "temperature": 0,
        }
        answer = server.request("/v1/chat/completions", body)
        choice, usage = answer["choices"][0], answer.get("usage") or {}
        return {
            "text": choice["message"]["content"] or "",
            "finish_reason": choice["finish_reason"],
            "tokens": usage.get("completion_tokens"),
            "prompt_tokens": usage.get("prompt_tokens"),
        }

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return list(pool.map(ask, prompts))


def held_out_rows(params: Params, model: str) -> list[list[int]]:
    """Return the held-out token ids, `[windows][tokens]`."""
    path = Path("calib_data") / f"{params.evaluation.held_out}.{model}" / "tokens.json"
    return list(jsonio.read_json(path)["input_ids"])


def read_windows(server: Server, rows: list[list[int]], numbers: list[int], k: int) -> Logprobs:
    """Read some held-out windows through the server; `numbers` are their positions in `rows`."""

    def read(number: int) -> list[dict[str, Any] | None]:
        body = {"model": server.cell.model, "prompt": rows[number], "max_tokens": 1, "temperature": 0}
        return list(server.request("/v1/completions", body | {"prompt_logprobs": k})["choices"][0]["prompt_logprobs"])

    with concurrent.futures.ThreadPoolExecutor(WINDOWS_IN_FLIGHT) as pool:
        answers = list(pool.map(read, numbers))
    return to_arrays({n: rows[n] for n in numbers}, answers, k)


def to_arrays(rows: dict[int, list[int]], answers: list[list[dict[str, Any] | None]], k: int) -> Logprobs:
    """Turn the server's answers into arrays; the first position of a window has no prediction."""
    ids, logprobs, actual, window = [], [], [], []
    for (number, row), answer in zip(rows.items(), answers, strict=True):
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

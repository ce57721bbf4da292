"""A stand-in for a server's completions endpoint, for tests of the client: answers depend on the token ids alone.

Its numbers mean nothing; what is tested is what lm-eval and the client make of them.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SALT = {"model": "", "template": 0}  # another salt is another model; template lengthens every chat prompt


def score(tokens: list[int]) -> float:
    """Return a log-probability in -10..0 that depends on the tokens."""
    return -int(hashlib.sha256((json.dumps(tokens) + str(SALT["model"])).encode()).hexdigest()[:6], 16) / 0xFFFFFF * 10


def completion(index: int, prompt: list[int]) -> dict[str, Any]:
    """Answer a prompt: log-probabilities of its tokens, and an empty, a repeated or a plain text."""
    values = [None, *(score(prompt[:i]) for i in range(2, len(prompt) + 1))]
    tops = [None, *({"x": 0.0} for _ in prompt[1:])]
    text = "" if index == 0 else "the sea " * 30 if index == 1 else f"The answer is {index}."
    logprobs = {
        "token_logprobs": [*values, -1.0],
        "top_logprobs": [*tops, {"x": 0.0}],
        "tokens": [str(t) for t in prompt],
    }
    return {"index": index, "text": text, "finish_reason": "stop", "logprobs": logprobs}


def chat(body: dict[str, Any]) -> dict[str, Any]:
    """Answer a chat prompt with its own words, and say how many tokens there were."""
    words = body["messages"][0]["content"].split()
    usage = {"prompt_tokens": len(words) + 9 + int(SALT["template"]), "completion_tokens": len(words)}
    message = {"content": "Paris cold seven " + " ".join(words)}
    return {"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}


def top(row: list[int], k: int) -> list[Any]:
    """Return vLLM's prompt_logprobs: per position the k best tokens and the token of the text, with ranks."""
    found: list[Any] = [None]
    for i, token in enumerate(row[1:], 1):
        best = {str(90000 + j): {"logprob": -1.0 - j + score([i, j]) / 100, "rank": j + 1} for j in range(k)}
        found.append(best | {str(token): {"logprob": -3 + score(row[: i + 1]) / 10, "rank": k + 5}})
    return found


class Handler(BaseHTTPRequestHandler):
    """POST /v1/completions, with `echo` for log-likelihoods or without for generated text."""

    seen: list[dict[str, Any]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        """Answer one request for one or several prompts of token ids."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.seen.append({key: value for key, value in body.items() if key != "prompt"})
        if self.path.endswith("/chat/completions"):
            found = chat(body)
        elif "prompt_logprobs" in body:
            found = {"choices": [{"prompt_logprobs": top(body["prompt"], body["prompt_logprobs"])}]}
        else:
            prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
            found = {"choices": [completion(index, prompt) for index, prompt in enumerate(prompts)]}
        out = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(out)))
        self.end_headers()
        self.wfile.write(out)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def start() -> str:
    """Start it on a free port of loopback; return its address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"

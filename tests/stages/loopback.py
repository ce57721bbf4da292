"""A stand-in for a server's completions endpoint, for tests of the client: answers depend on the token ids alone.

Its numbers mean nothing; what is tested is what lm-eval and the client make of them.
"""

from __future__ import annotations

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def score(tokens: list[int]) -> float:
    """Return a log-probability in -10..0 that depends on the tokens."""
    return -int(hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:6], 16) / 0xFFFFFF * 10


class Handler(BaseHTTPRequestHandler):
    """POST /v1/completions, with `echo` for log-likelihoods or without for generated text."""

    seen: list[dict[str, Any]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        """Answer one request for one or several prompts of token ids."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.seen.append({key: value for key, value in body.items() if key != "prompt"})
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        choices = []
        for index, prompt in enumerate(prompts):
            values = [None, *(score(prompt[:i]) for i in range(2, len(prompt) + 1))]
            tops = [None, *({"x": 0.0} for _ in prompt[1:])]
            text = "" if index == 0 else "the sea " * 30 if index == 1 else f"The answer is {index}."
            choices.append({"index": index, "text": text, "finish_reason": "stop",
                            "logprobs": {"token_logprobs": [*values, -1.0], "top_logprobs": [*tops, {"x": 0.0}],
                                         "tokens": [str(t) for t in prompt]}})  # fmt: skip
        out = json.dumps({"choices": choices}).encode()
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

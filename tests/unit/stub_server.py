"""A stub of an OpenAI-compatible server for plumbing tests. It proves that requests and records fit, never a speed."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

FIRST_S, GAP_S = 0.02, 0.002
METRICS = "vllm:prefix_cache_queries_total 100.0\nvllm:prefix_cache_hits_total 0.0\n"


async def complete(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """Answer /v1/completions with max_tokens tokens, streamed or not."""
    tokens, prompt = body["max_tokens"], len(body["prompt"])
    usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
    base = {"id": "x", "object": "text_completion", "model": body["model"], "created": 1}
    await asyncio.sleep(FIRST_S)
    if not body.get("stream"):
        await asyncio.sleep(GAP_S * tokens)
        choice = {"index": 0, "text": " a" * tokens, "finish_reason": "length"}
        data = json.dumps(base | {"choices": [choice], "usage": usage}).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data) + data
        )
        return
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")

    def send(value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        data = f"data: {text}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    for i in range(tokens):
        await asyncio.sleep(GAP_S if i else 0)
        send(base | {"choices": [{"index": 0, "text": " a", "finish_reason": None}]})
        await writer.drain()
    send(base | {"choices": [], "usage": usage})
    send("[DONE]")
    writer.write(b"0\r\n\r\n")


async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Serve one connection until it is closed."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            lengths = [line.split(":")[1] for line in head.split("\r\n") if line.lower().startswith("content-length:")]
            body = await reader.readexactly(int(lengths[0])) if lengths else b""
            path = head.split(" ")[1]
            if path == "/v1/completions":
                await complete(json.loads(body), writer)
            else:
                data = METRICS.encode() if path == "/metrics" else b"ok\n"
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data) + data)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def main(port: int) -> None:
    """Listen on loopback until the process is ended."""
    server = await asyncio.start_server(handle, "127.0.0.1", port)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))

"""What each number of bench.json means. A change of meaning is a new id, and unlike ids are never compared.

Tools use these names for unlike things: GuideLLM 0.8.1's time_per_output_token counts the first token, vLLM's and
AIPerf's inter-token numbers do not. The ids below are this project's; the client's fields are mapped to them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

# The client limits the load when one of its processes, each a single event loop, is this busy; and a server's front end
# does, the event loop that reads requests and writes every token of every answer.
BUSY_PCT = 90.0
# The smallest n for which a 95% one-sided upper confidence bound of the percentile exists: p**n <= 0.05.
SAMPLES_NEEDED = {"p50": 1, "p90": 29, "p95": 59, "p99": 299}


class Definition(NamedTuple):
    """A metric's id with its version, unit and meaning; and its field in AIPerf 0.13's per-request export, if any."""

    id: str
    unit: str
    text: str
    aiperf: str | None = None


DEFINITIONS = {
    "ttft_ms": Definition(
        "ttft/2", "ms", "request (prompt as token ids) sent to first token received", "time_to_first_token"
    ),
    "tpot_ms": Definition(
        "tpot-excl-first/1",
        "ms",
        "(last token - first token) / (output tokens - 1), per request",
        "inter_token_latency",
    ),
    "inter_chunk_ms": Definition(
        "inter-chunk/1", "ms", "gaps between streamed chunks, pooled over requests", "inter_chunk_latency"
    ),
    "e2e_ms": Definition("e2e/2", "ms", "request (prompt as token ids) sent to last token received", "request_latency"),
    "output_tok_s": Definition(
        "output-throughput/2", "tok/s", "output tokens received inside the steady windows / length of the windows"
    ),
    "request_s": Definition(
        "request-throughput/2", "1/s", "requests ended inside the steady windows / length of the windows"
    ),
    "window": Definition(
        "steady/1",
        "",
        "closed loop: from the send after the first burst to the first end that no send follows; open loop: from one "
        "median end-to-end time after the first send to the last send",
    ),
    "goodput_s": Definition(
        "goodput/1", "1/s", "requests that meet every limit of an objective / length of the windows"
    ),
}


def definitions() -> dict[str, Any]:
    """Return the definitions as they stand in bench.json: {metric: {id, unit, text}}."""
    return {name: {"id": d.id, "unit": d.unit, "text": d.text} for name, d in DEFINITIONS.items()}

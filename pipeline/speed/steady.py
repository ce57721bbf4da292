"""Which requests and which span of time count: neither the ramp, nor the drain, nor a warm-up that had not settled."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

Row = dict[str, Any]
SETTLED_AT_LEAST = 12
SETTLED_PCT = 5.0


class Window(NamedTuple):
    """A span of time in ns and the requests whose latencies count."""

    start_ns: int
    end_ns: int
    kept: list[Row]
    ramp: int
    drain: int

    @property
    def seconds(self) -> float:
        """Length of the window."""
        return (self.end_ns - self.start_ns) / 1e9


def window(rows: list[Row], concurrency: int | None) -> Window | None:
    """Return the steady part of one leg's requests at one point, or None where there is none.

    Closed loop: the first `concurrency` requests are a burst whose prefills wait for each other, so steady load begins
    when the next one is sent, and ends with the first end that no other send follows. Open loop (`concurrency` None):
    from one median end-to-end time after the first send, when as many leave as arrive, to the last send; requests sent
    in it count whenever they end, or slow ones would be dropped.
    """
    sent = sorted(rows, key=lambda r: r["start_ns"])
    good = [r for r in sent if not r.get("error")]
    if not good or (concurrency or 0) >= len(sent):
        return None
    if concurrency is None:
        start = sent[0]["start_ns"] + int(1e6 * float(np.median([r["e2e_ms"] for r in good])))
        end = sent[-1]["start_ns"]
        kept = [r for r in good if r["start_ns"] >= start]
        ramp = len(good) - len(kept)
        return Window(start, end, kept, ramp, 0) if kept and end > start else None
    start = sent[concurrency]["start_ns"]
    end = sorted(r["end_ns"] for r in sent)[len(sent) - concurrency]
    after_ramp = [r for r in sent[concurrency:] if not r.get("error")]
    kept = [r for r in after_ramp if r["end_ns"] <= end]
    if not kept or end <= start:
        return None
    return Window(start, end, kept, len(good) - len(after_ramp), len(after_ramp) - len(kept))


def tokens_between(row: Row, start_ns: int, end_ns: int) -> float:
    """Return the output tokens of a request that were received in (start, end].

    Streamed: each chunk at its own time, tokens spread evenly over chunks. Not streamed: the share of the request's
    duration that lies inside, because the server made them all along.
    """
    gaps, tokens = row.get("inter_chunk_ms"), float(row["output_tokens"])
    if row.get("ttft_ms") is None or gaps is None:
        inside = min(row["end_ns"], end_ns) - max(row["start_ns"], start_ns)
        return float(tokens * max(0, inside) / max(1, row["end_ns"] - row["start_ns"]))
    times = row["start_ns"] + 1e6 * (row["ttft_ms"] + np.concatenate([[0.0], np.cumsum(gaps)]))
    return tokens * float(np.mean((times > start_ns) & (times <= end_ns)))


def settled(rows: list[Row]) -> dict[str, Any]:
    """Judge whether latencies of one leg had settled: the first quarter against the rest, in order of sending.

    Unsettled: the first quarter's mean end-to-end time differs by more than 5% and by more than 3 standard errors.

    Returns:
        settled (True, False, or None where there are too few requests), first_quarter_pct (by how much it differs).
    """
    values = np.array([r["e2e_ms"] for r in sorted(rows, key=lambda r: r["start_ns"]) if not r.get("error")])
    if len(values) < SETTLED_AT_LEAST:
        reason = f"{len(values)} requests, {SETTLED_AT_LEAST} are needed to judge"
        return {"settled": None, "first_quarter_pct": None, "not_measured": reason}
    cut = len(values) // 4
    first, rest = values[:cut], values[cut:]
    gap = float(first.mean() - rest.mean())
    error = math.sqrt(first.var(ddof=1) / len(first) + rest.var(ddof=1) / len(rest)) if len(first) > 1 else 0.0
    pct = 100 * gap / float(rest.mean())
    return {"settled": not (abs(pct) > SETTLED_PCT and abs(gap) > 3 * error), "first_quarter_pct": round(pct, 2)}

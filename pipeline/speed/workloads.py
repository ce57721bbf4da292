"""Workloads as data: lengths, loads, order of the sides, repeats, streaming.

A closed loop keeps `concurrency` requests in flight: capacity and comparison. An open loop sends at a Poisson `rate`
whatever the server does: queueing shows, so limits on latency are judged there. They never share a name: a closed
point is called c4, an open one r2p5.
"""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Point(_Strict):
    """One load, after `warmup` uncounted requests: closed (`concurrency`, `requests`) or open (`rate`, 1/s).

    An open point ends after `requests` or after `duration_s` seconds' worth of them.
    """

    concurrency: int | None = Field(default=None, gt=0)
    rate: float | None = Field(default=None, gt=0)
    requests: int | None = Field(default=None, gt=0)
    duration_s: float | None = Field(default=None, gt=0)
    warmup: int = Field(gt=0)

    @model_validator(mode="after")
    def _one_kind(self) -> Point:
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("a point has either concurrency (closed loop) or rate (open loop, requests/s)")
        if (self.requests is None) == (self.duration_s is None):
            raise ValueError("a point has either requests or duration_s")
        if self.duration_s is not None and self.rate is None:
            raise ValueError("duration_s needs a rate: the number of distinct prompts must be known before")
        return self

    @property
    def name(self) -> str:
        """The point's name in files and logs: c4, or r2p5 for 2.5 requests/s."""
        return f"c{self.concurrency}" if self.concurrency else "r" + f"{self.rate:g}".replace(".", "p")

    @property
    def loop(self) -> str:
        """closed or open."""
        return "closed" if self.concurrency else "open"

    @property
    def count(self) -> int:
        """Requests that are counted."""
        return self.requests or math.ceil((self.rate or 0) * (self.duration_s or 0))


class Lengths(_Strict):
    """Tokens in and out of a `share` of the requests."""

    prompt_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=1)
    share: float = Field(default=1.0, gt=0, le=1)


class Workload(_Strict):
    """What is sent. Fixed lengths, or a `mix` of them.

    `order` says in which order baseline (A) and candidate (B) are timed, `repeats` how often. `against: not-streamed`
    times the cell against itself, streamed (B) and not streamed (A). `shared_prefix_tokens` asks for prefix sharing.
    `warmup_retries`: how often a leg that had not settled is timed again with twice the warm-up. `soak`: report errors,
    drift and memory over time. `objective`: what a server of it is tuned for, the tail of the latencies or tokens/s.
    """

    prompt_tokens: int | None = Field(default=None, gt=0)
    output_tokens: int | None = Field(default=None, gt=1)
    mix: list[Lengths] | None = None
    points: list[Point] = Field(min_length=1)
    order: Literal["A", "AB", "ABBA"] = "AB"
    repeats: int = Field(default=1, gt=0)
    streaming: bool = True
    against: Literal["baseline", "not-streamed"] = "baseline"
    shared_prefix_tokens: int = Field(default=0, ge=0)
    warmup_retries: int = Field(default=0, ge=0)
    soak: bool = False
    objective: Literal["latency", "throughput"] = "latency"

    @model_validator(mode="after")
    def _whole(self) -> Workload:
        fixed = self.prompt_tokens is not None and self.output_tokens is not None
        if fixed == (self.mix is not None) or (self.mix and (self.prompt_tokens or self.output_tokens)):
            raise ValueError("a workload has either prompt_tokens and output_tokens, or a mix")
        if self.mix and not math.isclose(sum(m.share for m in self.mix), 1.0, abs_tol=1e-6):
            raise ValueError(f"the shares of the mix add up to {sum(m.share for m in self.mix):g}, not 1")
        if self.shared_prefix_tokens >= min(m.prompt_tokens for m in self.lengths):
            raise ValueError("shared_prefix_tokens must be less than the shortest prompt")
        if self.against == "not-streamed" and not self.streaming:
            raise ValueError("against: not-streamed compares with streaming: true")
        names = [p.name for p in self.points]
        if len(names) != len(set(names)):
            raise ValueError(f"two points are one load: {', '.join(names)}")
        if self.order == "A" and not self.soak:
            raise ValueError("order A times no candidate; only a soak may have it")
        return self

    @property
    def lengths(self) -> list[Lengths]:
        """The mix; one entry where lengths are fixed."""
        if self.mix:
            return self.mix
        return [Lengths(prompt_tokens=self.prompt_tokens or 1, output_tokens=self.output_tokens or 2)]

    @property
    def longest(self) -> int:
        """Tokens of the longest request, in and out."""
        return max(m.prompt_tokens + m.output_tokens for m in self.lengths)

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt."""
        return max(m.prompt_tokens for m in self.lengths)

    @property
    def longest_output(self) -> int:
        """Tokens of the longest answer."""
        return max(m.output_tokens for m in self.lengths)

    @property
    def mean_prompt(self) -> float:
        """Mean prompt tokens of a request."""
        return sum(m.share * m.prompt_tokens for m in self.lengths)

    @property
    def mean_output(self) -> float:
        """Mean output tokens of a request."""
        return sum(m.share * m.output_tokens for m in self.lengths)

    @property
    def sides(self) -> str:
        """The legs in their order, e.g. ABBAABBA."""
        return self.order * self.repeats


def out_of_reach(point: Point, workload: Workload, server: dict[str, Any]) -> str | None:
    """Return why a server cannot hold a point's requests, or None: beyond it, it refuses, only queues, or preempts.

    Args:
        point: the load.
        workload: its lengths.
        server: kv_cache_tokens, max_num_seqs and max_model_len of the server where they are known.
    """
    limit = server.get("max_model_len")
    if limit and workload.longest > limit:
        return f"a request has {workload.longest:,} tokens, the server's context is {limit:,}"
    if point.concurrency is None:
        return None
    seqs, cache = server.get("max_num_seqs"), server.get("kv_cache_tokens")
    if seqs and point.concurrency > seqs:
        return f"the server runs at most {seqs} requests at once (max-num-seqs)"
    need = point.concurrency * (workload.mean_prompt + workload.mean_output)
    if cache and need > cache:
        return f"{point.concurrency} requests need {need:,.0f} tokens of KV cache, the server has {cache:,}"
    return None

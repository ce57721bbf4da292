"""Service-level objectives as data, and whether requests meet one: shown, refuted, or too few requests to tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

CONFIDENCE = 0.95
MET, MISSED, OPEN = "MET", "MISSED", "OPEN"
MLPERF_MARK = "MLPerf-style, not an MLPerf result"


class Slo(BaseModel):
    """Limits that a request must all meet, and the share of requests that must (`attainment`); ms.

    Without limits it is an offline objective: only throughput counts, and the workload of most tokens/s decides.
    `workloads`: where it is judged, in this order of preference; the first that was timed decides. `mlperf_style`:
    limits of an MLPerf benchmark on other data and loads.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ttft_ms: float | None = Field(default=None, gt=0)
    tpot_ms: float | None = Field(default=None, gt=0)
    e2e_ms: float | None = Field(default=None, gt=0)
    attainment: float = Field(default=0.99, gt=0, lt=1)
    workloads: list[str] = Field(min_length=1)
    mlperf_style: bool = False
    source: str

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by metric."""
        found = {"ttft_ms": self.ttft_ms, "tpot_ms": self.tpot_ms, "e2e_ms": self.e2e_ms}
        return {name: value for name, value in found.items() if value is not None}

    def words(self) -> str:
        """Return the objective in a line: 'TTFT <= 200 ms, TPOT <= 50 ms for 99% of requests'."""
        names = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "e2e_ms": "end to end"}
        if not self.limits:
            return "no limit on latency; throughput counts"
        parts = ", ".join(f"{names[k]} <= {v:g} ms" for k, v in self.limits.items())
        mark = f" ({MLPERF_MARK})" if self.mlperf_style else ""
        return f"{parts} for {100 * self.attainment:g}% of requests{mark}"


class Attained(NamedTuple):
    """How many requests met an objective, and what that shows at 95% confidence."""

    verdict: str
    requests: int
    met: int
    reason: str

    @property
    def share(self) -> float | None:
        """Share of requests that met every limit."""
        return self.met / self.requests if self.requests else None


def attained(rows: Sequence[dict[str, Any]], slo: Slo) -> Attained:
    """Judge requests by an objective.

    MET: the one-sided 95% upper bound (Clopper and Pearson, Biometrika 26 (1934)) of the share that misses a limit is
    at most 1 - attainment; so 99% needs 299 requests without a miss. MISSED: its lower bound is above. OPEN: neither.

    Args:
        rows: requests with ttft_ms, tpot_ms, e2e_ms (None where not streamed), `failed` where they ended in an error.
        slo: the objective.
    """
    if not slo.limits:
        return Attained(MET, len(rows), len(rows), "the objective has no limits")
    ended = [r for r in rows if not r.get("failed")]
    lacking = [k for k in slo.limits if ended and all(r.get(k) is None for r in ended)]
    if lacking:
        return Attained(OPEN, 0, 0, f"{lacking[0]} was not measured (answers were not streamed)")
    met = sum(all(_within(r, k, v) for k, v in slo.limits.items()) for r in rows)
    n, missed = len(rows), len(rows) - met
    if not n:
        return Attained(OPEN, 0, 0, "no requests in the steady window")
    allowed = 1 - slo.attainment
    upper, lower = missed_bounds(missed, n)
    if upper <= allowed:
        return Attained(MET, n, met, f"{met} of {n} requests within the limits")
    if lower > allowed:
        return Attained(MISSED, n, met, f"{missed} of {n} requests beyond the limits")
    need = requests_needed(slo.attainment)
    reason = f"{met} of {n} requests within the limits; {100 * slo.attainment:g}% needs at least {need}"
    return Attained(OPEN, n, met, reason)


def _within(row: dict[str, Any], key: str, limit: float) -> bool:
    value = row.get(key)
    return not row.get("failed") and value is not None and value <= limit


def missed_bounds(missed: int, n: int) -> tuple[float, float]:
    """Return the upper and lower one-sided 95% bounds of a share, of which `missed` of `n` were seen."""
    from scipy.stats import beta

    upper = 1.0 if missed == n else float(beta.ppf(CONFIDENCE, missed + 1, n - missed))
    lower = 0.0 if missed == 0 else float(beta.ppf(1 - CONFIDENCE, missed, n - missed + 1))
    return upper, lower


def requests_needed(attainment: float) -> int:
    """Return the fewest requests, none of which misses, that show an attainment at 95% confidence: 299 for 0.99."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(attainment))

"""What goes on beside a leg: the client's CPU, scheduling lag, the server's front end and memory, the GPU, metrics.

A thread of the stage program samples twice a second with psutil. It costs about 3 ms a sample, which is why it is not
more often: on a small host it shares the client's core.
"""

from __future__ import annotations

import re
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psutil

from pipeline.speed import gpu
from pipeline.speed.definitions import BUSY_PCT, SAMPLES_NEEDED

EVERY_S = 0.5
GPU_EVERY_S = 2.0
LAG_SLEEP_S = 0.02
AIPERF_LAG = re.compile(r"Event loop for (\w+?)(?:_[0-9a-f]{8})? is taking too long to run\. Overhead: ([\d.,]+)ms")


class Watch:
    """Samples while a leg runs. Use as a context manager around it; `summary` afterwards."""

    def __init__(self, client_pid: int, server_pid: int | None, metrics_url: str, folder: Path, has_gpu: bool) -> None:
        """Watch the process trees below the two pids; the server's metrics page goes to `folder` before and after."""
        self.client_pid, self.server_pid, self.metrics_url, self.folder = client_pid, server_pid, metrics_url, folder
        self.has_gpu = has_gpu
        self.pages: dict[str, str] = {}
        self.cpu: list[tuple[float, dict[int, float]]] = []
        self.server_rss: list[tuple[float, int]] = []
        self.front_end: psutil.Process | None = None
        self.front_end_cpu: list[tuple[float, float]] = []
        self.lag_ms: list[tuple[float, float]] = []
        self.gpu_samples: list[list[dict[str, Any]]] = []
        self.gpu_processes: list[dict[str, str]] = []
        self.own_pids: set[str] = set()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=f, daemon=True) for f in (self._sample, self._probe_lag)]

    def __enter__(self) -> Watch:
        self._scrape("before")
        if self.server_pid is not None:
            self.front_end = listener(self.server_pid, urlsplit(self.metrics_url).port)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=30)
        self._scrape("after")

    def _scrape(self, when: str) -> None:
        page = fetch(self.metrics_url)
        if page is not None:
            self.pages[when] = page
            (self.folder / f"server_metrics.{when}.prom").write_text(page, encoding="utf-8")

    def _probe_lag(self) -> None:
        """How late a sleeper wakes: what the client's loops suffer from this host's other work."""
        while not self._stop.is_set():
            start = time.perf_counter()
            time.sleep(LAG_SLEEP_S)
            self.lag_ms.append((time.time(), 1e3 * (time.perf_counter() - start - LAG_SLEEP_S)))

    def _sample(self) -> None:
        next_gpu = 0.0
        while not self._stop.wait(EVERY_S):
            now = time.time()
            self.cpu.append((now, {p.pid: sum(t[:2]) for p, t in _times(self.client_pid)}))
            if self.front_end is not None and (used := _cpu_s(self.front_end)) is not None:
                self.front_end_cpu.append((now, used))
            if self.server_pid is not None:
                self.server_rss.append((now, sum(_rss(p) for p in tree(self.server_pid))))
            if self.has_gpu and now >= next_gpu:
                next_gpu = now + GPU_EVERY_S
                self.own_pids |= {str(p.pid) for p in tree(self.server_pid or self.client_pid)}
                self.gpu_samples.append(gpu.query())
                self.gpu_processes = gpu.processes() or self.gpu_processes

    def summary(self, log: str, spans: dict[str, tuple[float, float]]) -> dict[str, Any]:
        """Return what was seen.

        Args:
            log: AIPerf's own log, in which its event loops report when they are held up.
            spans: for each load point when it began and ended, seconds since 1970: the client's load is given for each.
        """
        own = {str(p.pid) for pid in (self.client_pid, self.server_pid) if pid for p in tree(pid)} | self.own_pids
        held = [float(ms.replace(",", "")) for name, ms in AIPERF_LAG.findall(log) if name.startswith("worker")]
        client, front_end = {}, {}
        for name, (start, end) in spans.items():
            cpu = [(t, use) for t, use in self.cpu if start <= t <= end]
            client[name] = client_load(cpu, [ms for t, ms in self.lag_ms if start <= t <= end])
            front_end[name] = front_end_load([(t, used) for t, used in self.front_end_cpu if start <= t <= end])
        return {
            "client": client,
            "front_end": front_end,
            "client_loop_held_ms": {"n": len(held), "max": max(held, default=0.0)},
            "server_rss_mib": span([rss / 2**20 for _, rss in self.server_rss]),
            "prefix_cache": prefix_cache(self.pages.get("before"), self.pages.get("after")),
            "gpu": gpu.summarize(self.gpu_samples, own, self.gpu_processes) if self.has_gpu else None,
        }


def tree(pid: int) -> list[psutil.Process]:
    """Return a process and all below it; those that ended meanwhile are left out."""
    try:
        top = psutil.Process(pid)
        return [top, *top.children(recursive=True)]
    except psutil.Error:
        return []


def _times(pid: int) -> list[tuple[psutil.Process, Any]]:
    found = []
    for process in tree(pid):
        try:
            found.append((process, process.cpu_times()))
        except psutil.Error:
            continue
    return found


def listener(pid: int, port: int | None) -> psutil.Process | None:
    """Return the process of a server's tree that listens on its port, None where none is seen to."""
    for process in tree(pid):
        try:
            found = process.net_connections(kind="inet")
        except (psutil.Error, OSError):
            continue
        if any(c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port for c in found):
            return process
    return None


def _cpu_s(process: psutil.Process) -> float | None:
    try:
        return float(sum(process.cpu_times()[:2]))
    except psutil.Error:
        return None


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def client_load(cpu: list[tuple[float, dict[int, float]]], lag_ms: list[float]) -> dict[str, Any]:
    """Return the client's CPU use and lag at one load point, and whether it limited the load.

    Args:
        cpu: samples of (seconds, {pid: CPU seconds used so far}).
        lag_ms: how late a sleeper of this process woke, ms.

    Returns:
        cores_mean (whole tree), busiest_pct (mean use of one core by the busiest process, each a single event loop),
        lag_ms, bound (True where the client limited the load, None where nothing says so), why.
    """
    result: dict[str, Any] = {"cores_mean": None, "busiest_pct": None, "bound": None, "why": None}
    lags = np.array(lag_ms)
    result["lag_ms"] = {
        "n": len(lags), "p50": round(float(np.percentile(lags, 50)), 3), "max": round(float(lags.max()), 3),
        "p99": round(float(np.percentile(lags, 99)), 3) if len(lags) >= SAMPLES_NEEDED["p99"] else None,
    } if len(lags) else None  # fmt: skip
    if len(cpu) < 2 or cpu[-1][0] <= cpu[0][0]:
        return result | {"why": "not measured (the point was too short to sample)"}
    (start, first), (end, last) = cpu[0], cpu[-1]
    use = {pid: (last[pid] - first[pid]) / (end - start) for pid in first.keys() & last.keys()}
    busiest = 100 * max(use.values(), default=0.0)
    bound = busiest >= BUSY_PCT
    why = f"a client process used {busiest:.0f}% of its core" if bound else None
    return result | {
        "cores_mean": round(sum(use.values()), 2), "busiest_pct": round(busiest, 1), "bound": bound, "why": why,
    }  # fmt: skip


def front_end_load(cpu: list[tuple[float, float]]) -> dict[str, Any]:
    """Return how busy the server's front end was at one load point, and whether it limited the load.

    It is one event loop whatever the precision is: where it is the limit, no checkpoint is faster than another.

    Args:
        cpu: samples of (seconds, CPU seconds used so far by the process that listens on the server's port).

    Returns:
        busy_pct (of one core), bound (None where nothing says so), why.
    """
    if len(cpu) < 2 or cpu[-1][0] <= cpu[0][0]:
        return {"busy_pct": None, "bound": None, "why": "not measured (no front end was seen, or not for long enough)"}
    busy = 100 * (cpu[-1][1] - cpu[0][1]) / (cpu[-1][0] - cpu[0][0])
    bound = busy >= BUSY_PCT
    why = f"the process that answers requests used {busy:.0f}% of a core" if bound else None
    return {"busy_pct": round(busy, 1), "bound": bound, "why": why}


def span(values: list[float]) -> dict[str, Any] | None:
    """Return first, last, max and growth in % of a series, or None when it is empty."""
    if not values:
        return None
    cut = max(1, len(values) // 4)
    first, last = float(np.mean(values[:cut])), float(np.mean(values[-cut:]))
    growth = round(100 * (last / first - 1), 2) if first else None
    return {"first_quarter": round(first, 1), "last_quarter": round(last, 1), "max": round(max(values), 1),
            "growth_pct": growth}  # fmt: skip


def fetch(url: str) -> str | None:
    """Return a page of text, or None when there is none."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return str(answer.read().decode("utf-8", "replace"))
    except (urllib.error.URLError, OSError, ValueError):
        return None


def counter(page: str, name: str) -> float | None:
    """Return the sum of a Prometheus counter over its labels, or None when the page has none of that name."""
    found = re.findall(rf"^{re.escape(name)}(?:_total)?(?:{{[^}}]*}})? ([0-9.eE+]+)$", page, re.MULTILINE)
    return sum(map(float, found)) if found else None


def prefix_cache(before: str | None, after: str | None) -> dict[str, Any]:
    """Return the prefix cache's hits and queries (tokens) between two pages of a vLLM server's metrics."""
    names = {"hits": "vllm:prefix_cache_hits", "queries": "vllm:prefix_cache_queries"}
    if before is None or after is None:
        return {"hit_rate": None, "not_measured": {"hit_rate": "the server gives no metrics page"}}
    moved: dict[str, float] = {}
    for key, name in names.items():
        late = counter(after, name)
        if late is None:
            return {"hit_rate": None, "not_measured": {"hit_rate": f"the server's metrics have no {name}"}}
        moved[key] = late - (counter(before, name) or 0.0)
    if moved["queries"] <= 0:
        return {"hit_rate": 0.0, **moved}
    return {"hit_rate": moved["hits"] / moved["queries"], **moved}

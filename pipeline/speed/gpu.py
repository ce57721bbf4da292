"""The GPU's state while it is timed: clocks, power, throttling, memory, others on it. Read by nvidia-smi, never set."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
from statistics import mean
from typing import Any

# nvidia-smi's own query names (`nvidia-smi --help-query-gpu`). Drivers before 535 call the reasons clocks_throttle_*.
FIELDS = (
    "index", "name", "clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu",
    "utilization.gpu", "memory.used", "memory.total", "persistence_mode", "mig.mode.current",
    "clocks_event_reasons.active",
)  # fmt: skip
OLD_REASONS = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
# Bits of nvmlClocksEventReasons (nvml.h). Idle is not throttling; what a user set is named but is no fault.
REASONS = {
    0x1: "idle", 0x2: "application clocks setting", 0x4: "software power cap", 0x8: "hardware slowdown",
    0x10: "sync boost", 0x20: "software thermal slowdown", 0x40: "hardware thermal slowdown",
    0x80: "hardware power brake", 0x100: "display clocks setting",
}  # fmt: skip
HARMLESS = ("idle", "application clocks setting", "display clocks setting")
NUMBERS = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.draw", "power.limit", "temperature.gpu",
           "utilization.gpu", "memory.used", "memory.total")  # fmt: skip


def query(fields: tuple[str, ...] = FIELDS) -> list[dict[str, Any]]:
    """Return one dict a GPU with the fields by nvidia-smi's names; an empty list where nvidia-smi is not there."""
    text = _smi(["--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits"])
    if text is None and fields == FIELDS:
        older = tuple(OLD_REASONS.get(f, f) for f in fields)
        text = _smi(["--query-gpu=" + ",".join(older), "--format=csv,noheader,nounits"])
    return parse(text or "", fields)


def processes() -> list[dict[str, str]]:
    """Return the compute processes on all GPUs: pid, name, memory in MiB."""
    text = _smi(["--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]) or ""
    rows = [[cell.strip() for cell in row] for row in csv.reader(io.StringIO(text)) if len(row) == 3]
    return [{"pid": row[0], "name": row[1].rsplit("/", 1)[-1], "memory_mib": row[2]} for row in rows]


def visible() -> list[str]:
    """Return nvidia-smi's option for the GPUs that this process may use: its own, where cells are timed at once."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return ["-i", chosen] if chosen.replace(",", "").isdigit() else []


def _smi(arguments: list[str]) -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        done = subprocess.run([tool, *visible(), *arguments], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def parse(text: str, fields: tuple[str, ...] = FIELDS) -> list[dict[str, Any]]:
    """Return the rows of nvidia-smi's CSV; numbers as floats, what a GPU does not know ('[N/A]') as None."""
    found = []
    for row in csv.reader(io.StringIO(text)):
        if len(row) != len(fields):
            continue
        entry: dict[str, Any] = dict(zip(fields, (cell.strip() for cell in row), strict=True))
        for key in entry.keys() & set(NUMBERS):
            try:
                entry[key] = float(entry[key])
            except ValueError:
                entry[key] = None
        found.append(entry)
    return found


def reasons(mask: str) -> list[str]:
    """Return the names in a bit mask such as 0x0000000000000004."""
    try:
        bits = int(mask, 16)
    except (TypeError, ValueError):
        return []
    return [name for bit, name in REASONS.items() if bits & bit]


def summarize(samples: list[list[dict[str, Any]]], own_pids: set[str], others: list[dict[str, str]]) -> dict[str, Any]:
    """Return per GPU the range of each number over `samples`, what throttled it, and processes that are not ours."""
    if not any(samples):
        return {"gpus": [], "not_measured": "nvidia-smi is not there"}
    gpus = []
    for index in sorted({gpu["index"] for sample in samples for gpu in sample}, key=str):
        seen = [gpu for sample in samples for gpu in sample if gpu["index"] == index]
        entry: dict[str, Any] = {"index": index, "name": seen[0]["name"], "samples": len(seen)}
        for key in NUMBERS:
            values = [gpu[key] for gpu in seen if gpu[key] is not None]
            entry[key] = {"min": min(values), "mean": round(mean(values), 1), "max": max(values)} if values else None
        used = [gpu["memory.used"] for gpu in seen if gpu["memory.used"] is not None]
        quarter = max(1, len(used) // 4)
        grown = mean(used[-quarter:]) / mean(used[:quarter]) - 1 if used and mean(used[:quarter]) else None
        entry["memory_growth_pct"] = None if grown is None else round(100 * grown, 2)
        active = [name for gpu in seen for name in reasons(gpu["clocks_event_reasons.active"])]
        entry["reasons_pct"] = {name: round(100 * active.count(name) / len(seen), 1) for name in dict.fromkeys(active)}
        entry["throttled"] = sorted({name for name in active if name not in HARMLESS})
        entry |= {key: seen[-1][key] for key in ("persistence_mode", "mig.mode.current")}
        gpus.append(entry)
    foreign = [p for p in others if p["pid"] not in own_pids]
    found: dict[str, Any] = {"gpus": gpus, "other_processes": foreign, "shared": bool(foreign)}
    if foreign and len(foreign) == len(others):
        # In a container nvidia-smi gives the host's process ids, and the server's own cannot be told from others.
        found |= {
            "shared": None,
            "not_measured": {"shared": "nvidia-smi's process ids are not those of this container"},
        }
    return found

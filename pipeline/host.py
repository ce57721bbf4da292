"""Facts about this host. The stable ones are the fingerprint that timings are tied to: a number measured on another
machine is never restored as if it had been measured on this one."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from pipeline.errors import HostError
from pipeline.specs import Target


def cpu_model() -> str:
    """Return the processor's name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """Return the instruction sets that low-precision CPU kernels look for, as /proc/cpuinfo spells them."""
    wanted = (
        "avx2",
        "avx512f",
        "avx512_vnni",
        "avx512_bf16",
        "amx_bf16",
        "amx_int8",
        "amx_tile",
        "asimd",
        "bf16",
    )
    try:
        flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return []
    return [name for name in wanted if name in flags]


def usable_cores() -> int:
    """Return how many cores this process may use (a container's share, not the machine's)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def gpus() -> list[dict[str, str]]:
    """Return name, SM, memory and driver of each GPU that nvidia-smi lists; an empty list without one."""
    query = "name,compute_cap,memory.total,driver_version"
    try:
        out = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        ).stdout  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    keys = ("name", "compute_capability", "memory", "driver")
    return [dict(zip(keys, map(str.strip, line.split(",")), strict=False)) for line in out.splitlines() if line.strip()]


def is_here(target: Target) -> bool:
    """Say whether this host can measure `target`: any host is `cpu`, a GPU target needs `count` of its GPUs."""
    if target.device == "cpu":
        return True
    return len([g for g in gpus() if _matches(target, g)]) >= target.count


def _matches(target: Target, gpu: dict[str, str]) -> bool:
    if target.device != "cuda":
        return False
    return matches(str(target.gpu), int(target.sm or 0), float(target.memory_gib or 0), gpu)


def need_target(target: Target, name: str) -> None:
    """Refuse to work for a target that this host is not.

    Raises:
        HostError: fewer GPUs of the target's kind are here than it has.
    """
    if not is_here(target):
        have = ", ".join(g["name"] for g in gpus()) or "no GPU"
        raise HostError(f"Target {name} is {target.count} x {target.gpu}; this host has {have}. Run this stage there.")


def matches(gpu: str, sm: int, memory_gib: float, found: dict[str, str]) -> bool:
    """Say whether a GPU that nvidia-smi lists is the target's: its SM, every word of its model, its memory to 15%.

    The memory tells an A100 of 40 GB from one of 80, the words an RTX 4090 from another GeForce of the same SM.
    """
    words = [w for w in gpu.upper().split() if w not in ("NVIDIA", "SXM", "PCIE") and not w.endswith("GB")]
    have = found.get("name", "").upper().replace("-", " ").split()
    mib = float(re.sub(r"[^0-9.]", "", found.get("memory", "")) or 0)
    same_memory = abs(mib / 1024 - memory_gib) <= 0.15 * memory_gib
    return all(w in have for w in words) and found.get("compute_capability") == f"{sm / 10:.1f}" and same_memory


def _machine_id() -> str:
    """Return a short hash that tells machines apart without naming them."""
    try:
        seed = Path("/etc/machine-id").read_text(encoding="utf-8").strip()
    except OSError:
        seed = ""
    return hashlib.sha256(f"{seed}|{socket.gethostname()}".encode()).hexdigest()[:12]


def fingerprint() -> dict[str, Any]:
    """Return the stable facts: what must be equal for two timings to be comparable."""
    return {
        "schema": "quantpress.host/1",
        "cpu": cpu_model(),
        "cpu_features": cpu_features(),
        "cores": usable_cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "os": f"{platform.system()} {platform.machine()}",
        "gpus": gpus(),
        "machine": _machine_id(),
    }


def kind(target: Target, facts: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what two machines of one kind share: a lent GPU host is another one each time and still the same target.

    Only the target's own GPUs count: a host may have more of them, and with them more cores. Memory is left out,
    because a virtual machine's grows as it is used; of the driver only the branch counts. `facts`: a fingerprint, this
    host's without it.
    """
    facts = facts or fingerprint()
    same = ("name", "compute_capability", "memory")
    mine = [g for g in facts["gpus"] if _matches(target, g)]
    seen = [{k: g[k] for k in same if k in g} | {"driver": g.get("driver", "").split(".")[0]} for g in mine]
    found = {"schema": "quantpress.kind/2", "cpu": facts["cpu"], "gpus": seen[: target.count]}
    return found if seen else found | {"cores": facts["cores"]}


def now() -> str:
    """Return the time in UTC as ISO 8601 to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def load_average() -> list[float]:
    """Return the 1, 5 and 15 minute load, to tell a busy host from a quiet one beside a timing."""
    return [round(x, 2) for x in os.getloadavg()]


def git_commit(root: Path = Path(".")) -> str:
    """Return the commit of `root`, with '+changes' when tracked files differ, or 'unknown' outside git.

    QUANTPRESS_COMMIT wins: who copies a tree to a machine that is only lent knows which one it is, and what git finds
    there, if anything, can be another one.
    """
    if named := os.environ.get("QUANTPRESS_COMMIT"):
        return named
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no", "--", "pipeline", "stages", "params.yaml"],
            cwd=root, capture_output=True, text=True, check=True, timeout=60,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return commit + ("+changes" if dirty else "")

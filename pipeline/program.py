"""What every stage program shares: one clear sentence and an exit code on failure, and the record of versions."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from pipeline.errors import QuantpressError, WorkError
from pipeline.runstage import ERROR_PREFIX


def run_main(main: Callable[[], None]) -> None:
    """Run `main` and exit: 0 done, else the error's own code with its sentence as the last line of stderr."""
    try:
        main()
    except QuantpressError as error:
        print(f"{ERROR_PREFIX}{error}", file=sys.stderr, flush=True)
        _leave(error.exit_code)
    except KeyboardInterrupt:
        print(f"{ERROR_PREFIX}stopped by the user; nothing half-written was kept.", file=sys.stderr, flush=True)
        _leave(1)
    except Exception as error:
        traceback.print_exc()
        print(f"{ERROR_PREFIX}{sentence(error)}", file=sys.stderr, flush=True)
        _leave(1)
    _leave(0)


def sentence(error: BaseException) -> str:
    """Return what to say of an error that is none of this project's own.

    A full disk gets its advice whoever met it: libraries written in Rust raise errors of their own for it.
    """
    said = first_line(error)
    if getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
        return (
            f"The disk under {Path.cwd()} is full ({said}). Nothing half-written was kept: free some space "
            "(`uv run dvc gc -w` drops unused artifacts) and run `uv run dvc repro` again."
        )
    return f"{said}." if isinstance(error, OSError) else f"{type(error).__name__}: {said}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type when it has none."""
    text = str(error).strip()
    return text.splitlines()[0][:400] if text else type(error).__name__


def _leave(code: int) -> None:
    """Exit without waiting for the threads that quantizers and clients leave behind."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def versions(*names: str) -> dict[str, str]:
    """Return the installed version of each distribution that is installed here."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def lock_sha256(env: str) -> str:
    """Return the sha256 of an environment's lock: what a result was made with, to the last package.

    Raises:
        WorkError: the lock is missing.
    """
    path = Path("stages") / env / "uv.lock"
    if not path.is_file():
        raise WorkError(f"{path} is missing: run `uv lock --project stages/{env}`.")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def lock_hashes(*environments: str | None) -> dict[str, str]:
    """Return the lock's sha256 of each environment of stages/; what a user brings (TensorRT-LLM) has none here."""
    return {env: lock_sha256(env) for env in environments if env and (Path("stages") / env).is_dir()}

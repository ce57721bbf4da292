"""Start a command so that it can never outlive the program that wanted it.

`Guarded(...)` starts this file as a small watcher. The watcher holds the read end of a pipe whose only write end is in
the starter, runs the command in a session of its own, and ends the whole process group when the pipe closes: after
`stop()`, after Ctrl-C, after a crash, and after `kill -9` of the starter, which no handler could catch.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO

GRACE_S = 15.0


class Guarded:
    """A running command whose process group ends with this process.

    Attributes:
        process: the watcher; its exit code is the command's (128 + N for signal N).
    """

    def __init__(self, command: list[str], env: dict[str, str], log: IO[bytes], cwd: Path | None = None) -> None:
        """Start `command` with the environment `env`; standard output and error go to `log`."""
        read_end, self._write_end = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-I", str(Path(__file__).resolve()), str(read_end), *command],
                env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                pass_fds=[read_end], start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(read_end)

    def stop(self) -> int:
        """End the process group (TERM, then KILL after GRACE_S seconds) and return the exit code."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1
        return self.process.wait()

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End every process of the child's session, also those that ignore TERM."""
    for sig, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(child.pid, sig)
        except (ProcessLookupError, PermissionError):
            return
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            child.poll()
            try:
                os.killpg(child.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.1)


def _die_with_watcher() -> None:
    """Ask Linux to end the command when the watcher itself is killed; other systems have no such call."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def watch(pipe: int, command: list[str]) -> int:
    """Run `command` until it ends or until `pipe` closes; return its exit code."""
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A handler, not SIG_IGN: an ignored signal would be inherited by the command.
        signal.signal(sig, lambda *_: None)
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_die_with_watcher
        )
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr, flush=True)
        return 127
    while child.poll() is None:
        ready, _, _ = select.select([pipe], [], [], 0.2)
        if ready and not os.read(pipe, 1):
            break
    _end_group(child)
    code = child.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(watch(int(sys.argv[1]), sys.argv[2:]))

"""Processes: nothing outlives its starter, a server's death and silence are told in one sentence, logs are read."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline import runstage, serving
from pipeline.errors import InputError, WorkError
from pipeline.guard import Guarded
from pipeline.package import Cell
from pipeline.params import load_params
from pipeline.program import sentence

ROOT = Path(__file__).parents[2]
# A family: a child and a grandchild that ignore TERM, as stuck engine processes do.
FAMILY = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
grandchild = subprocess.Popen([sys.executable, "-c", "import signal,time; signal.signal(15,1); time.sleep(300)"])
open(sys.argv[1], "w").write(f"{os.getpid()} {grandchild.pid}")
time.sleep(300)
"""


def _wait_for(condition: object, seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.05)
    return False


def _pids(path: Path) -> list[int]:
    assert _wait_for(lambda: path.exists() and len(path.read_text().split()) == 2)
    return [int(x) for x in path.read_text().split()]


def _gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(p) and psutil.Process(p).status() != "zombie" for p in pids)


def test_stop_ends_the_whole_group_even_if_it_ignores_term(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "log").open("wb") as log:
        job = Guarded([sys.executable, "-c", FAMILY, str(tmp_path / "pids")], dict(os.environ), log)
        pids = _pids(tmp_path / "pids")
        assert not _gone(pids)
        job.stop()
    assert _gone(pids)


def test_kill_9_of_the_starter_ends_the_group(tmp_path: Path) -> None:
    code = (
        "import os, sys, time\n"
        "from pipeline.guard import Guarded\n"
        f"job = Guarded([sys.executable, '-c', {FAMILY!r}, {str(tmp_path / 'pids')!r}], dict(os.environ), "
        f"open({str(tmp_path / 'log')!r}, 'wb'))\n"
        "time.sleep(300)\n"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    pids = _pids(tmp_path / "pids")
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    assert _wait_for(lambda: _gone(pids), 40)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a child with its parent")
def test_kill_9_of_the_watcher_ends_the_command(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        job = Guarded([sys.executable, "-c", FAMILY, str(tmp_path / "pids")], dict(os.environ), log)
        command, grandchild = _pids(tmp_path / "pids")
        job.process.kill()
        assert _wait_for(lambda: _gone([command]), 20)
        job.stop()
        os.kill(grandchild, signal.SIGKILL)


def test_the_exit_code_is_the_commands(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        job = Guarded([sys.executable, "-c", "import sys; sys.exit(3)"], dict(os.environ), log)
        assert job.process.wait(30) == 3
        job = Guarded(["/no/such/program"], dict(os.environ), log)
        assert job.process.wait(30) == 127


LOG = """
INFO [__init__.py:846] Selected CPUInt8ScaledMMLinearKernel for CompressedTensorsW8A8Int8
INFO [__init__.py:923] Using CPUWNA16LinearKernel for mixed-precision linear
INFO [compressed_tensors_wNa16.py:138] Using CPUWNA16LinearKernel for CompressedTensorsWNA16
INFO [kv_cache_utils.py:2327] CPU KV cache size: 46,592 tokens, Maximum concurrency for 2,048 tokens per request: 22.75x
INFO [cuda.py:1] Using FLASH_ATTN attention backend out of potential backends
"""


def test_kernels_are_read_from_the_log() -> None:
    found = serving.read_log(LOG)
    assert found["kernels"] == ["CPUInt8ScaledMMLinearKernel", "CPUWNA16LinearKernel"]
    assert found["kv_cache_tokens"] == 46592
    assert found["attention_backend"] == "FLASH_ATTN"
    assert serving.read_log("nothing")["kernels"] == []


def test_the_cause_of_death_is_the_first_error_not_the_last(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "ERROR ValueError: Model architectures ['Nope'] are not supported for now.\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n",
        encoding="utf-8",
    )
    assert serving.death_reason(log) == "ValueError: Model architectures ['Nope'] are not supported for now."
    log.write_text(
        "(APIServer pid=1) WARNING 11-30 [system_utils.py:255] This can cause OSError: [Errno 24] Too many open files\n"
        "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
        "(APIServer pid=1)   Value error, User-specified max_model_len (100000000) is greater than 8192\n"
        "(APIServer pid=1) For further information visit ...\n",
        encoding="utf-8",
    )
    assert "max_model_len (100000000) is greater than 8192" in serving.death_reason(log)
    assert "Errno 24" not in serving.death_reason(log)
    log.write_text("", encoding="utf-8")
    assert "wrote nothing" in serving.death_reason(log)


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    import socket

    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        with pytest.raises(InputError, match=r"Port \d+ is in use"):
            serving.check_port(busy.getsockname()[1])


def _server(tmp_path: Path, program: str) -> serving.Server:
    """Return a Server whose process is `program`: the plumbing of death, silence and errors, not a model."""
    server = serving.Server(
        Cell("smollm2-135m", "bf16", "vllm", "cpu"),
        load_params(ROOT / "params.yaml"),
        tmp_path / "log",
        threads=1,
    )
    server._sink = server.log.open("wb")
    server._start = time.monotonic()
    server._job = Guarded([sys.executable, "-c", program, str(server.port)], dict(os.environ), server._sink)
    return server


HTTP = """
import http.server, os, sys, time
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        %s
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), H).serve_forever()
"""


@pytest.mark.parametrize(("action", "message"), [
    ("print('MemoryError: no room', flush=True); os._exit(9)", r"exit code 9 during /v1/x: MemoryError: no room"),
    ("time.sleep(60)", r"did not answer /v1/x within 2 s"),
    ("self.send_response(500); self.end_headers(); self.wfile.write(b'boom')", r"answered 500 to /v1/x: boom"),
    ("self.send_response(200); self.end_headers(); self.wfile.write(b'half of a js')", r"did not answer /v1/x"),
])  # fmt: skip
def test_a_server_that_dies_hangs_or_errs_half_way_is_told(action: str, message: str, tmp_path: Path) -> None:
    server = _server(tmp_path, HTTP % action)
    try:
        server.wait_ready(30)
        with pytest.raises(WorkError, match=message):
            server.request("/v1/x", {}, timeout_s=2)
    finally:
        server.__exit__(None, None, None)


def test_a_server_that_never_gets_ready_or_dies_at_start_is_told(tmp_path: Path) -> None:
    server = _server(tmp_path, "import time; time.sleep(60)")
    try:
        with pytest.raises(WorkError, match="was not ready after 1 s"):
            server.wait_ready(1)
    finally:
        server.__exit__(None, None, None)
    server = _server(tmp_path, "raise SystemExit('ValueError: bad config')")
    try:
        with pytest.raises(WorkError, match="while it started: ValueError: bad config"):
            server.wait_ready(30)
    finally:
        server.__exit__(None, None, None)


def test_unknown_environment_gives_the_nearest() -> None:
    with pytest.raises(InputError, match="no environment 'llmcompresor'.*Did you mean 'llmcompressor'"):
        runstage.env_python("llmcompresor")


def test_a_full_disk_is_found_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runstage, "disk_free_bytes", lambda path: 10**6)
    with pytest.raises(WorkError, match=r"needs 1\.0 GB of disk and 0\.0 GB are free.*dvc repro"):
        runstage.need_disk(10**9, "Quantizing m.r")


def test_progress_lines_take_carriage_returns_as_line_ends(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"start\n\x1b[32m 10% eta 5 s\r 20% eta 4 s\r\n")
    assert runstage.last_line(log) == "20% eta 4 s"


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device", "model.safetensors"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_told_with_what_to_do_whoever_met_it(error: Exception) -> None:
    said = sentence(error)
    assert said.startswith("The disk under ") and " is full (" in said
    assert "dvc gc -w" in said and "dvc repro" in said


def test_other_errors_keep_their_own_words() -> None:
    assert sentence(FileNotFoundError(2, "No such file or directory", "a")) == (
        "[Errno 2] No such file or directory: 'a'."
    )
    assert sentence(KeyError("x")) == "KeyError: 'x'"

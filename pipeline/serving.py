"""Start the real server of a package, wait for it, read its log, stop its whole process group."""

from __future__ import annotations

import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import yaml

from pipeline import host
from pipeline.errors import HostError, InputError, WorkError
from pipeline.guard import Guarded
from pipeline.manifest import verify
from pipeline.package import Cell, server_arguments, server_environment, server_variables
from pipeline.runstage import child_env, env_python, installation
from pipeline.specs import Params
from pipeline.trtllm import serving as trtllm
from pipeline.trtllm.planning import TENSORRT_LLM
from pipeline.trtllm.probe import Environment

READY_TIMEOUT_S = 900.0
# What a server's log says of the kernels it chose. One table for every runtime that writes such lines.
LOG_FACTS = {
    "kernels": re.compile(r"(?:Selected|Using) (\w*(?:Linear|ScaledMM)\w*|Machete\w*|Marlin\w*|Cutlass\w*) for (\w+)"),
    "attention_backend": re.compile(r"Using (\w+) (?:attention )?backend|Using AttentionBackendEnum\.(\w+)"),
    "kv_cache_tokens": re.compile(r"KV cache size: ([\d,]+) tokens|max tokens in paged KV cache \(([\d,]+)\)"),
}
FALLBACKS = re.compile(r"emulat|fall(?:ing)? ?back|not supported.*using", re.IGNORECASE)


class Change(NamedTuple):
    """Options and variables, in the server's own names, that one start has beside its package's, to try them out."""

    options: dict[str, Any]
    variables: dict[str, str]


class Server:
    """One running server on loopback. Use as a context manager; `wait_ready` before the first request."""

    def __init__(
        self, cell: Cell, params: Params, log: Path, threads: int, stand_in: bool = False, change: Change | None = None
    ) -> None:
        """Describe the server; `threads` are the compute threads that a CPU runtime gets, `change` what differs.

        `stand_in` lets something else than TensorRT-LLM serve (tests of the plumbing); its facts say `genuine: false`.
        """
        self.cell, self.log = cell, log
        self._stand_in = stand_in
        self._change = change
        self._brought: Environment | None = None
        self.target = cell.check(params)
        self.threads = threads
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.startup_s: float | None = None
        self._sink: IO[bytes] | None = None
        self._job: Guarded | None = None
        self._start = 0.0

    def __enter__(self) -> Server:
        """Verify the package against its manifest, then start the server without waiting for it.

        Raises:
            InputError, WorkError: the package or its checkpoint is not whole.
            HostError: this host is not the target, or no environment here serves the runtime.
        """
        host.need_target(self.target, self.cell.target)
        manifest = verify(self.cell.deploy)
        env = server_environment(self.cell, self.target)
        if self.cell.runtime in TENSORRT_LLM:
            self._brought = trtllm.ready_to_start(self.cell, manifest, host.gpus(), self._stand_in)
        elif env is None:
            raise HostError(f"No environment here serves {self.cell.runtime} on {self.cell.target}.")
        check_port(self.port)
        variables = server_variables(self.cell.runtime, self.target.device)
        if self.target.device == "cpu":
            variables = variables | {"OMP_NUM_THREADS": str(self.threads)}
        checkpoint = Path(manifest["checkpoint"]["path"])
        arguments = server_arguments(self.cell, self.target, checkpoint, "127.0.0.1", self.port)
        if self._change:
            variables = variables | self._change.variables
            arguments = changed(arguments, self.cell.deploy / "serve.yaml", self._change.options, self.log)
        seen = {k: os.environ[k] for k in ("CUDA_VISIBLE_DEVICES",) if k in os.environ and k not in variables}
        self.command = " ".join([*(f"{k}={v}" for k, v in (seen | variables).items()), *arguments])
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self._sink = self.log.open("wb")
        self._start = time.monotonic()
        # The command begins with `python`: the one of the environment that holds the runtime, if none is brought.
        command = arguments if env is None else [env_python(env), *arguments[1:]]
        self._job = Guarded(command, child_env(**variables), self._sink)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._job:
            self._job.stop()
        if self._sink:
            self._sink.close()

    @property
    def pid(self) -> int | None:
        """The process above the server's, or None before it was started."""
        return self._job.process.pid if self._job else None

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until /health answers.

        Raises:
            WorkError: it died or was not ready in time; with the line of its log that says why.
        """
        while time.monotonic() - self._start < timeout_s:
            self.check_alive("while it started")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                    if answer.status == 200:
                        self.startup_s = round(time.monotonic() - self._start, 1)
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        raise WorkError(f"The server of {self.cell.name} was not ready after {timeout_s:.0f} s; its log is {self.log}.")

    def check_alive(self, when: str) -> None:
        """Raise a WorkError with the log's own reason when the server has ended."""
        if self._job is None or self._job.process.poll() is None:
            return
        code = self._job.process.returncode
        raise WorkError(
            f"The server of {self.cell.name} ended with exit code {code} {when}: {death_reason(self.log)} "
            f"Its log is {self.log}."
        )

    def request(self, path: str, body: dict[str, Any], timeout_s: float = 300.0) -> dict[str, Any]:
        """POST a JSON body to the OpenAI-compatible API and return the answer.

        Raises:
            WorkError: the server died, hangs past `timeout_s`, or answers with an error.
        """
        data = json.dumps(body).encode()
        query = urllib.request.Request(f"{self.url}{path}", data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(query, timeout=timeout_s) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")[:300]
            raise WorkError(f"The server of {self.cell.name} answered {error.code} to {path}: {text}") from None
        except (urllib.error.URLError, OSError, ValueError) as error:
            time.sleep(1.0)
            self.check_alive(f"during {path}")
            raise WorkError(
                f"The server of {self.cell.name} did not answer {path} within {timeout_s:.0f} s "
                f"({error}); log {self.log}."
            ) from None

    def facts(self) -> dict[str, Any]:
        """Return what is known of the running server: version, kernels, attention backend, cache size, command."""
        try:
            with urllib.request.urlopen(f"{self.url}/version", timeout=10) as answer:
                version = json.load(answer).get("version")
        except (urllib.error.URLError, OSError, ValueError):
            version = None
        env = server_environment(self.cell, self.target)
        return {
            "runtime": self.cell.runtime,
            "version": version,
            "environment": env,
            "installation": installation(env) if env else None,
            **(trtllm.facts(self._brought) if self._brought else {}),
            **read_log(self.log.read_text(encoding="utf-8", errors="replace")),
            "command": self.command,
            "threads": self.threads,
            "startup_s": self.startup_s,
            "log": self.log.as_posix(),
        }


def changed(arguments: list[str], serve: Path, options: dict[str, Any], log: Path) -> list[str]:
    """Return a server's arguments with `options` over those of its serve.yaml, in a file of their own beside the log.

    Raises:
        InputError: the server does not read a serve.yaml.
    """
    if not options:
        return arguments
    if serve.as_posix() not in arguments:
        raise InputError(f"This runtime's server reads no {serve}; its options cannot be tried out.")
    own = yaml.safe_load(serve.read_text(encoding="utf-8")) or {}
    # An option of null is taken away: `no-enable-prefix-caching: null`.
    merged = {name: value for name, value in (own | options).items() if value is not None}
    file = log.with_suffix(".serve.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(merged), encoding="utf-8")
    return [file.as_posix() if word == serve.as_posix() else word for word in arguments]


def no_prompt_logprobs(runtime: str) -> str | None:
    """Return why a runtime's server scores no prompts, or None where it does."""
    return trtllm.NO_PROMPT_LOGPROBS if runtime in TENSORRT_LLM else None


def read_log(text: str) -> dict[str, Any]:
    """Return kernels, attention backend, KV cache tokens and fallback lines that a server's log names."""
    kernels = sorted({match[1] for match in LOG_FACTS["kernels"].finditer(text)})
    backend = LOG_FACTS["attention_backend"].search(text)
    tokens = LOG_FACTS["kv_cache_tokens"].search(text)
    notes = [line.strip()[-200:] for line in text.splitlines() if FALLBACKS.search(line) and "non-default" not in line]
    return {
        "kernels": kernels,
        "attention_backend": (backend[1] or backend[2]) if backend else None,
        "kv_cache_tokens": int((tokens[1] or tokens[2]).replace(",", "")) if tokens else None,
        "fallback_notes": notes[:5],
    }


def death_reason(log: Path) -> str:
    """Return the most telling error line of a server's log: the first exception, not the last."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    # vLLM warns of a low limit of open files with the text of the error that may follow from it.
    text = "\n".join(line for line in lines if " WARNING " not in line)
    # pydantic says in the two lines after its first which field is wrong and how.
    pydantic = r"(?:\w+\.)*ValidationError: (?:.*\n){2}.*"
    errors = r"(?:\w+\.)*\w*(?:Error|Exception)\b: .*|.*address already in use.*|.*Killed.*"
    pattern = re.compile(rf"({pydantic}|{errors}|\[(?:TRT|TensorRT)-LLM\] ?\[E.*)")
    found = [
        " ".join(match[1].split())
        for match in pattern.finditer(text)
        if "Engine core initialization failed" not in match[1]
    ]
    if found:
        return found[0][:300].rstrip(".") + "."
    last = [line for line in lines if line.strip()]
    return (last[-1].strip()[:300] if last else "it wrote nothing") + "."


def free_port() -> int:
    """Return a port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def check_port(port: int) -> None:
    """Raise an InputError when something listens on `port` already: its answers would be measured instead of ours."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise InputError(
                f"Port {port} is in use. Leave the port out to get a free one, or stop what listens."
            ) from None

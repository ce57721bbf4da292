"""What the user's TensorRT-LLM environment is: versions, GPU and driver, asked of it and not guessed.

The environment is on PATH, or behind a prefix from params.yaml (a container command, an activated shell). One Python
program is run in it; what it prints is kept with every engine, so that an engine or a result of something that is not
TensorRT-LLM can be told apart.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pipeline.errors import HostError
from pipeline.trtllm.version import parse

MARK = "quantpress-trtllm-probe:"
PROGRAM = f"""
import importlib.metadata as m, json
def version(name):
    try: return m.version(name)
    except Exception: return None
found = {{"tensorrt_llm": version("tensorrt_llm") or version("tensorrt-llm"), "tensorrt": version("tensorrt"),
         "torch": version("torch"), "modelopt": version("nvidia-modelopt"), "cuda": None, "files": 0}}
try: found["files"] = len(m.distribution("tensorrt_llm").files or ())
except Exception: pass
try:
    import torch
    found["cuda"] = torch.version.cuda
except Exception: pass
print("{MARK}" + json.dumps(found))
"""
TIMEOUT_S = 300.0
# A real wheel has thousands of files; what claims to be TensorRT-LLM with a handful is a stand-in.
FEWEST_FILES = 200


class Environment(NamedTuple):
    """A probed environment. `tensorrt_llm` is None where it is not installed; `genuine`: see `is_genuine`."""

    tensorrt_llm: str | None
    tensorrt: str | None
    cuda: str | None
    driver: str | None
    gpu: str | None
    sm: int | None
    gpu_count: int
    genuine: bool

    def facts(self) -> dict[str, Any]:
        """Return the environment as plain data."""
        return self._asdict()


def probe(prefix: Sequence[str], gpus: Sequence[Mapping[str, str]], python: str = "python3") -> Environment:
    """Ask the environment behind `prefix` what it is; `gpus` as `host.gpus()` lists them.

    Raises:
        HostError: there is no such command, or it does not answer within five minutes.
    """
    command = [*prefix, python, "-c", PROGRAM]
    if not shutil.which(command[0]):
        raise HostError(
            f"'{command[0]}' is not on PATH. Activate the environment that holds TensorRT-LLM, or set its container "
            "command as trtllm.<runtime>.prefix in params.yaml."
        )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HostError(
            f"The TensorRT-LLM environment did not answer ({type(error).__name__}): {command[0]}."
        ) from None
    return read_probe(done.stdout, done.stderr, gpus)


def read_probe(stdout: str, stderr: str, gpus: Sequence[Mapping[str, str]]) -> Environment:
    """Turn what the program printed into an Environment.

    Raises:
        HostError: it printed no line of its own.
    """
    line = next((text for text in stdout.splitlines() if text.startswith(MARK)), None)
    if line is None:
        said = (stderr.strip().splitlines() or ["nothing"])[-1][:200]
        raise HostError(f"The TensorRT-LLM environment did not answer the version probe; it said: {said}")
    found = json.loads(line[len(MARK) :])
    gpu = gpus[0] if gpus else {}
    capability = gpu.get("compute_capability", "")
    return Environment(
        found.get("tensorrt_llm"), found.get("tensorrt"), found.get("cuda"), gpu.get("driver"), gpu.get("name"),
        round(float(capability) * 10) if capability.replace(".", "").isdigit() else None, len(gpus), is_genuine(found),
    )  # fmt: skip


def is_genuine(found: Mapping[str, Any]) -> bool:
    """Say whether what was probed is an installed TensorRT-LLM: a distribution of its size, and torch for CUDA.

    Engines and results of anything else are marked and never shown as measured.
    """
    return bool(
        found.get("tensorrt_llm") and found.get("torch") and found.get("cuda") and found.get("files", 0) >= FEWEST_FILES
    )


def need_version(found: Environment, wanted: str, runtime: str) -> None:
    """Refuse an environment without TensorRT-LLM, or with another version than the plan's.

    Raises:
        HostError: with both versions.
    """
    if found.tensorrt_llm is None:
        raise HostError(
            f"TensorRT-LLM is not installed in the environment that was given for {runtime}; {wanted} is planned. "
            f"Install it there, or set trtllm.{runtime}.prefix in params.yaml to a container that has it."
        )
    if parse(found.tensorrt_llm) != parse(wanted):
        raise HostError(
            f"The environment has TensorRT-LLM {found.tensorrt_llm} and the plan says {wanted}. Use its "
            "environment, or "
            f"set trtllm.{runtime}.version: {found.tensorrt_llm} in params.yaml and make the plan again."
        )

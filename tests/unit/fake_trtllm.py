"""A host with a GPU and TensorRT-LLM on PATH, both made up: they prove the plumbing and nothing else.

Every number that they give is marked: the version probe finds no installed TensorRT-LLM, so `genuine` is false.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from packers import editing_json, make_source
from packing_ranks import make_ranks

from pipeline import jsonio
from pipeline.cells import Cell
from pipeline.params import load_params
from pipeline.specs import Params
from pipeline.trtllm.proof import prove

ROOT = Path(__file__).parents[2]
ENGINE = Cell("tiny", "fp8", "trtllm-engine", "l40s")
BUNDLE = Cell("tiny", "bf16", "trtllm-bundle", "l40s")
L40S = "NVIDIA L40S, 8.9, 46068 MiB, 580.65.06"
PROBE = {
    "tensorrt_llm": "1.2.1",
    "tensorrt": "10.13.3.9",
    "torch": "2.9.1",
    "modelopt": None,
    "cuda": "13.0",
    "files": 3,
}

PYTHON3 = """#!{python}
import os, sys
if os.environ.get("FAKE_PROBE", "") == "none": sys.exit("ModuleNotFoundError: No module named 'x'")
print("quantpress-trtllm-probe:" + os.environ["FAKE_PROBE"])
"""
NVIDIA_SMI = """#!{python}
import os
print(os.environ.get("FAKE_GPUS", ""))
"""
BUILD = """#!{python}
import json, os, pathlib, signal, sys, time
mode, args = os.environ.get("FAKE_BUILD", "ok"), sys.argv[1:]
out = pathlib.Path(args[args.index("--output_dir") + 1])
out.mkdir(parents=True, exist_ok=True)
print("[TRT-LLM] [I] fake build", args, flush=True)
(out / "rank0.engine").write_bytes(b"half")
if mode == "fail": sys.exit("RuntimeError: Required but not provided tensors: {{'transformer.ln_f.weight'}}")
if mode == "hang": time.sleep(600)
if mode == "kill": os.kill(os.getpid(), signal.SIGKILL)
if mode == "disk": sys.exit("OSError: [Errno 28] No space left on device")
if mode == "memory": sys.exit("torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB")
if mode == "empty":
    (out / "rank0.engine").unlink()
    sys.exit(0)
(out / "rank0.engine").write_bytes(os.urandom(64))
(out / "config.json").write_text(json.dumps({{"build_config": {{}}}}))
pathlib.Path(args[args.index("--output_timing_cache") + 1]).write_text("cache")
"""
SERVE = """#!{python}
import http.server, json, os, sys
args = sys.argv[1:]
if os.environ.get("FAKE_SERVE") == "die":
    print("[TensorRT-LLM][ERROR] Engine world size (2 * 1) != Runtime world size (1)", flush=True); sys.exit(1)
print("[TensorRT-LLM][INFO] [MemUsageChange] Allocated 1.00 GiB for max tokens in paged KV cache (12,345).", flush=True)
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
        if self.path == "/version": self.wfile.write(b'{{"version": "1.2.1"}}')
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        extra = set(body) - {{"model", "prompt", "max_tokens", "temperature", "stream", "ignore_eos", "min_tokens"}}
        self.send_response(400 if extra else 200); self.end_headers()
        text = "" if os.environ.get("FAKE_SERVE") == "mute" else "red, green, blue"
        self.wfile.write(json.dumps({{"choices": [{{"text": text}}]}} if not extra else sorted(extra)).encode())
    def log_message(self, *a): pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(args[args.index("--port") + 1])), H).serve_forever()
"""


class FakeHost:
    """A working directory with a tiny model, its exported checkpoint and made-up tools on PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch = folder, monkeypatch
        monkeypatch.chdir(folder)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for name, text in {
            "python3": PYTHON3,
            "nvidia-smi": NVIDIA_SMI,
            "trtllm-build": BUILD,
            "trtllm-serve": SERVE,
        }.items():
            (self.bin / name).write_text(text.format(python=sys.executable))
            (self.bin / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{self.bin}{os.pathsep}/usr/bin{os.pathsep}/bin")
        self.is_here()
        self.source = make_source(Path("artifacts/models/tiny"))
        with editing_json(self.source / "config.json") as config:
            config["max_position_embeddings"] = 8192
        raw = yaml.safe_load((ROOT / "params.yaml").read_text(encoding="utf-8"))
        raw["models"]["tiny"] = {"source": "dir:artifacts/models/tiny", "instruct": False}
        raw["benchmark"], raw["benchmark_gpu"] = ["smoke-64-16"], []
        for target in raw["targets"].values():
            target.pop("workloads", None)
        self.raw = raw
        self.export()
        jsonio.write_json(Path("artifacts/results/tiny.bf16/lint.json"), {"passed": True})

    def is_here(self, gpus: str = L40S, **changes: Any) -> None:
        """Say which GPUs nvidia-smi lists and what the version probe finds."""
        self._patch.setenv("FAKE_GPUS", gpus)
        self._patch.setenv("FAKE_PROBE", json.dumps(PROBE | changes))

    def mode(self, build: str = "ok", serve: str = "ok") -> None:
        """Say how the made-up tools behave."""
        self._patch.setenv("FAKE_BUILD", build)
        self._patch.setenv("FAKE_SERVE", serve)

    def export(self, tp: int = 1, fmt: str = "fp8-tensor", recipe: str = "fp8") -> Path:
        """Write the TensorRT-LLM checkpoint of the tiny model and its proof."""
        name = f"tiny.{recipe}.modelopt-trtllm" + ("" if tp == 1 else f".tp{tp}pp1")
        folder = make_ranks(Path("artifacts/checkpoints") / name, self.source, fmt, tp)
        jsonio.write_json(Path("artifacts/results") / name / "lint.json", prove(folder, self.source, fmt, None))
        return folder

    def params(self, **sections: Any) -> Params:
        """Return the params with some sections changed: `serving={"trtllm-engine-cuda": {...}}`."""
        for section, value in sections.items():
            self.raw[section] = {**self.raw.get(section, {}), **value}
        Path("params.yaml").write_text(yaml.safe_dump(self.raw, sort_keys=False), encoding="utf-8")
        return load_params(Path("params.yaml"))

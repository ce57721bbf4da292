"""The load-and-warm proof: a packaged cell loads on its GPU and answers; without that GPU, why it was not measured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import host, jsonio
from pipeline.cells import Cell
from pipeline.errors import HostError, WorkError
from pipeline.specs import Params
from pipeline.trtllm.package import read_plan

SCHEMA = "quantpress.warm/1"
QUESTION = "Name three colours."


def result_path(cell: Cell) -> Path:
    """Return where the proof is kept."""
    return Path("artifacts/results") / cell.name / "warm.json"


def said(manifest: Mapping[str, Any]) -> str:
    """Return what is known of loading a packaged cell: the proof of this checkpoint, else why there is none."""
    path = result_path(Cell.parse(str(manifest["cell"])))
    if path.is_file():
        made = jsonio.read_json(path)
        if made.get("checkpoint") == manifest["checkpoint"]["digest"]:
            return str(made["state"])
        return "not measured (the last proof is of another checkpoint)"
    return str(manifest["trtllm"]["load_and_warm"])


def warm(cell: Cell, params: Params, stand_in: bool = False) -> dict[str, Any]:
    """Start the server of a packaged cell, wait until it answers, ask one question; return the proof.

    A host that cannot do it gives a proof that says so: `state` is then `not measured (reason)`.

    Raises:
        InputError: the cell is not packaged.
        WorkError: the server came up and gave no text, or died.
    """
    from pipeline.serving import Server

    read_plan(cell)
    log = Path(".quantpress/logs") / f"warm.{cell.name}.log"
    digest = jsonio.read_json(cell.deploy / "manifest.json")["checkpoint"]["digest"]
    head = {"schema": SCHEMA, "cell": cell.name, "checkpoint": digest, "host": host.fingerprint(), "at": host.now()}
    try:
        with Server(cell, params, log, threads=1, stand_in=stand_in) as server:
            server.wait_ready()
            start = time.monotonic()
            body = {"model": cell.model, "prompt": QUESTION, "max_tokens": 16, "temperature": 0}
            text = server.request("/v1/completions", body)["choices"][0]["text"]
            seconds = time.monotonic() - start
            facts = server.facts()
    except HostError as error:
        made = head | {"state": f"not measured ({str(error).rstrip('.')})", "server": None}
        jsonio.write_json(result_path(cell), made)
        return made
    if not str(text).strip():
        raise WorkError(f"The server of {cell.name} loaded and answered with no text; its log is {log}.")
    genuine = facts.get("genuine") is True
    state = (
        f"loaded in {facts['startup_s']} s and answered in {seconds:.2f} s"
        if genuine
        else "not measured (a stand-in answered)"
    )
    made = {**head, "state": state, "server": facts}
    jsonio.write_json(result_path(cell), made)
    return made

"""How a cell scales over the GPUs of one host: one server over all of them, and one server on each at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.speed.points import LATENCIES, side
from pipeline.speed.steady import Row
from pipeline.speed.workloads import Point

SCHEMA = "quantpress.scaling/1"


def point(load: Point, gpus: int, alone: list[list[Row]], together: Mapping[str, list[Row]],
          parallel: list[list[Row]]) -> dict[str, Any]:  # fmt: skip
    """Return one load: throughput alone, of one server per GPU at once, and of one server over all GPUs.

    `concurrency` is that of one server; the servers that run at once have that load each.

    Args:
        load: the load point.
        gpus: GPUs of the host.
        alone: legs of one server on one GPU while the others are idle.
        together: per GPU the leg of its server while every GPU's server is loaded.
        parallel: legs of one server over all GPUs (tensor parallel).

    Returns:
        `efficiency.cells`: tokens/s of all servers at once over `gpus` times alone; `efficiency.tensor_parallel`:
        tokens/s of the one server over `gpus` times alone; `speedup.tensor_parallel` and its ratios of latency, where
        less is better. None where a side was not measured.
    """
    one, many = side(alone, load.concurrency), side(parallel, load.concurrency)
    sides = {gpu: side([rows], load.concurrency) for gpu, rows in together.items()}
    each = {gpu: found["output_tok_s"] for gpu, found in sides.items()}
    errors = sum(found["errors"] for found in sides.values())
    base = one["output_tok_s"]
    total = sum(each.values()) if len(each) == gpus and all(each.values()) and not errors else None
    rates = [side([rows], load.concurrency)["output_tok_s"] for rows in alone]
    return {
        "name": load.name,
        "concurrency": load.concurrency,
        "requests": load.count,
        "alone": _numbers(one) | {"legs_tok_s": rates},
        "together": {"output_tok_s": total, "each_tok_s": each, "errors": errors},
        "tensor_parallel": _numbers(many),
        "efficiency": {
            "cells": total / (gpus * base) if total and base else None,
            "tensor_parallel": many["output_tok_s"] / (gpus * base) if many["output_tok_s"] and base else None,
        },
        "speedup": {"tensor_parallel": {
            "output_tok_s": many["output_tok_s"] / base if many["output_tok_s"] and base else None,
            **{k: many[k]["mean"] / one[k]["mean"] if many[k]["mean"] and one[k]["mean"] else None for k in LATENCIES},
        }},
    }  # fmt: skip


def _numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    return {key: found[key] for key in ("output_tok_s", "errors", *LATENCIES)}

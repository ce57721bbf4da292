"""The sidecar of an engine: what TensorRT-LLM's own config.json leaves out, and what is checked before loading.

A plan file fits one SM, one TensorRT, one TensorRT-LLM and one number of ranks. Loading another ends in messages such
as "expecting compute 9.0 got compute 8.9" (TensorRT-LLM issues 3031, 222), "Version tag does not match"
(tensorrtllm_backend issue 531) or "Engine world size (2 * 1) != Runtime world size (1)" (issues 753, 1992). Here both
sides are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pipeline import jsonio, manifest
from pipeline.errors import HostError, InputError, WorkError
from pipeline.trtllm.probe import Environment
from pipeline.trtllm.version import parse

NAME = "engine.sidecar.json"
SCHEMA = "quantpress.engine/1"
KEYS = (
    "schema", "cell", "gpu", "sm", "driver", "cuda", "tensorrt", "tensorrt_llm", "world_size", "tp", "pp", "command",
    "flags", "checkpoint_digest", "build_s", "timing_cache", "built_at", "genuine", "files",
)  # fmt: skip


class Difference(NamedTuple):
    """One field of an engine beside the host's: `must` says whether it forbids loading."""

    name: str
    built: Any
    here: Any
    same: bool
    must: bool


def read_sidecar(engine: Path) -> dict[str, Any]:
    """Read the sidecar of an engine folder.

    Raises:
        InputError: there is none (the build did not end, or another tool made it), or it is damaged.
    """
    path = engine / NAME
    if not path.is_file():
        raise InputError(
            f"{engine} has no {NAME}: its build did not end, or this project did not make it, so nothing says "
            "which GPU and "
            "versions it is for. Build it again: `python -m pipeline trtllm build CELL`."
        )
    found = jsonio.read_json(path)
    missing = [key for key in KEYS if not isinstance(found, dict) or key not in found]
    if missing or found["schema"] != SCHEMA:
        raise InputError(
            f"{path} is no engine sidecar (it lacks {', '.join(missing[:3]) or 'its schema'}). Build it again."
        )
    return dict(found)


def compare(sidecar: Mapping[str, Any], here: Environment) -> list[Difference]:
    """Return every field, built with against running; the driver and the GPU's name may differ, the rest must not."""

    def entry(name: str, built: Any, now: Any, must: bool, same: bool | None = None) -> Difference:
        return Difference(name, built, now, built == now if same is None else same, must)

    versions = (sidecar["tensorrt_llm"], here.tensorrt_llm)
    same_version = all(versions) and parse(str(versions[0])) == parse(str(versions[1]))
    ranks = f"{sidecar['world_size']} (tensor {sidecar['tp']} x pipeline {sidecar['pp']})"
    enough = here.gpu_count >= int(sidecar["world_size"])
    return [
        entry("SM", sidecar["sm"], here.sm, True),
        entry("GPU", sidecar["gpu"], here.gpu, False),
        entry("TensorRT-LLM", *versions, True, same_version),
        entry("TensorRT", sidecar["tensorrt"], here.tensorrt, True),
        entry("CUDA", sidecar["cuda"], here.cuda, False),
        entry("driver", sidecar["driver"], here.driver, False),
        entry("ranks and GPUs", ranks, here.gpu_count, True, enough),
    ]


def table(found: list[Difference]) -> str:
    """Return built with against running, field by field, for a terminal."""
    lines = [f"{'FIELD':16} {'BUILT WITH':40} {'RUNNING':40} VERDICT"]
    for field in found:
        verdict = "same" if field.same else ("REFUSED" if field.must else "differs, allowed")
        lines.append(f"{field.name:16} {_text(field.built):40} {_text(field.here):40} {verdict}")
    return "\n".join(lines)


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def need_same_host(sidecar: Mapping[str, Any], here: Environment, engine: Path) -> None:
    """Refuse an engine that this host cannot load.

    Raises:
        HostError: with both values of each field that differs.
    """
    wrong = [d for d in compare(sidecar, here) if d.must and not d.same]
    if wrong:
        said = "; ".join(f"{d.name}: built with {_text(d.built)}, running {_text(d.here)}" for d in wrong)
        raise HostError(
            f"{engine} is not for this host: {said}. Build it here: `python -m pipeline trtllm build "
            f"{sidecar['cell']}`."
        )


def need_world(sidecar: Mapping[str, Any], tp: int, pp: int, engine: Path) -> None:
    """Refuse an engine of another number of ranks than the plan asks for.

    Raises:
        InputError: with both.
    """
    if (sidecar["tp"], sidecar["pp"]) != (tp, pp):
        raise InputError(
            f"{engine} was built for tensor parallel {sidecar['tp']} x pipeline {sidecar['pp']}, the plan says "
            f"{tp} x {pp}. "
            f"Build it again: `python -m pipeline trtllm build {sidecar['cell']}`."
        )


def need_planned(sidecar: Mapping[str, Any], flags: Mapping[str, Any], digest: str | None, engine: Path) -> None:
    """Refuse an engine that was built with other flags, or from another checkpoint, than its package says.

    Args:
        sidecar: of the engine.
        flags: the plan's flags of trtllm-build.
        digest: of the package's checkpoint, None where the package was made before the export.
        engine: its folder, for the message.

    Raises:
        WorkError: with each flag that differs.
    """
    built = sidecar["flags"]
    names = sorted(k for k in {*built, *flags} if built.get(k) != flags.get(k))
    wrong = [f"{k}: built with {_text(built.get(k))}, planned {_text(flags.get(k))}" for k in names]
    if digest is not None and sidecar["checkpoint_digest"] != digest:
        wrong.append(f"checkpoint: built from {sidecar['checkpoint_digest'][:12]}, the package has {digest[:12]}")
    if wrong:
        raise WorkError(
            f"{engine} is not what its package plans: {'; '.join(wrong)}. Build it again: "
            f"`python -m pipeline trtllm build {sidecar['cell']}`."
        )


def need_whole(engine: Path, sidecar: Mapping[str, Any]) -> None:
    """Refuse an engine folder whose files are not those of its sidecar.

    Raises:
        WorkError: a file is missing, extra or different.
    """
    have = {**sidecar["files"]}
    wrong = [w for w in manifest.differences(engine, have) if not w.endswith(f"{NAME} is not in the manifest")]
    world = int(sidecar["world_size"])
    wrong += [f"rank{r}.engine is not among its files" for r in range(world) if f"rank{r}.engine" not in have]
    if wrong:
        raise WorkError(f"{engine} is not what its sidecar says: {'; '.join(wrong[:5])}. Build it again.")


def need_genuine(sidecar: Mapping[str, Any], engine: Path) -> None:
    """Refuse to measure an engine that was not built by an installed TensorRT-LLM.

    Raises:
        WorkError: the probe at build time did not find one.
    """
    if not sidecar["genuine"]:
        raise WorkError(
            f"{engine} was not built by an installed TensorRT-LLM (the version probe found {sidecar['tensorrt_llm']!r} "
            "without its files); nothing measured on it would be TensorRT-LLM's. Build it in the real environment."
        )

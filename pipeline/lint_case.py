"""What the lint rules share: the case under test and the list of findings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.checkpoint import Checkpoint
from pipeline.layout_parts import Layout


@dataclass(frozen=True)
class Finding:
    """One fault: `severity` error or warning, the `rule` it breaks, the tensor or file, a sentence."""

    severity: str
    rule: str
    subject: str
    message: str


@dataclass
class Report:
    """What has been found so far."""

    findings: list[Finding] = field(default_factory=list)

    def error(self, rule: str, subject: str, message: str) -> None:
        """Add a fault that must stop the artifact."""
        self.findings.append(Finding("error", rule, subject, message))

    def warn(self, rule: str, subject: str, message: str) -> None:
        """Add something worth a look."""
        self.findings.append(Finding("warning", rule, subject, message))


@dataclass(frozen=True)
class Case:
    """What the rules look at.

    `qconfig`: quantization_config, {} without one; `layout`: None for bf16 and for an unknown form; `moves`:
    see `oracle.moves_of`; `layers`: linear layers of the source; `ignored`: entries of the checkpoint's
    ignore list; `kv_cache`: how the recipe stores keys and values.
    """

    made: Checkpoint
    source: Checkpoint
    fmt: str
    group_size: int | None
    qconfig: dict[str, Any]
    layout: Layout | None
    moves: frozenset[str]
    layers: list[str]
    ignored: list[str]
    kv_cache: str = "bf16"

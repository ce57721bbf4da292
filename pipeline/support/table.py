"""Read the support matrix, one YAML file per runtime: format x version x device -> native, fallback, refused, unknown.

A row says what one runtime does with one format as one producer stores it:

    format: int4-w4a16            what is stored and computed; `kv-*` is a KV cache, which has no layouts
    name: AWQ W4A16               what people call it, with the method where loaders differ by method
    methods: [awq]                recipe algorithms that the row holds for; left out: all
    layouts: [compressed-tensors] on-disk forms (quant_method; `hf` is unquantized) it holds for; left out: all
    versions: ">=0.22"            of the runtime (PEP 440); left out: the file's own `versions`
    group_sizes: [64, 128]        that the loader takes; left out: any
    sources: [docs]               keys of the file's `sources`
    devices:                      "cpu" and SM numbers, several in one key; `all` is every device
      "80, 86": [verdict, what computes or what is missing, source keys of this entry if others]

A device that no row names is `unknown`. Adding a GPU, a version or a format is an edit of data.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import yaml
from packaging.specifiers import SpecifierSet
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Kind = Literal["native", "fallback", "refused", "unknown"]
VERDICTS: tuple[Kind, ...] = ("native", "fallback", "unknown", "refused")  # best first
DEVICES = ("cpu", "80", "86", "89", "90", "100", "103", "120")


class Entry(NamedTuple):
    """What a runtime does on one device: the verdict, what computes or is missing, and the citations."""

    verdict: Kind
    reason: str
    sources: tuple[str, ...]


def _split(devices: Any) -> dict[str, list[str]]:
    """Give every device of a key like "80, 86" its own entry; a device named twice is an error."""
    out: dict[str, list[str]] = {}
    for keys, entry in devices.items():
        names = DEVICES if keys == "all" else [name.strip() for name in str(keys).split(",")]
        for name in names:
            if name in out:
                raise ValueError(f"device {name} stands twice")
            if name not in DEVICES:
                raise ValueError(f"device {name} is none of {', '.join(DEVICES)}")
            out[name] = [str(part) for part in entry]
            if len(entry) < 2 or entry[0] not in VERDICTS:
                raise ValueError(f"entry {entry} is not [verdict, reason] or [verdict, reason, source, ...]")
    return out


Devices = Annotated[dict[str, list[str]], BeforeValidator(_split)]


class Row(BaseModel):
    """One row of a runtime's file; see the module."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: str
    name: str
    methods: list[str] | None = None
    layouts: list[str] | None = None
    versions: str = ""
    group_sizes: list[int] | None = None
    sources: list[str] = Field(min_length=1)
    devices: Devices

    def holds(self, method: str | None, layout: str | None, version: str) -> bool:
        """Say whether the row is about this method, on-disk layout and version."""
        return (
            (self.methods is None or method is None or method in self.methods)
            and (self.layouts is None or layout is None or layout in self.layouts)
            and SpecifierSet(self.versions).contains(version, prereleases=True)
        )


class Table(BaseModel):
    """One runtime's file. `planned_version`: what the plan asks about, per kind of device."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    runtime: str
    planned_version: dict[Literal["cpu", "cuda"], str]
    versions: str = ""
    packaged_layouts: list[str] = ["hf", "modelopt", "compressed-tensors", "gptq", "awq"]
    sources: dict[str, str]
    everywhere: Devices = Field(default_factory=dict)
    rows: list[Row]

    def entry(self, row: Row, device: str) -> Entry:
        """Return what `row` says of `device`, `unknown` where it says nothing."""
        found = self.everywhere.get(device) or row.devices.get(device)
        if found is None:
            where = device if device == "cpu" else f"SM{device}"
            return Entry("unknown", f"no source says what {self.runtime} does with {row.format} on {where}", ())
        keys = found[2:] or row.sources
        verdict = next(v for v in VERDICTS if v == found[0])
        return Entry(verdict, found[1], tuple(self.sources[key] for key in keys))

    def version_for(self, device: str) -> str:
        """Return the version that the plan asks about on this device."""
        versions = self.planned_version
        return versions.get("cpu" if device == "cpu" else "cuda") or next(iter(versions.values()))


@cache
def tables() -> dict[str, Table]:
    """Return every runtime's table by name, rows with the file's versions where they have none of their own."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.yaml")):
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
        for row in raw["rows"]:
            row.setdefault("versions", raw.get("versions", ""))
        found[path.stem] = Table.model_validate(raw)
    return found

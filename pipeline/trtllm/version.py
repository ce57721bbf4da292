"""TensorRT-LLM versions: which of them have `trtllm-build`, with release candidates in their right order."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from pipeline.errors import InputError

# "This RC version will be the last one supporting the TensorRT backend" (release note of 1.3.0rc20); the command was
# deleted by pull request 15918.
LAST_WITH_ENGINES = "1.3.0rc20"
FIRST_WITHOUT = Version("1.3.0rc21")
OLDEST_KNOWN = Version("1.0")  # data/build.yaml was read from the trees of 1.0 to 1.3.0rc20


def parse(text: str) -> Version:
    """Return a version without its local and development parts: 1.2.1+cu130 is 1.2.1, 1.3.0rc21.dev3 is 1.3.0rc21.

    Raises:
        InputError: it is no version.
    """
    try:
        found = Version(str(text))
    except InvalidVersion:
        raise InputError(f"'{text}' is no TensorRT-LLM version; write it as 1.2.1 or 1.3.0rc20.") from None
    candidate = "".join(map(str, found.pre or ()))
    return Version(f"{found.base_version}{candidate}")


def inside(version: str, ranges: str) -> bool:
    """Say whether `version` is in the PEP 440 `ranges`; release candidates count, "" holds every version."""
    return SpecifierSet(ranges).contains(parse(version), prereleases=True)


def has_engine_builder(version: str) -> bool:
    """Say whether this version has `trtllm-build`: 1.3.0rc20 has it, 1.3.0rc21 and 1.3.0 have not."""
    return parse(version) < FIRST_WITHOUT


def need_engine_builder(version: str, where: str = "params.yaml") -> None:
    """Refuse a version that compiles no engines, or that is older than what the flag table was read from.

    Raises:
        InputError: the message names the runtime that serves this version.
    """
    if not has_engine_builder(version):
        raise InputError(
            f"{where}: TensorRT-LLM {version} has no trtllm-build (the last with it is {LAST_WITH_ENGINES}); use the "
            "runtime trtllm-bundle, which serves the checkpoint as it is."
        )
    if parse(version) < OLDEST_KNOWN:
        raise InputError(
            f"{where}: the table of trtllm-build's flags was read from TensorRT-LLM {OLDEST_KNOWN} to "
            f"{LAST_WITH_ENGINES}, not {version}; name a version of those."
        )


def need_bundle(version: str, where: str = "params.yaml") -> None:
    """Refuse a version that still compiles engines for the runtime `trtllm-bundle`.

    Raises:
        InputError: the message names the runtime that serves this version.
    """
    if has_engine_builder(version):
        raise InputError(
            f"{where}: TensorRT-LLM {version} comes before {FIRST_WITHOUT}, where bundles start; use the runtime "
            "trtllm-engine for it."
        )

"""Check what params.yaml says about producers and about what no source knows."""

from __future__ import annotations

from collections.abc import Collection

from pipeline.errors import InputError, unknown
from pipeline.formats import LAYOUTS_OF
from pipeline.producers import makes
from pipeline.specs import Params, Recipe
from pipeline.support import device_of, runtimes
from pipeline.support.table import tables


def check_producers(name: str, recipe: Recipe, where: str) -> None:
    """Check that each producer that a recipe names exists, makes its scheme and stores it as the runtime loads it.

    Raises:
        InputError: with the nearest known name.
    """
    place = f"{where} (recipes.{name}.producers)"
    for runtime, backend in (recipe.producers or {}).items():
        if runtime not in runtimes():
            raise unknown("runtime", runtime, runtimes(), place)
        if backend not in LAYOUTS_OF:
            raise unknown("backend", backend, LAYOUTS_OF, place)
        if not makes(backend, recipe):
            raise InputError(f"{place}: {backend} does not make {recipe.format} by {recipe.algorithm}.")
        packaged = tables()[runtime].packaged_layouts
        if not set(packaged) & set(LAYOUTS_OF[backend]):
            stored = " or ".join(LAYOUTS_OF[backend])
            raise InputError(f"{place}: {backend} stores {stored}, {runtime} is given {', '.join(packaged)}.")


def check_allowed(params: Params, where: str) -> None:
    """Check `allow_unknown`: each entry is `format.runtime.target`, and there is something unknown that it allows.

    Raises:
        InputError: with the nearest known name, or with what the matrix says.
    """
    place = f"{where} (allow_unknown)"
    formats = {row.format for table in tables().values() for row in table.rows}
    for text in params.allow_unknown:
        parts = text.split(".")
        if len(parts) != 3:
            raise InputError(f"{place}: '{text}' is not format.runtime.target, for instance int8-w8a16.vllm.b200.")
        tested: tuple[tuple[str, str, Collection[str]], ...] = (
            ("format", parts[0], formats),
            ("runtime", parts[1], runtimes()),
            ("target", parts[2], params.targets),
        )
        for kind, part, known in tested:
            if part not in known:
                raise unknown(kind, part, known, place)
        table, device = tables()[parts[1]], device_of(params.targets[parts[2]])
        found = [table.entry(row, device) for row in table.rows if row.format == parts[0]]
        if not any(entry.verdict == "unknown" for entry in found):
            said = "; ".join(f"{entry.verdict}: {entry.reason}" for entry in dict.fromkeys(found))
            raise InputError(f"{place}: {text} is known ({said}); only what is unknown can be allowed. Leave it out.")

"""Which backend makes the artifact that a runtime loads, and what that runtime then does with it.

A recipe names a scheme (format and algorithm) and its first producer. No one INT4 or INT8 artifact serves every
runtime: vLLM refuses ModelOpt's, TensorRT-LLM has no integers of compressed-tensors. So the producer is chosen per
runtime from the same recipe: the recipe's own backend where the runtime loads what it stores, else one that makes the
same scheme in a form that it loads. Such an artifact has an id of its own, `<model>.<recipe>.<layout>`.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from pipeline.formats import BACKENDS, DATA_FREE, LAYOUTS_OF, STANDS_IN, SUCCESSORS
from pipeline.specs import Recipe, Target
from pipeline.support import Verdict, verdict
from pipeline.support.table import tables


class Producer(NamedTuple):
    """`backend` makes the scheme by `algorithm` and stores it as `layout`."""

    backend: str
    layout: str
    algorithm: str

    def id(self, model: str, recipe_id: str, recipe: Recipe) -> str:
        """Return the id of the artifact: the recipe's, with the layout where the first producer has another one."""
        first = first_producer(recipe)
        return f"{model}.{recipe_id}" + ("" if self.layout == first.layout else f".{self.layout}")


def successor(recipe: Recipe) -> str:
    """Return the environment that makes a recipe; archived projects are served by their maintained successors."""
    return SUCCESSORS.get(recipe.backend, recipe.backend)


def first_producer(recipe: Recipe) -> Producer:
    """Return the producer that the recipe names."""
    backend = successor(recipe)
    return Producer(backend, LAYOUTS_OF[backend][0], recipe.algorithm)


def makes(backend: str, recipe: Recipe) -> str | None:
    """Return the algorithm by which `backend` makes the recipe's scheme, None where it does not make it."""
    for algorithm in (recipe.algorithm, STANDS_IN.get((recipe.format, recipe.algorithm))):
        if algorithm and (recipe.format, algorithm) in BACKENDS[backend]:
            return algorithm
    return None


def producers_of(recipe: Recipe) -> list[Producer]:
    """Return every producer of the recipe's scheme in every layout, the recipe's own backend first."""
    own = successor(recipe)
    backends = [own, *(name for name in LAYOUTS_OF if name != own)]
    found = []
    for backend in backends:
        algorithm = makes(backend, recipe)
        if algorithm:
            found += [Producer(backend, layout, algorithm) for layout in LAYOUTS_OF[backend]]
    return found


def producer_for(recipe: Recipe, runtime: str) -> Producer:
    """Return the producer whose artifact `runtime` is given; the recipe's `producers` entry for the runtime wins.

    It does not depend on the target: one artifact serves every GPU of a runtime.
    """
    table = tables()[runtime]
    named = (recipe.producers or {}).get(runtime)
    candidates = [p for p in producers_of(recipe) if p.layout in table.packaged_layouts]
    candidates = [p for p in candidates if named in (None, p.backend)]
    if not candidates:
        return first_producer(recipe)
    return max(candidates, key=lambda p: _loads(recipe, p, runtime))


def _loads(recipe: Recipe, producer: Producer, runtime: str) -> int:
    """Return 2 where some device serves this artifact, 1 where that is unknown, 0 where all refuse it."""
    table = tables()[runtime]
    version = table.version_for("90")
    rows = [
        r for r in table.rows if r.format == recipe.format and r.holds(producer.algorithm, producer.layout, version)
    ]
    found = {table.entry(row, device).verdict for row in rows for device in row.devices}
    if found & {"native", "fallback"}:
        return 2
    return 0 if found == {"refused"} else 1


def served(
    recipe: Recipe, producer: Producer, runtime: str, target: Target, target_id: str, allowed: Collection[str]
) -> Verdict:
    """Return what `runtime` does with the producer's artifact on `target`: weights and KV cache together.

    Args:
        recipe: the recipe.
        producer: of its artifact, from `producer_for`.
        runtime: one of the matrix.
        target: the kind of machine.
        target_id: its id in params.yaml.
        allowed: params.allow_unknown: `format.runtime.target` that is served though no source knows it.

    Returns:
        native, fallback or refused; `unknown` only where `allowed` names it, and then it is served.
    """
    if producer.layout not in tables()[runtime].packaged_layouts:
        reason = (
            f"no backend of this project stores {recipe.format} by {recipe.algorithm} in a form that {runtime} loads"
        )
        return Verdict("refused", reason, "pipeline/formats.py")
    weights = verdict(
        recipe.format, runtime, target, method=producer.algorithm, layout=producer.layout, group_size=recipe.group_size
    )
    parts = [_resolved(weights, f"{recipe.format}.{runtime}.{target_id}", allowed)]
    if recipe.kv_cache != "bf16":
        fmt = f"kv-{recipe.kv_cache}"
        parts.append(_resolved(verdict(fmt, runtime, target), f"{fmt}.{runtime}.{target_id}", allowed))
    worst = max(parts, key=lambda part: ("native", "fallback", "unknown", "refused").index(part.verdict))
    if worst.verdict == "refused" or len(parts) == 1:
        return worst
    reasons = "; ".join(part.reason for part in parts if part.reason)
    return Verdict(worst.verdict, reasons, "; ".join(dict.fromkeys(part.source for part in parts)))


def _resolved(found: Verdict, key: str, allowed: Collection[str]) -> Verdict:
    """Refuse what is unknown, unless params.yaml allows it; then say so."""
    if found.verdict != "unknown":
        return found
    if key in allowed:
        return found._replace(reason=f"{found.reason}; served because params.yaml names {key} under allow_unknown")
    return Verdict(
        "refused", f"unknown: {found.reason}; to serve it all the same, name {key} under allow_unknown", found.source
    )


def needs_calibration(recipe: Recipe) -> bool:
    """Say whether the recipe needs a calibration set: for its weights, or for the scales of its KV cache."""
    return recipe.algorithm not in DATA_FREE or recipe.kv_cache != "bf16"


def for_backend(recipe: Recipe, backend: str) -> dict[str, Any]:
    """Return the recipe as `backend` gets it: its own algorithm; `options` belong to the recipe's own backend."""
    algorithm = makes(backend, recipe)
    own = backend == successor(recipe)
    return recipe.model_dump() | {"algorithm": algorithm, "options": recipe.options if own else None}

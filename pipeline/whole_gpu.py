"""What a cell's server would hold with a GPU to itself, where its options keep it small.

What is measured is what is packaged, so such a limit is in the package too. It is named beside the package, with what
the plan predicts without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.errors import InputError
from pipeline.memory.cells import CellIds, cache_tokens, cell_fit, own_options, serving
from pipeline.memory.user_options import flat
from pipeline.specs import Params

LIMITS = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")


class Room(NamedTuple):
    """What one choice of options leaves, all predicted; `sequences`: of the longest workload, by its name.

    length: the longest sequence that the options accept; context: the longest that the cache would hold.
    """

    tokens: int | None = None
    sequences: tuple[str, int] | None = None
    length: int | None = None
    context: int | None = None


class Kept(NamedTuple):
    """Options that keep a server small, the room with them and without them.

    off: options that switch off what the server does by default. baseline: tokens that another recipe, the baseline,
    would hold without the limits: what quantization frees shows only there.
    """

    options: dict[str, Any]
    off: list[str]
    here: Room
    without: Room
    baseline: tuple[str, int] | None = None

    @property
    def tokens(self) -> int | None:
        """Tokens that the KV cache holds with the options, predicted."""
        return self.here.tokens

    @property
    def whole(self) -> int | None:
        """Tokens that it would hold without them, predicted."""
        return self.without.tokens

    @property
    def text(self) -> str:
        """For the card and the command line."""
        given = " and ".join(f"{_option(name)} {value}" for name, value in self.options.items())
        text = f"This server is kept small, as it was measured: {given} (params.yaml, `serving`)."
        if self.tokens and self.whole:
            text += f" Its KV cache holds {self.tokens:,} tokens so, and about {self.whole:,} without them (predicted)"
            if self.here.sequences and self.without.sequences:
                name, few = self.here.sequences
                text += f": {few:,} against {self.without.sequences[1]:,} sequences of {name}"
            if self.baseline:
                text += "; {} would hold about {:,}".format(*self.baseline)
            text += "."
        length, context = self.here.length, self.without.context
        if length and context and length < context:
            text += f" Its max-model-len {length} is sized for the workloads that are timed here; "
            text += f"one sequence may have {context:,} tokens."
        for name in self.off:
            text += f" {_option(name)} switches off what vLLM does by default, so that no timing rests on it."
        return f"{text} To ship with other options change them there and measure again."


def kept_small(params: Params, ids: CellIds, config: Mapping[str, Any]) -> Kept | None:
    """Return what keeps a cell's server small, None where nothing does or the target has no GPU."""
    own = flat(own_options(params, ids.runtime, ids.target))
    found = {name: value for name, value in own.items() if name in LIMITS}
    if not found or params.targets[ids.target].device != "cuda":
        return None
    free = params.model_copy(update={
        "serving": {key: {k: v for k, v in options.items() if k.replace("-", "_") not in LIMITS}
                    for key, options in params.serving.items()},
    })  # fmt: skip
    off = [name for name, value in own.items() if name.startswith("no_") and value is True]
    base = None
    if ids.recipe != params.baseline:
        tokens = _room(free, ids._replace(recipe=params.baseline), config).tokens
        base = (params.baseline, tokens) if tokens else None
    return Kept(found, off, _room(params, ids, config), _room(free, ids, config), base)


def _room(params: Params, ids: CellIds, config: Mapping[str, Any]) -> Room:
    try:
        chosen = serving(params, ids, config)
        held = cell_fit(params, ids, config, chosen)
        tokens = cache_tokens(params, ids, config, chosen)
    except InputError:
        return Room()
    length = next((int(p.value) for p in chosen if p.name == "max_model_len"), None)
    fewest = min(held.sequences.items(), key=lambda item: item[1], default=None)
    return Room(tokens, fewest, length, held.max_context)


def _option(name: str) -> str:
    return name.replace("_", "-")

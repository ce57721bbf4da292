"""What a cell's server would hold with a GPU to itself, where its options keep it small.

What is measured is what is packaged, so such a limit is in the package too. It is named beside the package, with what
the plan predicts without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline.errors import InputError
from pipeline.memory.cells import CellIds, cache_tokens, own_options, serving
from pipeline.memory.user_options import flat
from pipeline.specs import Params

LIMITS = ("kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override")


class Kept(NamedTuple):
    """Options that keep a server small, the tokens its KV cache holds with them, and without them (both predicted)."""

    options: dict[str, Any]
    tokens: int | None
    whole: int | None

    @property
    def text(self) -> str:
        """For the card and the command line."""
        given = " and ".join(f"{name.replace('_', '-')} {value}" for name, value in self.options.items())
        text = f"This server is kept small, as it was measured: {given} (params.yaml, `serving`)."
        if self.tokens and self.whole:
            text += f" Its KV cache holds {self.tokens:,} tokens so, and about {self.whole:,} without them (predicted)."
        return f"{text} To ship for a GPU of its own take them out there and measure again."


def kept_small(params: Params, ids: CellIds, config: Mapping[str, Any]) -> Kept | None:
    """Return what keeps a cell's server small, None where nothing does or the target has no GPU."""
    own = own_options(params, ids.runtime, ids.target)
    found = {name: value for name, value in flat(own).items() if name in LIMITS}
    if not found or params.targets[ids.target].device != "cuda":
        return None
    free = params.model_copy(update={
        "serving": {key: {k: v for k, v in options.items() if k.replace("-", "_") not in LIMITS}
                    for key, options in params.serving.items()},
    })  # fmt: skip
    return Kept(found, _tokens(params, ids, config), _tokens(free, ids, config))


def _tokens(params: Params, ids: CellIds, config: Mapping[str, Any]) -> int | None:
    try:
        return cache_tokens(params, ids, config, serving(params, ids, config))
    except InputError:
        return None

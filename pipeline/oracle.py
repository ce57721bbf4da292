"""Dequantize every layer and hold it against the source: are the right numbers in the right place?

Headers cannot tell that two layers were swapped or that one scale is doubled; the numbers can. Two measures a
layer: the relative RMS error |W' - W| / |W| of the whole, and the gain <W', W> / <W, W> of each row, which is
1 for any unbiased rounding, near 0 for a foreign row and 2 for a doubled scale, even where GPTQ made the
error itself large.

SmoothQuant (arXiv:2211.10438) and AWQ (arXiv:2306.00978) move factors between a norm, or a layer's rows, and
the columns of the layers that read it. Both sides are in the checkpoint, so the fold is undone exactly
instead of leaving those layers unchecked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint import Checkpoint, to_float
from pipeline.layout_parts import Layout, dims_of

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Bound:
    """What is too far: relative RMS error (`gptq`: of weights that GPTQ made), row gain away from 1."""

    error: float
    gptq: float
    row_gain: float


# Measured on SmolLM2-135M, 210 layers. Relative RMS: FP8 (per tensor, channel, block) and MXFP8 0.026-0.027; INT8
# per channel with SmoothQuant and GPTQ 0.010-0.045, ModelOpt's SmoothQuant 0.008-0.059, INT8 weight-only 0.008-0.012;
# INT4 group 64 round to nearest and AWQ 0.04-0.17, with GPTQ 0.12-0.34, because GPTQ moves weights on purpose to keep
# outputs; NVFP4 0.092-0.096; MXFP4 0.112-0.129. Row gain, farthest from 1: FP8 0.026, INT8 0.023, INT4 0.08, with
# GPTQ 0.30, NVFP4 0.04, MXFP4 0.11. A foreign layer measures 1.4 and gain 0, a doubled or halved scale 1.0 or 0.5.
# Every bound lies at least 1.4 times above the worst honest layer and below the mildest of these faults.
_FP8 = Bound(error=0.04, gptq=0.04, row_gain=0.1)
_INT4 = Bound(error=0.3, gptq=0.48, row_gain=0.45)
BOUNDS = {
    "fp8-tensor": _FP8,
    "fp8-channel-token": _FP8,
    "fp8-block": _FP8,
    "mxfp8": _FP8,
    "int8-w8a8": Bound(error=0.1, gptq=0.1, row_gain=0.15),
    "int8-w8a16": Bound(error=0.06, gptq=0.06, row_gain=0.1),
    "int4-w4a16": _INT4,
    "int4-w4a8": _INT4,
    "nvfp4": Bound(error=0.16, gptq=0.24, row_gain=0.25),
    "mxfp4": Bound(error=0.2, gptq=0.3, row_gain=0.3),
}
# Mean of |gain - 1| over the columns of a layer that reads a folded norm, each weighed by its power (a column far
# weaker than its group's scale rounds to nothing, and that is no fault): 0.007 at most where norm and weights belong
# together (int8, AWQ by two producers), 0.02 to 1 where the norms of two neighbouring layers were swapped, which
# barely moves the RMS error.
COLUMN_DRIFT = 0.015

# Layers whose columns take up what a norm, or the rows of another layer, gave away (names within one block).
NORM_OF = {
    "self_attn.q_proj": "input_layernorm",
    "self_attn.k_proj": "input_layernorm",
    "self_attn.v_proj": "input_layernorm",
    "mlp.gate_proj": "post_attention_layernorm",
    "mlp.up_proj": "post_attention_layernorm",
}
ROWS_OF = {"mlp.down_proj": "mlp.up_proj", "self_attn.o_proj": "self_attn.v_proj"}
# What a recipe may move on purpose, by the names in llm-compressor's recipe.yaml and in params.yaml.
_MOVES = {
    "SmoothQuantModifier": frozenset({"norms"}),
    "AWQModifier": frozenset({"norms", "rows"}),
    "GPTQModifier": frozenset({"gptq"}),
    "smoothquant-gptq": frozenset({"norms", "gptq"}),
    "awq": frozenset({"norms", "rows"}),
    "gptq": frozenset({"gptq"}),
}
# Larger weights are checked on evenly spaced rows: about 1 s for 100 M weights, and no more a layer for
# larger models.
_MAX_WEIGHTS = 1 << 21
_MIN_ROWS = 64  # fewer say too little about a column


def moves_of(folder: Path, algorithm: str | None) -> frozenset[str]:
    """Say what the recipe may have moved (norms, rows, gptq); from recipe.yaml if `algorithm` is None."""
    if algorithm is not None:
        return _MOVES.get(algorithm, frozenset())
    recipe = folder / "recipe.yaml"
    text = recipe.read_text(encoding="utf-8", errors="replace") if recipe.is_file() else ""
    found = [moves for name, moves in _MOVES.items() if name.endswith("Modifier") and f"{name}:" in text]
    return frozenset().union(*found)


def split(layer: str) -> tuple[str, str]:
    """Split 'model.layers.0.mlp.up_proj' into its block 'model.layers.0' and its name there 'mlp.up_proj'."""
    *block, parent, name = layer.rsplit(".", 2) if layer.count(".") > 1 else ("", "", layer)
    return block[0], f"{parent}.{name}"


def may_differ(tensor: str, moves: frozenset[str]) -> bool:
    """Say whether an unquantized tensor may differ from the source because a factor went through it."""
    layer, _, kind = tensor.rpartition(".")
    _, name = split(layer)
    if "norms" in moves and kind == "weight" and (layer.rsplit(".", 1)[-1] in NORM_OF.values() or name in NORM_OF):
        return True
    return "rows" in moves and ((kind == "bias" and name in ROWS_OF.values()) or (kind == "weight" and name in ROWS_OF))


@dataclass(frozen=True)
class Measure:
    """How far one layer is from the source. `row` has the gain `row_gain`, the one farthest from 1.

    `column_drift`: see COLUMN_DRIFT; 0 for a layer that reads no folded norm.
    """

    layer: str
    error: float
    row: int
    row_gain: float
    column_drift: float


@dataclass
class Oracle:
    """Compares the layers of `made` (stored as `layout`) with `source`; `moves` as `moves_of` gives them."""

    made: Checkpoint
    source: Checkpoint
    layout: Layout
    group_size: int | None
    moves: frozenset[str]
    _row_gains: dict[str, Floats | None] = field(default_factory=dict)

    def measure(self, layers: Mapping[str, Any]) -> Iterator[Measure]:
        """Yield a Measure for each of `layers`, whose tensors must have the right dtypes and shapes."""
        for layer in layers:
            shape = self.source.tensors[f"{layer}.weight"].shape
            rows = slice(None, None, max(1, shape[0] * shape[1] // _MAX_WEIGHTS))
            block, name = split(layer)
            wanted, found = self._pair(layer, rows)
            if "rows" in self.moves and name in ROWS_OF.values():
                gains = self._gains(layer, layers, block)
                wanted = wanted if gains is None else wanted * gains[rows, None]
            if "rows" in self.moves and name in ROWS_OF:
                gains = self._gains(f"{block}.{ROWS_OF[name]}", layers, block)
                wanted = wanted if gains is None else wanted / gains
            folded = "norms" in self.moves and name in NORM_OF
            if (pre := self._pre_quant_scale(layer)) is not None:
                # ModelOpt scales the inputs at run time: what is rounded is the weight without that factor.
                wanted, found, folded = wanted / pre, found / pre, True
            yield _compare(layer, wanted, found, rows.step, folded)

    def _pair(self, layer: str, rows: slice) -> tuple[Floats, Floats]:
        """Return the source's rows [rows, in], with the factor of a norm, and the dequantized rows."""
        info = self.source.tensors[f"{layer}.weight"]
        wanted = to_float(self.source.raw(f"{layer}.weight")[rows], info.dtype)
        block, name = split(layer)
        if "norms" in self.moves and name in NORM_OF:
            norm = f"{block}.{NORM_OF[name]}.weight"
            if norm in self.source.tensors and norm in self.made.tensors:
                before, after = (np.asarray(ck.read(norm), np.float32) for ck in (self.source, self.made))
                if before.shape == after.shape == wanted.shape[1:]:
                    wanted = wanted * np.divide(before, after, out=np.ones_like(before), where=after != 0)
        return wanted, self.layout.decode(self.made, layer, rows, dims_of(info.shape, self.group_size))

    def _pre_quant_scale(self, layer: str) -> Floats | None:
        """Return the factors [in] of the inputs that ModelOpt stores beside a weight, or None."""
        name = f"{layer}.pre_quant_scale"
        return np.asarray(self.made.read(name), np.float32) if name in self.made.tensors else None

    def _gains(self, producer: str, layers: Mapping[str, Any], block: str) -> Floats | None:
        """Fit the factor [out] of each row of `producer`; None where no reader has as many columns.

        A fit hides a wrong row scale in the producer, but hands it to the reader's columns, where it shows.
        """
        if producer not in self._row_gains:
            readers = [f"{block}.{reader}.weight" for reader, name in ROWS_OF.items() if producer.endswith(name)]
            info = self.source.tensors.get(f"{producer}.weight")
            reader = self.source.tensors.get(readers[0])
            gains: Floats | None = None
            if producer in layers and info and reader and reader.shape[1:] == info.shape[:1]:
                wanted, found = self._pair(producer, slice(None))
                gains = _gain(wanted, found)
                gains = np.where(gains > 0, gains, np.float32(1))
            self._row_gains[producer] = gains
        return self._row_gains[producer]


def _gain(wanted: Floats, found: Floats) -> Floats:
    """Return <found, wanted> / <wanted, wanted> of each row, 1 for rows too small to say."""
    power = np.einsum("ij,ij->i", wanted, wanted)
    product = np.einsum("ij,ij->i", found, wanted)
    # A row far below the others may drown in the step of a scale it shares; it says nothing about a fault.
    loud = power > 0.0025 * power.mean()
    gain: Floats = np.divide(product, power, out=np.ones_like(power), where=loud)
    return gain


def _compare(layer: str, wanted: Floats, found: Floats, step: int, folded: bool) -> Measure:
    gain = _gain(wanted, found)
    worst = int(np.argmax(np.abs(gain - 1)))
    power = float(np.square(wanted).sum())
    error = float(np.square(found - wanted).sum())
    relative = (error / power) ** 0.5 if power else float(error > 0)
    drift = 0.0
    if folded and len(found) >= _MIN_ROWS:
        # Rounding alone moves a column's gain by about its relative error over the root of the rows seen.
        weight = np.square(wanted).sum(axis=0)
        gains = np.abs(_gain(wanted.T, found.T) - 1)
        drift = float((weight * gains).sum() / power) - relative / len(found) ** 0.5 if power else 0.0
    return Measure(layer, relative, worst * step, float(gain[worst]), drift)

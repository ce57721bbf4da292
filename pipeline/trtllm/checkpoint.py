"""A TensorRT-LLM checkpoint folder: config.json and rank{N}.safetensors, read without torch and without trusting it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.checkpoint import Checkpoint, CheckpointError, TensorInfo, read_header, read_object
from pipeline.trtllm.layouts import KINDS, Kind, Raw
from pipeline.trtllm.ranks import Sizes, Split

_RANK = re.compile(r"^rank(\d+)\.safetensors$")
REQUIRED = ("architecture", "dtype", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def is_rank_checkpoint(folder: Path) -> bool:
    """Say whether a folder holds a TensorRT-LLM checkpoint rather than a Hugging Face one."""
    return (folder / "rank0.safetensors").is_file()


@dataclass(frozen=True)
class RankCheckpoint:
    """What the headers and config.json of a checkpoint say. `ranks[r]`: the tensors of rank r by name."""

    folder: Path
    config: dict[str, Any]
    ranks: tuple[Mapping[str, TensorInfo], ...]
    _files: dict[int, Checkpoint] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, folder: Path) -> RankCheckpoint:
        """Read config.json and every rank's header.

        Raises:
            CheckpointError: a file is missing or damaged, or the files are not exactly rank0 to rank{world_size - 1}.
        """
        config = read_object(folder / "config.json")
        mapping = config.get("mapping")
        world = mapping.get("world_size") if isinstance(mapping, dict) else None
        if type(world) is not int or not 1 <= world <= 4096:
            raise CheckpointError("config.json", f"{folder}/config.json says mapping.world_size = {world!r}.")
        found = {int(m[1]) for p in folder.iterdir() if (m := _RANK.match(p.name))}
        if found != set(range(world)):
            lacking = sorted(set(range(world)) - found) or sorted(found - set(range(world)))
            raise CheckpointError(
                f"rank{lacking[0]}.safetensors",
                f"{folder} has the ranks {sorted(found)}, and config.json says world_size {world}. Export it again.",
            )
        return cls(folder, config, tuple(read_header(folder / f"rank{r}.safetensors") for r in range(world)))

    @property
    def split(self) -> Split:
        """Return the split that config.json says."""
        mapping = self.config["mapping"]
        return Split(int(mapping.get("tp_size", 1)), int(mapping.get("pp_size", 1)))

    @property
    def quantization(self) -> dict[str, Any]:
        """Return config.json's `quantization`, {} without one."""
        found = self.config.get("quantization")
        return found if isinstance(found, dict) else {}

    @property
    def kind(self) -> Kind | None:
        """Return how the layers are stored, None for a quant_algo that is not known here."""
        return KINDS.get(self.quantization.get("quant_algo") or "none")

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all tensors of all ranks."""
        return sum(info.nbytes for rank in self.ranks for info in rank.values())

    def raw(self, rank: int, name: str) -> NDArray[Any]:
        """Return a tensor's bits in its shape; see `Checkpoint.raw`."""
        if rank not in self._files:
            self._files[rank] = Checkpoint(self.folder, self.config, dict(self.ranks[rank]))
        return self._files[rank].raw(name)

    def parts(self, rank: int, layer: str) -> Raw:
        """Return the tensors of a layer on one rank: suffix -> (dtype, bits)."""
        prefix = f"{layer}."
        names = [name for name in self.ranks[rank] if name.startswith(prefix) and "." not in name[len(prefix) :]]
        return {name[len(prefix) :]: (self.ranks[rank][name].dtype, self.raw(rank, name)) for name in names}


@dataclass(frozen=True)
class Linear:
    """One linear layer on one rank: its name, the rows and columns that it has there, and how it is cut."""

    name: str
    rows: int
    columns: int
    by_rows: bool
    sources: tuple[str, ...]  # names of the source's modules, below one another


def linears(sizes: Sizes, split: Split, rank: int) -> Iterator[Linear]:
    """Yield the linear layers of the blocks that `rank` holds and their sizes; a stage counts its layers from 0."""
    stage, per_stage = rank // split.tp, sizes.layers // split.pp
    width, inner = sizes.heads * sizes.head_size // split.tp, sizes.intermediate // split.tp
    kv = max(1, sizes.kv_heads // split.tp) * sizes.head_size
    for local in range(per_stage):
        here, there = f"transformer.layers.{local}", f"model.layers.{stage * per_stage + local}"
        attention = tuple(f"{there}.self_attn.{x}_proj" for x in "qkv")
        yield Linear(f"{here}.attention.qkv", width + 2 * kv, sizes.hidden, True, attention)
        yield Linear(f"{here}.attention.dense", sizes.hidden, width, False, (f"{there}.self_attn.o_proj",))
        # TensorRT-LLM applies the activation to `fc`: it is the source's gate_proj, and its `gate` the up_proj.
        yield Linear(f"{here}.mlp.fc", inner, sizes.hidden, True, (f"{there}.mlp.gate_proj",))
        yield Linear(f"{here}.mlp.gate", inner, sizes.hidden, True, (f"{there}.mlp.up_proj",))
        yield Linear(f"{here}.mlp.proj", sizes.hidden, inner, False, (f"{there}.mlp.down_proj",))


def rows_of_source(sizes: Sizes, split: Split, rank: int, source: Checkpoint, layer: Linear) -> NDArray[np.float32]:
    """Return the part of the source's weights that `layer` holds on `rank`, as W[rows, columns] in float32."""
    tp_rank = rank % split.tp
    if not layer.by_rows:
        whole = np.asarray(source.read(f"{layer.sources[0]}.weight"), np.float32)
        return whole[:, tp_rank * layer.columns : (tp_rank + 1) * layer.columns]
    pieces = []
    for name in layer.sources:
        whole = np.asarray(source.read(f"{name}.weight"), np.float32)
        if name.endswith(("k_proj", "v_proj")) and split.tp > sizes.kv_heads:
            # More ranks than heads: every head stands on tp / kv_heads ranks, one after another.
            head = tp_rank // (split.tp // sizes.kv_heads)
            pieces.append(whole[head * sizes.head_size : (head + 1) * sizes.head_size])
            continue
        count = len(whole) // split.tp
        pieces.append(whole[tp_rank * count : (tp_rank + 1) * count])
    return np.concatenate(pieces)

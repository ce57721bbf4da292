"""Read a Hugging Face config.json into the numbers that sizes follow from: one `Arch`, whatever the keys are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from pipeline.checkpoint import read_object
from pipeline.errors import InputError, nearest

# Names that families give to the same number; the first is the usual one.
ALIASES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "num_query_groups"),
    "intermediate_size": ("ffn_dim", "n_inner", "ffn_hidden_size"),
    "vocab_size": ("padded_vocab_size",),
    "max_position_embeddings": ("n_positions", "max_seq_len", "seq_length", "max_sequence_length"),
}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "float32": 2, "float": 2}  # engines load float32 in 16 bits
FULL, SLIDING, CHUNKED, LATENT = "full", "sliding", "chunked", "latent"
MOST = {"num_hidden_layers": 10_000, "any": 10_000_000_000}  # damage in a config must not become hours of work
LAYER_TYPES = {"full_attention": FULL, "sliding_attention": SLIDING, "chunked_attention": CHUNKED, "attention": FULL}


class ConfigError(InputError):
    """A config.json that lacks a key or has one that cannot be."""


@dataclass(frozen=True)
class Moe:
    """Mixture of experts: `layers` of them have `experts` of width `width`, `top_k` used a token.

    `shared_width`: width of experts that every token uses, together; `shared_gate`: they have a gate of their own.
    """

    layers: int
    experts: int
    top_k: int
    width: int
    shared_width: int = 0
    shared_gate: bool = False


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (arXiv:2405.04434): ranks and head sizes; `q_rank` None where q is not compressed."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    v_dim: int
    q_rank: int | None


@dataclass(frozen=True)
class Arch:
    """The numbers of a decoder. `cache`: (kind, window in tokens or None) of each layer that keeps keys and values.

    `not_modelled` says which layers or caches the numbers leave out; `notes` what was assumed.
    """

    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    tied: bool
    dtype: str
    max_positions: int | None
    cache: tuple[tuple[str, int | None], ...]
    traits: Mapping[str, Any]
    moe: Moe | None = None
    latent: Latent | None = None
    quantization: Mapping[str, Any] | None = None
    not_modelled: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an unquantized value in an engine's memory."""
        return DTYPE_BYTES[self.dtype]

    @property
    def weights_modelled(self) -> bool:
        """Whether the shapes of all weights follow from the config."""
        return not self.not_modelled


@cache
def _families() -> dict[str, Any]:
    return dict(yaml.safe_load((Path(__file__).parent / "families.yaml").read_text(encoding="utf-8")))


def known_families() -> list[str]:
    """Return the model types whose weights are modelled."""
    return sorted(_families()["families"])


def load_arch(path: Path) -> Arch:
    """Read the config.json at `path`, or inside it where it is a folder.

    Raises:
        InputError: it is not there, is no JSON object, or lacks a key; the sentence names the key.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ConfigError(f"There is no {file}. Give a config.json, or a folder that holds one.")
    return read_arch(read_object(file), str(file))


def read_arch(config: Mapping[str, Any], where: str = "config.json") -> Arch:
    """Return the Arch of a config; `where` names it in errors.

    A config of a multi-modal model nests its language model under `text_config` (or `llm_config`, `language_config`).

    Raises:
        ConfigError: a key is missing or is not the number it has to be.
    """
    text = _text_config(config)
    family, notes = _family(_Keys(text, where), config)
    keys = _Keys(text, where, family["config"])
    hidden, layers = keys.need("hidden_size"), keys.need("num_hidden_layers")
    reason = _not_modelled(text, config)
    try:
        heads, latent = keys.need("num_attention_heads"), _latent(keys)
        kv_heads = _kv_heads(keys, heads)
        head_dim = keys.number("head_dim") or _divide(hidden, heads, keys)
        kinds, missing = _cache_kinds(keys, family, layers, latent is not None)
    except ConfigError:
        if not reason:
            raise
        heads = kv_heads = head_dim = 1
        kinds, missing, latent = (), (), None
    if reason and not missing:  # which layers keep what is not told by the config: nothing is guessed
        kinds, missing = (), (reason,)
    quantization = config.get("quantization_config") or text.get("quantization_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        raise ConfigError(f"{where} has a quantization_config that is no JSON object.")
    if text is not config:
        notes = (*notes, "only the language model of a multi-modal config: its other towers are not counted")
    if keys.number("num_nextn_predict_layers"):
        notes = (*notes, "layers for multi-token prediction are not counted: an engine loads them on request only")
    return Arch(
        model_type=str(text.get("model_type") or config.get("model_type") or "unknown"),
        hidden=hidden, layers=layers, heads=heads, kv_heads=kv_heads, head_dim=head_dim,
        inter=keys.number("intermediate_size") or 4 * hidden, vocab=keys.need("vocab_size"),
        tied=_tied(text, config, family), dtype=_dtype(text, config, where),
        max_positions=keys.number("max_position_embeddings"), cache=kinds, traits=family,
        moe=None if missing else _moe(keys, family, layers), latent=latent, quantization=quantization,
        not_modelled=missing, notes=notes,
    )  # fmt: skip


def _not_modelled(text: Mapping[str, Any], config: Mapping[str, Any]) -> str | None:
    """Return what of a model is not modelled, 'mamba: state-space layers', by its type or by a key that tells."""
    table = _families()
    for name in (text.get("model_type"), config.get("model_type")):
        if str(name) in table["not_modelled"]:
            return f"{name}: {table['not_modelled'][str(name)]}"
    if str(text.get("model_type")) in table["families"]:
        return None
    sign = next((key for key in table["signs"] if text.get(key)), None)
    return f"{text.get('model_type')} ({sign}): {table['signs'][sign]}" if sign else None


class _Keys:
    """A config whose numbers are looked up under every alias, with errors that name the key."""

    def __init__(self, raw: Mapping[str, Any], where: str, usual: Mapping[str, Any] | None = None) -> None:
        """Keep the config; `usual` are the family's values of keys that its configs leave out."""
        self.raw = {**(usual or {}), **raw}
        self.where = where

    def number(self, name: str) -> int | None:
        """Return a whole number above zero, or None where the key is absent, null or zero."""
        for key in (name, *ALIASES.get(name, ())):
            value = self.raw.get(key)
            if value is None or value is False or value == 0:
                continue
            if type(value) is not int or value < 0:
                raise ConfigError(f"{self.where} has {key} {value!r}, which must be a whole number above zero.")
            if value > MOST.get(name, MOST["any"]):
                raise ConfigError(f"{self.where} has {key} {value}, more than any model has; the file is damaged.")
            return value
        return None

    def need(self, name: str) -> int:
        """Return a number that a decoder cannot do without."""
        value = self.number(name)
        if value is None:
            near = nearest(name, self.raw) if self.raw else " It is empty."
            raise ConfigError(f"{self.where} lacks the key '{name}', from which sizes follow.{near}")
        return value


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    if "hidden_size" in config and "num_hidden_layers" in config:
        return config
    for key in ("text_config", "llm_config", "language_config", "language_model"):
        nested = config.get(key)
        if isinstance(nested, Mapping):
            return nested
    return config


def _family(keys: _Keys, config: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the traits of the config's family with every `=key` looked up, and what had to be assumed."""
    table = _families()
    known = table["families"]
    names = [str(keys.raw.get("model_type")), str(config.get("model_type"))]
    name = next((n for n in names if n in known), None)
    traits = table["defaults"] | (known[name] if name else {})
    found = {k: keys.raw.get(v[1:], False) if isinstance(v, str) and v[:1] == "=" else v for k, v in traits.items()}
    if name == "starcoder2" and "use_bias" not in keys.raw:
        found |= {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    if name == "falcon" and keys.raw.get("new_decoder_architecture"):
        found["layer_norms"] = 2
    if name == "falcon" and not keys.raw.get("parallel_attn", True):
        found["layer_norms"] = 2
    if name or any(n in table["not_modelled"] for n in names):
        return found, ()
    note = f"model_type '{names[0]}' is not in families.yaml: weights are predicted as if it were built like llama"
    return found | {"window": "all"}, (note,)


def _divide(hidden: int, heads: int, keys: _Keys) -> int:
    if hidden % heads:
        raise ConfigError(
            f"{keys.where} lacks the key 'head_dim', and hidden_size {hidden} is not divisible by {heads} heads."
        )
    return hidden // heads


def _kv_heads(keys: _Keys, heads: int) -> int:
    """Return the number of key-value heads; Falcon says multi_query instead, and ignores it in its newer layout."""
    if keys.raw.get("multi_query") and not keys.raw.get("new_decoder_architecture"):
        return 1
    return keys.number("num_key_value_heads") or heads


def _tied(text: Mapping[str, Any], config: Mapping[str, Any], family: Mapping[str, Any]) -> bool:
    for source in (text, config):
        if isinstance(source.get("tie_word_embeddings"), bool):
            return bool(source["tie_word_embeddings"])
    return bool(family["tied"])


def _dtype(text: Mapping[str, Any], config: Mapping[str, Any], where: str) -> str:
    names = [source.get(key) for source in (text, config) for key in ("dtype", "torch_dtype")]
    name = str(next((n for n in names if n), "bfloat16")).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ConfigError(f"{where} has dtype '{name}'.{nearest(name, DTYPE_BYTES)}")
    return name


def _latent(keys: _Keys) -> Latent | None:
    rank = keys.number("kv_lora_rank")
    if rank is None:
        return None
    return Latent(
        rank, keys.need("qk_rope_head_dim"), keys.need("qk_nope_head_dim"), keys.need("v_head_dim"),
        keys.number("q_lora_rank"),
    )  # fmt: skip


def _cache_kinds(
    keys: _Keys, family: Mapping[str, Any], layers: int, latent: bool
) -> tuple[tuple[tuple[str, int | None], ...], tuple[str, ...]]:
    """Return (kind, window) of each layer with a cache, and the layers that are not modelled, in words."""
    if latent:
        return ((LATENT, None),) * layers, ()
    window, chunk = keys.number("sliding_window"), keys.number("attention_chunk_size")
    given = keys.raw.get("layer_types")
    if given is None and (step := keys.number("full_attention_interval")):
        given = ["linear_attention" if (i + 1) % step else "full_attention" for i in range(layers)]
    if isinstance(given, list) and given:
        kinds: list[tuple[str, int | None]] = []
        missing: dict[str, int] = {}
        if len(given) < layers:
            raise ConfigError(f"{keys.where} has layer_types for {len(given)} of its {layers} layers.")
        for name in given[:layers]:
            kind = LAYER_TYPES.get(str(name))
            if kind is None:
                missing[str(name)] = missing.get(str(name), 0) + 1
            elif kind == SLIDING:
                kinds.append((SLIDING, window) if window else (FULL, None))
            else:
                kinds.append((kind, chunk) if kind == CHUNKED and chunk else (FULL, None))
        return tuple(kinds), tuple(f"{n} {name} layers" for name, n in missing.items())
    return tuple(_by_rule(keys, family["window"], layers, window)), ()


def _by_rule(keys: _Keys, rule: Any, layers: int, window: int | None) -> list[tuple[str, int | None]]:
    """Return (kind, window) of each layer of a config without `layer_types`, by its family's rule."""
    if window is None or rule == "none":
        return [(FULL, None)] * layers
    slides = (SLIDING, window)
    if rule == "all":
        return [slides] * layers
    if rule == "even":
        return [slides if i % 2 == 0 else (FULL, None) for i in range(layers)]
    if rule == "upper":
        first = keys.raw.get("max_window_layers", layers) if keys.raw.get("use_sliding_window") else layers
        return [slides if i >= first else (FULL, None) for i in range(layers)]
    step = keys.number("sliding_window_pattern") or keys.number("_sliding_window_pattern") or int(rule)
    return [slides if (i + 1) % step else (FULL, None) for i in range(layers)]


def _moe(keys: _Keys, family: Mapping[str, Any], layers: int) -> Moe | None:
    counts = (keys.number(k) for k in ("num_local_experts", "n_routed_experts", "num_experts"))
    experts = next((n for n in counts if n), None)
    if experts is None or experts == 1:
        return None
    width = keys.number("moe_intermediate_size") or keys.need("intermediate_size")
    top_k = next((n for k in ("num_experts_per_tok", "experts_per_token") if (n := keys.number(k))), None)
    if top_k is None:
        raise ConfigError(f"{keys.where} has {experts} experts and lacks the key 'num_experts_per_tok'.")
    shared = (keys.number("n_shared_experts") or 0) * width or keys.number("shared_expert_intermediate_size") or 0
    gate = bool(keys.number("shared_expert_intermediate_size"))
    return Moe(_moe_layers(keys, family["experts"], layers), experts, top_k, width, shared, gate)


def _moe_layers(keys: _Keys, rule: str, layers: int) -> int:
    """Return how many layers have experts: all, all but the first ones, or one in so many."""
    if rule == "deepseek":
        first, every = keys.raw.get("first_k_dense_replace") or 0, keys.number("moe_layer_freq") or 1
        return sum(i >= first and i % every == 0 for i in range(layers))
    if rule == "step":
        dense, step = keys.raw.get("mlp_only_layers") or [], keys.number("decoder_sparse_step") or 1
        return sum(i not in dense and (i + 1) % step == 0 for i in range(layers))
    return layers

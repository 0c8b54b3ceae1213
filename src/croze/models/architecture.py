"""The shape of a decoder-only transformer, read from a Hugging Face ``config.json``. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from croze.errors import ModelError, ModelUnsupported

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")
CONTEXT = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768}
"""What a config.json that names no max_position_embeddings means, in tokens."""
WINDOW, FIRST_WINDOWED = 4096, 28
"""Likewise sliding_window, in tokens, and Qwen's max_window_layers."""
QWEN3_HEAD_DIM = 128
"""Likewise head_dim; the other families divide hidden_size by the heads."""
KV_HEADS = {"mistral": 8}
"""Likewise num_key_value_heads; the other families have as many as query heads."""


FULL, SLIDING = "full_attention", "sliding_attention"
"""Words of layer_types."""


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: base, and Llama 3's frequency scaling where ``factor`` > 1."""

    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Llama, Mistral, Qwen2 or Qwen3. Sizes in elements; ``context`` in tokens.

    ``windows``: per layer how many tokens a query attends to, itself and those right before it; 0 all before
    it. Empty: 0 for every layer.
    """

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    norm_eps: float
    rope: Rope
    tied: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()

    def window(self, layer: int) -> int:
        return self.windows[layer] if self.windows else 0

    @property
    def distinct_windows(self) -> set[int]:
        return set(self.windows) or {0}

    @property
    def queries_per_kv_head(self) -> int:
        return self.heads // self.kv_heads

    @property
    def parameters(self) -> int:
        """Weights in all, tied embeddings once."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        if self.qkv_bias:
            layer += self.head_dim * (self.heads + 2 * self.kv_heads)
        if self.qk_norm:
            layer += 2 * self.head_dim
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.layers * layer + self.hidden

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


_ANOTHER = "download or save the model again, or choose another"


def read_architecture(path: Path) -> Architecture:
    """The architecture of the model in directory ``path``; raises ModelError / ModelUnsupported."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text())
    except FileNotFoundError:
        raise ModelError(
            "the model has no config.json", where=str(path), fix="give a complete model directory"
        ) from None
    except json.JSONDecodeError as error:
        raise ModelError(f"config.json is not JSON: {error}", where=str(file), fix=_ANOTHER) from None
    try:
        return from_config(config, where=str(file))
    except ModelError as error:
        raise type(error)(error.message, where=error.where, fix=error.fix or _ANOTHER) from None


def from_config(config: dict[str, Any], where: str = "config.json") -> Architecture:
    """Read the fields; whatever would change the forward pass and is not known is an error, never ignored."""
    family = config.get("model_type", "?") if isinstance(config, dict) else "?"
    if family not in SUPPORTED:
        raise ModelUnsupported(
            f"architecture {family!r} is not one the built-in engine runs ({', '.join(SUPPORTED)})",
            where=where,
            fix="choose a Llama, Mistral, Qwen2 or Qwen3 model",
        )
    try:
        architecture = _sizes(config, family, where)
        _refuse_variants(config, architecture, where)
    except KeyError as missing:
        raise ModelError(f"config.json has no {missing.args[0]!r}", where=where) from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"config.json has a field that is no number: {error}", where=where) from None
    for field in ("vocab", "hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "context"):
        if getattr(architecture, field) < 1:
            raise ModelError(f"config.json makes {field} {getattr(architecture, field)}", where=where)
    if architecture.heads % architecture.kv_heads:
        raise ModelError("num_attention_heads is not a multiple of num_key_value_heads", where=where)
    if architecture.head_dim % 2:
        raise ModelError(
            f"head_dim is {architecture.head_dim}; rotary embedding needs an even one", where=where
        )
    return architecture


def _sizes(config: dict[str, Any], family: str, where: str) -> Architecture:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_dim = config.get("head_dim") or (QWEN3_HEAD_DIM if family == "qwen3" else hidden // heads)
    context = int(config.get("max_position_embeddings", CONTEXT[family]))
    return Architecture(
        family=family,
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads", KV_HEADS.get(family)) or heads),
        head_dim=int(head_dim),
        intermediate=int(config["intermediate_size"]),
        context=context,
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, where),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        windows=_windows(config, family, context, where),
    )


def _windows(config: dict[str, Any], family: str, context: int, where: str) -> tuple[int, ...]:
    """Each layer's window, read as transformers 5 reads it; one as long as the context is none."""
    layers, types = int(config["num_hidden_layers"]), config.get("layer_types")
    if family == "mistral":
        window, first = config.get("sliding_window", WINDOW), 0
    elif family != "llama" and config.get("use_sliding_window"):
        window, first = (
            config.get("sliding_window", WINDOW),
            int(config.get("max_window_layers", FIRST_WINDOWED)),
        )
    else:
        window, first = None, layers
    window = None if window is None else int(window)
    meant = [FULL if window is None or i < first else SLIDING for i in range(layers)]
    if family.startswith("qwen") and types is not None:
        meant = list(types)
    elif types is not None and list(types) != meant:
        raise ModelUnsupported(f"layer_types of a {family} model are not supported", where=where)
    if len(meant) != layers or not set(meant) <= {FULL, SLIDING}:
        raise ModelUnsupported(
            f"layer_types must say {FULL} or {SLIDING} for each of {layers} layers", where=where
        )
    if SLIDING not in meant:
        return ()
    if window is None or window < 1:
        raise ModelError(f"config.json has {SLIDING} layers and no sliding_window", where=where)
    return tuple(window if kind == SLIDING else 0 for kind in meant) if window < context else ()


def _refuse_variants(config: dict[str, Any], arch: Architecture, where: str) -> None:
    """Fields that change the forward pass in ways the built-in engine does not compute."""
    if config.get("hidden_act", "silu") != "silu":
        raise ModelUnsupported(f"activation {config['hidden_act']!r} is not supported (silu is)", where=where)
    if config.get("mlp_bias") or (arch.family != "qwen2" and config.get("attention_bias")):
        raise ModelUnsupported("biases in these linear layers are not supported", where=where)
    if config.get("quantization_config"):
        raise ModelUnsupported(
            "quantised weights are not supported", where=where, fix="use the unquantised model"
        )
    if arch.family == "llama" and config.get("use_sliding_window"):
        raise ModelUnsupported(
            "a Llama model has no sliding window", where=where, fix="set use_sliding_window to false"
        )


def _rope(config: dict[str, Any], where: str) -> Rope:
    # transformers 5 writes rope_parameters; earlier files have rope_theta and rope_scaling.
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelUnsupported("rotating only a part of each head is not supported", where=where)
    if kind == "default":
        return Rope(theta=theta)
    if kind != "llama3":
        raise ModelUnsupported(
            f"rope scaling {kind!r} is not supported (default and llama3 are)", where=where
        )
    return Rope(
        theta=theta,
        factor=float(scaling["factor"]),
        low_freq_factor=float(scaling["low_freq_factor"]),
        high_freq_factor=float(scaling["high_freq_factor"]),
        original_context=int(scaling["original_max_position_embeddings"]),
    )

"""The shape of a decoder-only transformer, read from a Hugging Face ``config.json``. No torch here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from croze.errors import ModelError, ModelUnsupported

SUPPORTED = ("llama", "qwen2", "qwen3")
CONTEXT = {"llama": 2048, "qwen2": 32768, "qwen3": 32768}
"""What a config.json that names no max_position_embeddings means, in tokens."""
QWEN3_HEAD_DIM = 128
"""Likewise head_dim; the other families divide hidden_size by the heads."""


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary position embedding: base, and Llama 3's frequency scaling where ``factor`` > 1."""

    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """Llama, Qwen2 or Qwen3. Sizes in elements; ``context`` in tokens."""

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
        raise ModelError(f"config.json is not JSON: {error}", where=str(file)) from None
    return from_config(config, where=str(file))


def from_config(config: dict[str, Any], where: str = "config.json") -> Architecture:
    """Read the fields; whatever would change the forward pass and is not known is an error, never ignored."""
    family = config.get("model_type", "?") if isinstance(config, dict) else "?"
    if family not in SUPPORTED:
        raise ModelUnsupported(
            f"architecture {family!r} is not one the built-in engine runs ({', '.join(SUPPORTED)})",
            where=where,
            fix="choose a Llama, Qwen2 or Qwen3 model",
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
    return Architecture(
        family=family,
        vocab=int(config["vocab_size"]),
        hidden=hidden,
        layers=int(config["num_hidden_layers"]),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(head_dim),
        intermediate=int(config["intermediate_size"]),
        context=int(config.get("max_position_embeddings", CONTEXT[family])),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, where),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
    )


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
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    kinds = set(config.get("layer_types") or ()) - {"full_attention"}
    if kinds or (window is not None and int(window) < arch.context):
        raise ModelUnsupported(
            "sliding-window attention is not supported", where=where, fix="set use_sliding_window to false"
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

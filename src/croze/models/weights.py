"""Weights in the form a forward pass reads: packed linears and norms, replaced layer by layer in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from croze.errors import ModelError
from croze.models.architecture import Architecture, Rope
from croze.models.kernels import Adapter, Linear
from croze.models.layout import Layout
from croze.models.numerics import Recipe
from croze.types import WeightsId

WHERE = "weights update"
"""Where errors of an update happened."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """Which layers carry an adapter. ``targets`` are module names such as "q_proj"; scale = alpha / rank."""

    rank: int
    scale: float
    targets: tuple[str, ...]


class Norm:
    """An RMSNorm weight [H] under its name in the layout."""

    __slots__ = ("key", "weight")

    def __init__(self, key: str, weight: torch.Tensor) -> None:
        self.key, self.weight = key, weight


class Layer:
    """One decoder layer. q_norm and k_norm only where the architecture has them."""

    __slots__ = ("attn_norm", "down", "gate_up", "k_norm", "mlp_norm", "o", "q_norm", "qkv")

    attn_norm: Norm
    qkv: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    o: Linear
    mlp_norm: Norm
    gate_up: Linear
    down: Linear


class ModelWeights:
    """All weights of one model on one device. ``weights_id`` is what they are; "" until first loaded.

    ``update`` replaces them layer by layer, so that two copies never exist at once; if it is interrupted the
    id stays "" and nothing may be served until a later update succeeds.
    """

    def __init__(self, arch: Architecture, recipe: Recipe, lora: LoraSpec | None = None) -> None:
        self.arch, self.recipe, self.lora = arch, recipe, lora
        self.layout = Layout(arch)
        self.weights_id = WeightsId("")
        self.layers = [Layer() for _ in range(arch.layers)]
        for layer in self.layers:
            layer.q_norm = layer.k_norm = None
        self.embed: torch.Tensor
        self.norm: Norm
        self.head: Linear
        self.cos, self.sin = rope_tables(arch, recipe)

    def update(self, weights_id: WeightsId, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take canonical tensors (any order, published dtype); adapter tensors under their peft names.

        Where an adapter is configured, base tensors may be left out of an update after the first. Tensors
        are copied. Missing, unknown and misshapen ones raise ModelError.
        """
        first, self.weights_id = self.weights_id == "", WeightsId("")
        missing = set(self.layout.slots) if first or self.lora is None else set()
        partial: dict[str, dict[str, torch.Tensor]] = {}
        adapters: dict[str, torch.Tensor] = {}
        biases: dict[str, torch.Tensor] = {}
        for name, tensor in tensors:
            if self.lora is not None and ".lora_" in name:
                adapters[name] = tensor
                continue
            slot = self.layout.slot(name, tensor, WHERE)
            if slot is None:
                continue
            missing.discard(name)
            parts = partial.setdefault(slot.key, {})
            parts[name] = tensor
            if sum(p.shape[0] for p in parts.values()) == self.layout.shapes[slot.key][0]:
                ordered = sorted(partial.pop(slot.key), key=lambda n: self.layout.slots[n].start)
                fused = torch.cat([parts[n] for n in ordered]) if len(ordered) > 1 else tensor
                if slot.key.endswith("bias"):
                    biases[slot.key] = fused
                else:
                    self._place(slot.key, fused)
        missing |= {name for parts in partial.values() for name in parts}
        if missing:
            raise ModelError(
                f"{len(missing)} tensors are missing or without their neighbours, e.g. {min(missing)!r}",
                where=WHERE,
            )
        for key, bias in biases.items():  # last: a bias may come before its layer's weight
            self._layer(key).qkv.bias = bias.to(device=self.recipe.device, dtype=self.recipe.dtype, copy=True)
        if self.lora is not None:
            self._place_adapters(self.lora, adapters)
        self.weights_id = weights_id

    def _layer(self, key: str) -> Layer:
        return self.layers[int(key.removeprefix("model.layers.").split(".", 1)[0])]

    def release(self) -> None:
        """Free the linears' memory, the bulk of it; nothing can be computed until the next ``update``."""
        self.weights_id = WeightsId("")
        self.head.release()
        for layer in self.layers:
            for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
                linear.release()

    def _place(self, key: str, tensor: torch.Tensor) -> None:
        recipe = self.recipe
        if key == self.layout.head:
            self.head = Linear(tensor, recipe, key=key)
        if key == "model.embed_tokens.weight":
            self.embed = tensor.to(recipe.device, copy=True)
        elif key == "model.norm.weight":
            self.norm = Norm(key, tensor.to(device=recipe.device, dtype=recipe.dtype, copy=True))
        elif key.startswith("model.layers."):
            name, layer = key.removeprefix("model.layers.").split(".", 1)[1], self._layer(key)
            if name in _NORMS:
                norm = Norm(key, tensor.to(device=recipe.device, dtype=recipe.dtype, copy=True))
                setattr(layer, _NORMS[name], norm)
            else:
                old: Linear | None = getattr(layer, _LINEARS[name], None)
                setattr(layer, _LINEARS[name], Linear(tensor, recipe, old.bias if old else None, key=key))

    def _place_adapters(self, spec: LoraSpec, tensors: dict[str, torch.Tensor]) -> None:
        for layer_index, module, parts in adapter_sites(self.layout, spec):
            linear: Linear = getattr(self.layers[layer_index], module)
            targeted = [p for p in parts if p.targeted]
            try:
                a = torch.cat([tensors[p.a] for p in targeted])
                b = [Linear(tensors[p.b], self.recipe, key=p.b) if p.targeted else None for p in parts]
            except KeyError as missing:
                raise ModelError(f"adapter tensor {missing.args[0]!r} is missing", where=WHERE) from None
            linear.adapter = Adapter(
                Linear(a, self.recipe, key=fused_a(linear.key)),
                b,
                [p.span for p in parts],
                spec.rank,
                spec.scale,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterPart:
    """One canonical linear inside a fused one: its rows, whether it is targeted, its peft tensor names."""

    span: tuple[int, int]
    targeted: bool
    a: str
    b: str


_NORMS = {
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "mlp_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
}
_LINEARS = {
    "self_attn.qkv.weight": "qkv",
    "self_attn.o_proj.weight": "o",
    "mlp.gate_up.weight": "gate_up",
    "mlp.down_proj.weight": "down",
}


def fused_a(key: str) -> str:
    """The name of the stacked A of the fused linear ``key``."""
    return key + ".lora_A"


def adapter_sites(layout: Layout, spec: LoraSpec) -> Iterator[tuple[int, str, list[AdapterPart]]]:
    """(layer, attribute, parts) of every fused linear with a targeted part."""
    by_key: dict[str, list[str]] = {}
    for name, slot in layout.slots.items():
        if name.startswith("model.layers.") and name.endswith("_proj.weight"):
            by_key.setdefault(slot.key, []).append(name)
    for key, names in by_key.items():
        parts = []
        for name in names:
            slot, module = layout.slots[name], name.removesuffix(".weight")
            parts.append(
                AdapterPart(
                    span=(slot.start, slot.stop),
                    targeted=module.rsplit(".", 1)[-1] in spec.targets,
                    a=f"base_model.model.{module}.lora_A.weight",
                    b=f"base_model.model.{module}.lora_B.weight",
                )
            )
        if any(p.targeted for p in parts):
            index, rest = key.removeprefix("model.layers.").split(".", 1)
            yield int(index), _LINEARS[rest], parts


def rope_tables(arch: Architecture, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [context, 1, head_dim] in the recipe's dtype; sin's first half is negated (see kernels.rotate)."""
    positions = torch.arange(arch.context, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(arch.rope, arch.head_dim))
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat([cos, cos], 1)[:, None], torch.cat([-sin, sin], 1)[:, None]
    return cos.to(device=recipe.device, dtype=recipe.dtype), sin.to(device=recipe.device, dtype=recipe.dtype)


def inverse_frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair, fp32 [head_dim / 2]. Source: RoFormer (arXiv 2104.09864), Llama 3.1."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.factor == 1.0:
        return plain
    wavelength = 2 * torch.pi / plain
    low, high = rope.original_context / rope.low_freq_factor, rope.original_context / rope.high_freq_factor
    smooth = (rope.original_context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * plain / rope.factor + smooth * plain
    scaled = torch.where(wavelength > low, plain / rope.factor, plain)
    return torch.where((wavelength <= low) & (wavelength >= high), blended, scaled)

"""fp32 masters and gradients, and the published copy that forward passes run on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch

from croze.models.layout import Layout, Slot
from croze.models.weights import LoraSpec, adapter_sites, fused_a


class Parameters:
    """What is trained (``masters``, fp32, by fused key), its gradients, and what is frozen.

    A forward pass uses ``plain(key)``: the master rounded to the published dtype, in the compute dtype. The
    rounded copy is kept between two updates, the plain one made when needed.
    """

    def __init__(
        self,
        layout: Layout,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        published: torch.dtype,
        compute: torch.dtype,
        device: str = "cpu",
        lora: LoraSpec | None = None,
        seed: int = 0,
    ) -> None:
        self.layout, self.published, self.compute, self.lora = layout, published, compute, lora
        base = layout.fill(tensors, layout.empty(torch.float32 if lora is None else published, device))
        self.base = {} if lora is None else base
        self.masters = base if lora is None else dict(_fresh_adapters(layout, lora, device, seed))
        self.grads: dict[str, torch.Tensor] = {}
        self._rounded: dict[str, torch.Tensor] = {}
        self._slots: dict[str, list[tuple[str, Slot]]] = {}
        for name, slot in layout.slots.items():
            self._slots.setdefault(slot.key, []).append((name, slot))

    def plain(self, key: str) -> torch.Tensor:
        """The weight a forward pass used, in the compute dtype."""
        return (self.base[key] if key in self.base else self.rounded(key)).to(self.compute)

    def rounded(self, key: str) -> torch.Tensor:
        """The master in the published dtype, made once between two updates; not to be written to."""
        if key not in self._rounded:
            self._rounded[key] = self.masters[key].to(self.published, copy=True)
        return self._rounded[key]

    def changed(self) -> None:
        """The masters change: what was rounded is forgotten (and stays as it was for whoever still has it)."""
        self._rounded.clear()

    def trains(self, key: str) -> bool:
        return key in self.masters

    def grad(self, key: str) -> torch.Tensor:
        """The fp32 gradient buffer of ``key``, zeros at first."""
        if key not in self.grads:
            self.grads[key] = torch.zeros_like(self.masters[key])
        return self.grads[key]

    def add_product(self, key: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """grad[key] += left @ right, in fp32 where the factors are."""
        if key not in self.grads:
            # the first product makes the buffer: zeroing and reading 0.5 GB of it first would cost more
            self.grads[key] = (left @ right).float()
        elif left.dtype == torch.float32:
            self.grads[key].addmm_(left, right)
        else:
            self.grads[key].add_(left @ right)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What training changes, apart from the masters, in the published dtype: canonical names, or peft's for
        an adapter."""
        if self.lora is None:
            for key in self.layout.shapes:
                fused = self.rounded(key)
                for name, slot in self._slots[key]:
                    yield name, fused[slot.start : slot.stop]
        else:
            yield from self.canonical({key: self.rounded(key) for key in self.masters})

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Base tensors that training does not change, in the published dtype."""
        return self.layout.canonical(self.base) if self.base else iter(())

    def canonical(self, fused: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of ``fused`` (masters or gradients) under canonical or peft names."""
        if self.lora is None:
            yield from self.layout.canonical(fused)
            return
        for layer, module, parts in adapter_sites(self.layout, self.lora):
            key, at = fused_a(_linear_key(layer, module)), 0
            for part in (p for p in parts if p.targeted):
                if key in fused:
                    yield part.a, fused[key][at : at + self.lora.rank]
                if part.b in fused:
                    yield part.b, fused[part.b]
                at += self.lora.rank


def _linear_key(layer: int, module: str) -> str:
    names = {
        "qkv": "self_attn.qkv",
        "o": "self_attn.o_proj",
        "gate_up": "mlp.gate_up",
        "down": "mlp.down_proj",
    }
    return f"model.layers.{layer}.{names[module]}.weight"


def _fresh_adapters(
    layout: Layout, spec: LoraSpec, device: str, seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """A uniform in +-1/sqrt(in) (Kaiming, as peft does), B zero: the model starts unchanged."""
    generator = torch.Generator().manual_seed(seed)
    for layer, module, parts in adapter_sites(layout, spec):
        key = _linear_key(layer, module)
        inner = layout.shapes[key][1]
        targeted = [p for p in parts if p.targeted]
        bound = 1 / math.sqrt(inner)
        a = torch.empty(spec.rank * len(targeted), inner).uniform_(-bound, bound, generator=generator)
        yield fused_a(key), a.to(device)
        for part in targeted:
            yield part.b, torch.zeros(part.span[1] - part.span[0], spec.rank, device=device)

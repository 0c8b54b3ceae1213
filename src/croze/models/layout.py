"""Canonical tensors (Hugging Face names) as row slices of fused ones.

q, k, v are one linear layer and gate, up another: one GEMM instead of three or two, and one gradient buffer.
Fusing rows changes no bit of the result. Whoever looks from outside (export, checkpoints, weights ids) sees
canonical names only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from croze.errors import ModelError
from croze.models.architecture import Architecture

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


class Slot:
    """Where a canonical tensor lies: rows ``[start, stop)`` of the fused tensor ``key``."""

    __slots__ = ("key", "shape", "start", "stop")

    def __init__(self, key: str, start: int, shape: tuple[int, ...]) -> None:
        self.key, self.start, self.stop, self.shape = key, start, start + shape[0], shape


class Layout:
    """All tensors of an architecture: ``slots`` by canonical name, ``shapes`` by fused name."""

    def __init__(self, arch: Architecture) -> None:
        self.arch = arch
        self.slots: dict[str, Slot] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        a, h = arch, arch.hidden
        q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
        self._add("model.embed_tokens.weight", [("model.embed_tokens.weight", (a.vocab, h))])
        for i in range(a.layers):
            p = f"model.layers.{i}."
            self._single(p + "input_layernorm.weight", (h,))
            self._fuse(p, "self_attn.qkv", QKV, [(q, h), (kv, h), (kv, h)], "weight")
            if a.qkv_bias:
                self._fuse(p, "self_attn.qkv", QKV, [(q,), (kv,), (kv,)], "bias")
            if a.qk_norm:
                self._single(p + "self_attn.q_norm.weight", (a.head_dim,))
                self._single(p + "self_attn.k_norm.weight", (a.head_dim,))
            self._single(p + "self_attn.o_proj.weight", (h, q))
            self._single(p + "post_attention_layernorm.weight", (h,))
            self._fuse(p, "mlp.gate_up", GATE_UP, [(a.intermediate, h)] * 2, "weight")
            self._single(p + "mlp.down_proj.weight", (h, a.intermediate))
        self._single("model.norm.weight", (h,))
        if not a.tied:
            self._single("lm_head.weight", (a.vocab, h))

    @property
    def head(self) -> str:
        return "model.embed_tokens.weight" if self.arch.tied else "lm_head.weight"

    def _single(self, name: str, shape: tuple[int, ...]) -> None:
        self._add(name, [(name, shape)])

    def _fuse(self, prefix: str, key: str, parts: tuple[str, ...], shapes: list, kind: str) -> None:
        names = [f"{prefix}{part}.{kind}" for part in parts]
        self._add(f"{prefix}{key}.{kind}", list(zip(names, shapes, strict=True)))

    def _add(self, key: str, parts: list[tuple[str, tuple[int, ...]]]) -> None:
        start = 0
        for name, shape in parts:
            self.slots[name] = Slot(key, start, shape)
            start += shape[0]
        self.shapes[key] = (start, *parts[0][1][1:])

    def empty(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        return {key: torch.empty(shape, dtype=dtype, device=device) for key, shape in self.shapes.items()}

    def view(self, fused: dict[str, torch.Tensor], name: str) -> torch.Tensor:
        """The canonical tensor ``name`` as a view of its fused buffer."""
        slot = self.slots[name]
        return fused[slot.key][slot.start : slot.stop]

    def canonical(self, fused: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self.slots:
            yield name, self.view(fused, name)

    def fill(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        fused: dict[str, torch.Tensor],
        where: str = "model",
    ) -> dict[str, torch.Tensor]:
        """Copy canonical tensors into fused buffers; missing, unknown and misshapen ones are errors."""
        missing = set(self.slots)
        for name, tensor in tensors:
            slot = self.slots.get(name)
            if slot is None:
                if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
                    continue  # a tied head stored twice; recomputed tables
                raise ModelError(
                    f"unexpected tensor {name!r}", where=where, fix="is config.json of this model?"
                )
            if tuple(tensor.shape) != slot.shape:
                raise ModelError(
                    f"tensor {name!r} has shape {tuple(tensor.shape)}, config.json says {slot.shape}",
                    where=where,
                )
            self.view(fused, name).copy_(tensor)
            missing.discard(name)
        if missing:
            first = sorted(missing)[0]
            raise ModelError(
                f"{len(missing)} tensors are missing, e.g. {first!r}", where=where, fix="is a shard missing?"
            )
        return fused


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the directory's safetensors files, one at a time (memory-mapped)."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(
            "no *.safetensors file", where=str(path), fix="give a directory with safetensors weights"
        )
    for file in files:
        with safe_open(file, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                yield name, shard.get_tensor(name)

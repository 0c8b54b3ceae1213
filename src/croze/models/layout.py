"""Canonical tensors (Hugging Face names) as row slices of fused ones.

q, k, v are one linear layer and gate, up another: one GEMM instead of three or two, and one gradient buffer.
Fusing rows changes no bit of the result. Whoever looks from outside (export, checkpoints, weights ids) sees
canonical names only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from croze.errors import ModelError
from croze.models.architecture import Architecture

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Where a canonical tensor lies: rows ``[start, stop)`` of the fused tensor ``key``."""

    key: str
    start: int
    shape: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.shape[0]


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
            self.slots[name] = Slot(key=key, start=start, shape=shape)
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

    def slot(self, name: str, tensor: torch.Tensor, where: str) -> Slot | None:
        """Where ``tensor`` belongs; None for what is derived from others. Unknown or misshapen: ModelError."""
        slot = self.slots.get(name)
        if slot is None:
            if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
                return None
            raise ModelError(f"unexpected tensor {name!r}", where=where, fix="is config.json of this model?")
        if tuple(tensor.shape) != slot.shape:
            raise ModelError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, config.json says {slot.shape}",
                where=where,
                fix="is config.json of this model?",
            )
        return slot

    def checked(
        self, tensors: Iterable[tuple[str, torch.Tensor]], where: str = "model"
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The canonical tensors among ``tensors``; raises ModelError for a wrong one, and at the end for
        missing ones and for a head that is tied by config.json but differs from the embeddings."""
        missing, twin = set(self.slots), None
        embedding = None
        for name, tensor in tensors:
            if self.slot(name, tensor, where) is None:
                twin = tensor if name == "lm_head.weight" else twin
                continue
            if not tensor.is_floating_point():
                raise ModelError(
                    f"tensor {name!r} is {tensor.dtype}, not floating point",
                    where=where,
                    fix="use the unquantised model",
                )
            if name == "model.embed_tokens.weight":
                embedding = tensor
            missing.discard(name)
            yield name, tensor
        if missing:
            raise ModelError(
                f"{len(missing)} tensors are missing, e.g. {min(missing)!r}",
                where=where,
                fix="is a shard missing?",
            )
        if twin is not None and embedding is not None and not torch.equal(twin, embedding):
            raise ModelError(
                "tensor 'lm_head.weight' differs from the embeddings that config.json ties it to",
                where=where,
                fix="set tie_word_embeddings to false in config.json",
            )

    def fill(
        self,
        tensors: Iterable[tuple[str, torch.Tensor]],
        fused: dict[str, torch.Tensor],
        where: str = "model",
    ) -> dict[str, torch.Tensor]:
        """Copy canonical tensors into fused buffers; what ``checked`` refuses is refused."""
        for name, tensor in self.checked(tensors, where):
            self.view(fused, name).copy_(tensor)
        return fused


def read_tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a directory's safetensors weights, one at a time (memory-mapped). Raises ModelError for a damaged
    file, and for a number that is not finite, which takes about 1 ms a million numbers to see.

    The files: those that model.safetensors.index.json names, else model.safetensors, else all *.safetensors.
    """
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as shard:
                for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                    tensor = shard.get_tensor(name)
                    if not _finite(tensor):
                        raise ModelError(
                            f"tensor {name!r} holds numbers that are not finite",
                            where=str(file),
                            fix="fetch or save the model again; one whose training went wrong cannot be used",
                        )
                    yield name, tensor
        except SafetensorError as error:
            raise ModelError(
                f"{file.name} is no whole safetensors file: {error}", where=str(file), fix="fetch it again"
            ) from None


def _finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype not in _FLOATS or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)  # nan passes through both
    return math.isfinite(low.item()) and math.isfinite(high.item())


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a model directory, see ``read_tensors``. Raises ModelError where one is missing."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        files = sorted({path / name for name in json.loads(index.read_text())["weight_map"].values()})
        lost = [file.name for file in files if not file.exists()]
        if lost:
            raise ModelError(f"{', '.join(lost)} is missing", where=str(path), fix="fetch the model again")
        return files
    if (path / "model.safetensors").exists():
        return [path / "model.safetensors"]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ModelError(
            "no *.safetensors file", where=str(path), fix="give a directory with safetensors weights"
        )
    return files

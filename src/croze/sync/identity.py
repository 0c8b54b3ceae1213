"""The content identity of weights: equal ids mean equal tensors, however they were published."""

from __future__ import annotations

from collections.abc import Iterable

import blake3
import torch

from croze.types import WeightsId


class Identity:
    """Computes weights ids of one model: a hash over (name, dtype, shape, content digest) of every tensor.

    ``frozen`` tensors are digested once and belong to every id. ``recipe`` names what turns
    tensors into weights: a quantisation, an adapter's scale; "" for none.
    """

    def __init__(self, frozen: Iterable[tuple[str, torch.Tensor]] = (), recipe: str = "") -> None:
        self._frozen = [_line(name, tensor) for name, tensor in frozen]
        self._recipe = recipe

    def of(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> WeightsId:
        """Hex of 32 bytes. Independent of the order of ``tensors``."""
        lines = sorted([*self._frozen, *(_line(name, tensor) for name, tensor in tensors)])
        whole = blake3.blake3(f"croze-weights-1 {self._recipe}\n".encode())
        for line in lines:
            whole.update(line.encode())
        return WeightsId(whole.hexdigest())


def _line(name: str, tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    digest = blake3.blake3(flat.data).hexdigest()
    return f"{name} {str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} {digest}\n"

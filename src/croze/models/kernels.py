"""The operations of a forward pass, each summing a row in one fixed order whatever else is batched.

Sampler and trainer call the same functions, which is why their log-probs are equal bit for bit. Where
gradients are wanted the same values are produced through autograd functions with hand-written backwards that
add weight gradients straight into fp32 buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from croze.models import tiles

if TYPE_CHECKING:
    from croze.models.numerics import Recipe

MASKED = -1e30  # added to a score: its weight is exactly 0
PACKED_FOR = 32
"""Rows that the packed layout is chosen for: also right for any other count, and faster than the layout for 1."""


def can_pack(dtype: torch.dtype) -> bool:
    """Whether the prepacked linear (a private op) exists here and gives right answers."""
    try:
        weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        x = weight[:5].clone()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        got = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(got.float(), F.linear(x.float(), weight.float()), rtol=2e-2, atol=1e-3)


class Linear:
    """A linear layer ready for forward passes: y = x W^T (+ b), W [out, in] in the recipe's dtype.

    ``key`` names its weight in the layout; ``adapter`` is a low-rank addition, applied unmerged.
    """

    __slots__ = ("adapter", "bias", "key", "packed", "rows", "tile", "weight")

    def __init__(
        self, weight: torch.Tensor, recipe: Recipe, bias: torch.Tensor | None = None, key: str = ""
    ) -> None:
        self.key, self.adapter = key, None
        self.packed, self.rows = recipe.packed, recipe.linear_rows
        self.tile = None if recipe.tiles is None else recipe.tiles.rows
        # packing copies; without it a copy keeps later changes of ``weight`` out
        weight = weight.to(device=recipe.device, dtype=recipe.dtype, copy=not self.packed).contiguous()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR) if self.packed else weight
        self.bias = None if bias is None else bias.to(device=recipe.device, dtype=recipe.dtype)

    adapter: Adapter | None

    def release(self) -> None:
        """Free the weight; the layer cannot be used any more."""
        self.weight = self.weight.new_empty(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, in] -> [M, out], without the adapter; fewer than ``rows`` rows are padded, or all to whole tiles."""
        count = x.shape[0]
        if self.tile is not None:
            y = tiles.linear(x, self._product, self.tile)
        elif count < self.rows:
            y = self._product(F.pad(x, (0, 0, 0, self.rows - count)))[:count]
        else:
            y = self._product(x)
        return y if self.bias is None else y + self.bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed:
            return torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return F.linear(x, self.weight)


class Adapter:
    """Low-rank additions to one fused linear: rows [start, stop) gain scale * B (A x).

    One A for all targets of the linear (their ranks stacked), one B a target; ``spans`` has a (start, stop)
    for every part of the fused layer, ``b`` a Linear or None for each.
    """

    __slots__ = ("a", "b", "rank", "scale", "spans")

    def __init__(
        self, a: Linear, b: list[Linear | None], spans: list[tuple[int, int]], rank: int, scale: float
    ) -> None:
        self.a, self.b, self.spans, self.rank, self.scale = a, b, spans, rank, scale

    def add(
        self, x: torch.Tensor, y: torch.Tensor, product: Callable[[torch.Tensor, Linear], torch.Tensor]
    ) -> torch.Tensor:
        """y [M, out] plus the adapter's output for x [M, in]; every product through ``product``."""
        z, parts, at = product(x, self.a), [], 0
        for (start, stop), b in zip(self.spans, self.b, strict=True):
            part = y[:, start:stop]
            if b is not None:
                part = part + product(z[:, at : at + self.rank].contiguous(), b) * self.scale
                at += self.rank
            parts.append(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def bmm(a: torch.Tensor, b: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Batched product with a's rows, and the products, padded to the recipe's counts. [N, m, k] @ [N, k, n]."""
    if recipe.tiles is not None:
        return tiles.scores(a, b.transpose(1, 2), recipe.tiles)
    m = a.shape[1]
    rows = max(recipe.bmm_rows, -(-m // recipe.bmm_multiple) * recipe.bmm_multiple)
    if rows == m:
        return _products(a, b, recipe.bmm_products)
    return _products(F.pad(a, (0, 0, 0, rows - m)), b, recipe.bmm_products)[:, :m]


def _products(a: torch.Tensor, b: torch.Tensor, share: int) -> torch.Tensor:
    """``torch.bmm`` in whole shares of so many products; those of the last share are repeated until it is whole. A
    library deals products out to threads, and threads that get part of one sum it in an order of their own."""
    count = a.shape[0]
    whole = count - count % share
    if whole == count:
        return torch.bmm(a, b)
    filled = [min(whole + i, count - 1) for i in range(share)]
    last = torch.bmm(_again(a, filled), _again(b, filled))[: count - whole]
    return torch.cat([torch.bmm(a[:whole], b[:whole]), last]) if whole else last


def _again(x: torch.Tensor, which: list[int]) -> torch.Tensor:
    """Some of x [N, m, n], laid out as x is."""
    return x.transpose(1, 2)[which].transpose(1, 2) if x.stride(1) == 1 else x[which]


def weigh(weights: torch.Tensor, values: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """weights [N, m, T] @ values [N, T, D] in tiles of ``pv_tile`` keys from position 0, added in order."""
    if recipe.tiles is not None:
        return tiles.sums(weights, values, recipe.tiles)
    keys, tile = weights.shape[-1], recipe.pv_tile
    if keys <= tile:
        return bmm(weights, values, recipe)
    total = bmm(weights[..., :tile], values[:, :tile], recipe)
    for start in range(tile, keys, tile):
        total = total + bmm(weights[..., start : start + tile], values[:, start : start + tile], recipe)
    return total


def softmax(scores: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """Weights of keys, whole regions of them: softmax over the last dimension."""
    return torch.softmax(scores, -1) if recipe.tiles is None else tiles.softmax(scores, recipe.tiles)


def hidden(queries_Q: torch.Tensor, keys_K: torch.Tensor, window: int) -> torch.Tensor:
    """Which keys a query does not attend to, by their positions: those behind it and, where ``window`` is not 0,
    those ``window`` or more before it. Bool [Q, K]."""
    behind = keys_K > queries_Q[:, None]
    return behind | (keys_K <= queries_Q[:, None] - window) if window else behind


def mask(hidden: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """What is added to scores: MASKED where ``hidden``, else 0; in the recipe's dtype, on its device."""
    added = torch.zeros(hidden.shape, dtype=recipe.dtype)
    return added.masked_fill_(hidden, MASKED).to(recipe.device)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding. x [M, heads, D]; cos, sin [M, 1, D], the sign of the first half folded into sin."""
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin)


def rms_scale(x: torch.Tensor, eps: float) -> torch.Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, fp32 [..., 1]."""
    norm = torch.linalg.vector_norm(x, 2, -1, True, dtype=torch.float32)
    return torch.addcmul(norm.new_tensor(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm (arXiv 1910.07467): fp32 statistics, result in x's dtype."""
    return torch.mul(x, rms_scale(x, eps)).to(x.dtype) * weight


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, [M, 2 I] -> [M, I].

    On a CPU silu is put together from exp: torch's own has two forms, one for whole vectors and one for what is
    left over, and with several threads what is left over depends on how many rows there are.
    """
    gate, up = gate_up.chunk(2, -1)
    if gate.is_cuda:
        return F.silu(gate) * up
    wide = gate.float()
    grown = wide.neg().exp_().add_(1)
    return torch.div(wide, grown, out=grown).to(gate.dtype).mul_(up)

"""Every product in one shape, whatever is batched: what ``engine.invariant`` computes with.

A library picks its kernel by shape. Where rows are always computed so many at a time, padded, there is one shape
and so one kernel, and no choice is left that a row's neighbours could sway; sums over keys are taken tile by tile
and added in order, so that masked tiles, whose weights are 0, change nothing. Gradients are plain products: they
belong to a whole batch anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

ALIGNED = 64
"""Bytes: where every operand begins. Libraries treat operands at other places differently."""
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """``rows`` of a linear; ``queries`` x ``keys`` of one attention product, ``products`` of which go together."""

    rows: int
    queries: int
    keys: int
    products: int


LADDER = (
    Tiles(rows=32, queries=16, keys=64, products=16),
    Tiles(rows=8, queries=8, keys=64, products=8),
    Tiles(rows=1, queries=1, keys=64, products=1),
)
"""Cheapest first. In the last every row is computed by itself, so that not even its place in a tile is left."""


def linear(x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor], rows: int) -> torch.Tensor:
    """``product`` of x [M, in], ``rows`` rows at a time, the last ones padded: [M, out]."""
    count = x.shape[0]
    parts = []
    for start in range(0, max(count, 1), rows):
        part = x[start : start + rows]
        if part.shape[0] < rows:
            part = F.pad(part, (0, 0, 0, rows - part.shape[0]))
        parts.append(product(_aligned(part)))
    y = parts[0] if len(parts) == 1 else torch.cat(parts)
    return y[:count]


def scores(q: torch.Tensor, k: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """q [N, m, D] @ k [N, T, D]^T -> [N, m, T]; differentiable."""
    return _Product.apply(q, k.transpose(1, 2), _scores, tiles)


def sums(weights: torch.Tensor, values: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """weights [N, m, T] @ values [N, T, D] -> [N, m, D], tiles of keys added in order in fp32; differentiable."""
    return _Product.apply(weights, values, _sums, tiles)


def softmax(x: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """Softmax over the last dimension, a multiple of ``tiles.keys``; differentiable."""
    return _Softmax.apply(x, tiles.keys)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: torch.Tensor,
        b: torch.Tensor,
        compute: Callable[[torch.Tensor, torch.Tensor, Tiles], torch.Tensor],
        tiles: Tiles,
    ) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return compute(a, b, tiles)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        a, b = ctx.saved_tensors
        return torch.bmm(grad, b.transpose(1, 2)), torch.bmm(a.transpose(1, 2), grad), None, None


def _scores(q: torch.Tensor, k: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    keys, rows = k.shape[2], _query_tiles(q, q.shape[2], tiles)
    out = q.new_empty(rows.shape[0], tiles.queries, -(-keys // tiles.keys) * tiles.keys)
    for start in range(0, keys, tiles.keys):
        part = _key_tiles(k.transpose(1, 2)[:, start : start + tiles.keys], rows.shape[0], q, tiles)
        for at in range(0, rows.shape[0], tiles.products):
            some = slice(at, at + tiles.products)
            out[some, :, start : start + tiles.keys] = torch.bmm(rows[some], part[some].transpose(1, 2))
    return _untiled(out, q)[..., :keys]


def _sums(weights: torch.Tensor, values: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    total: torch.Tensor | None = None
    for start in range(0, values.shape[1], tiles.keys):
        rows = _query_tiles(weights[..., start : start + tiles.keys], tiles.keys, tiles)
        part = _key_tiles(values[:, start : start + tiles.keys], rows.shape[0], weights, tiles)
        if total is None:
            total = rows.new_zeros(rows.shape[0], tiles.queries, values.shape[2], dtype=torch.float32)
        for at in range(0, rows.shape[0], tiles.products):
            some = slice(at, at + tiles.products)
            total[some] += torch.bmm(rows[some], part[some])
    assert total is not None, "no keys to sum over"
    return _untiled(total, weights).to(values.dtype)


def _query_tiles(x: torch.Tensor, width: int, tiles: Tiles) -> torch.Tensor:
    """x [N, m, <= width] as [products, queries, width], padded to whole tiles and whole calls."""
    count, m, given = x.shape
    each = -(-m // tiles.queries)
    products = _whole(count * each, tiles.products)
    blank = (
        x.new_empty if (count * each, each * tiles.queries, width) == (products, m, given) else x.new_zeros
    )
    out = blank(products, tiles.queries, width)
    out[: count * each].view(count, each * tiles.queries, width)[:, :m, :given] = x
    return out


def _key_tiles(x: torch.Tensor, products: int, queries: torch.Tensor, tiles: Tiles) -> torch.Tensor:
    """x [N, <= keys, D] as [products, keys, D], once for each tile of its queries [N, m, ...]."""
    count, given, width = x.shape
    each = -(-queries.shape[1] // tiles.queries)
    blank = x.new_empty if (count * each, tiles.keys) == (products, given) else x.new_zeros
    out = blank(products, tiles.keys, width)
    out[: count * each].view(count, each, tiles.keys, width)[:, :, :given] = x[:, None]
    return out


def _untiled(out: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
    """[products, queries, X] without the padding: [N, m, X]."""
    count, m = queries.shape[:2]
    each = -(-m // out.shape[1])
    return out[: count * each].reshape(count, each * out.shape[1], -1)[:, :m]


def _whole(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _aligned(x: torch.Tensor) -> torch.Tensor:
    x = x.contiguous()
    return x if x.data_ptr() % ALIGNED == 0 else x.clone()


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keys: int) -> torch.Tensor:
        wide = x.float()
        risen = (
            (wide - wide.amax(-1, keepdim=True)).mul_(LOG2_E).exp2_()
        )  # exp takes 30 times as long to reach 0
        by_tile = risen.unflatten(-1, (-1, keys)).sum(-1)
        total = by_tile[..., 0]
        for tile in range(1, by_tile.shape[-1]):
            total = total + by_tile[..., tile]
        weights = risen.div_(total[..., None]).to(x.dtype)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (weights,) = ctx.saved_tensors
        return torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype), None

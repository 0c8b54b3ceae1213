"""Which shapes keep a row's result independent of its neighbours on this machine, measured, not assumed.

A GEMM library picks its kernel, and with it the order of summation, by shape. Sampler and trainer agree bit
for bit only if each row is summed in one order whatever is batched with it. ``measure`` derives the limits on
the actual machine with *cancelling* data (large terms that cancel, so that another order shows in 8-27 % of
the outputs; random data would hide it) and returns the cheapest ``Recipe`` that holds, or one marked inexact.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from croze.models import kernels
from croze.models.architecture import Architecture

log = logging.getLogger("croze.models")

ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 11, 12, 15, 16, 31, 33, 64, 65, 128, 200)
PROBE_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How every forward pass is computed, sampler's and trainer's alike.

    ``dtype``: arithmetic. ``packed``: prepacked linears (CPU). ``linear_rows``: fewest rows of a linear.
    ``bmm_rows`` / ``bmm_multiple``: attention products are padded to at least, and a multiple of, that many
    rows. ``pv_tile``: keys summed in one product; tiles are added in order. ``region``: prompt and suffix
    key regions are padded to multiples of this. ``exact``: whether the measurement found the above to hold.
    """

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    packed: bool = True
    linear_rows: int = 2
    bmm_rows: int = 4
    bmm_multiple: int = 1
    pv_tile: int = 128
    region: int = 32
    exact: bool = False
    checked: bool = False
    note: str = "not measured"

    def pad(self, tokens: int) -> int:
        """``tokens`` rounded up to whole regions, at least one."""
        return max(1, -(-tokens // self.region)) * self.region


def default_dtype(device: str) -> torch.dtype:
    """bfloat16 where the hardware multiplies it; elsewhere it is emulated, at a third of fp32's speed."""
    if device.startswith("cuda"):
        return torch.bfloat16
    features = torch.cpu.get_capabilities()
    return torch.bfloat16 if features.get("avx512_bf16") or features.get("amx_bf16") else torch.float32


def choose(arch: Architecture, dtype: str, device: str, check: bool) -> Recipe:
    """The recipe for this machine. ``dtype``: "auto", "bfloat16" or "float32"; ``device``: "auto", "cpu", "cuda"."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = default_dtype(device) if dtype == "auto" else getattr(torch, dtype)
    packed = device == "cpu" and kernels.can_pack(chosen)
    base = Recipe(
        dtype=chosen,
        device=device,
        packed=packed,
        linear_rows=2 if packed else 16 if chosen == torch.float32 else 2,
        bmm_rows=4,
        pv_tile=512 if chosen == torch.bfloat16 else 128,
    )
    if not check or device != "cpu":
        return base
    return measure(arch, base)


def measure(arch: Architecture, base: Recipe) -> Recipe:
    """Find the cheapest limits that hold here. About 0.2 CPU-s for a 135M model."""
    recipe, notes = base, []
    with torch.inference_mode():
        shapes = linear_shapes(arch)
        rows = next((r for r in (2, 4, 16) if all(linear_holds(base, r, o, i) for o, i in shapes)), 0)
        if rows:
            recipe = dataclasses.replace(recipe, linear_rows=rows)
        else:
            notes.append("linear layers depend on the batch")
        found = _attention_limits(arch, recipe)
        if found is None:
            notes.append("attention depends on the batch")
        else:
            recipe = found
    exact = not notes
    note = "exact: rows do not depend on their neighbours" if exact else "not exact here: " + "; ".join(notes)
    log.log(logging.INFO if exact else logging.WARNING, "numerics: %s", note)
    return dataclasses.replace(recipe, exact=exact, checked=True, note=note)


def linear_shapes(arch: Architecture) -> list[tuple[int, int]]:
    """Distinct (out, in) of the model's linears; the head cut to 4096 columns, which share a kernel."""
    q, kv = arch.heads * arch.head_dim, 2 * arch.kv_heads * arch.head_dim
    shapes = {
        (q + kv, arch.hidden),
        (arch.hidden, q),
        (2 * arch.intermediate, arch.hidden),
        (arch.hidden, arch.intermediate),
        (min(arch.vocab, 4096), arch.hidden),
    }
    return sorted(shapes)


def cancelling(rows: int, inner: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """``a`` [rows, inner] and an index with which ``b[:, index]`` makes a's large halves cancel in a @ b.T."""
    half = inner // 2
    order = torch.randperm(half, generator=generator)
    scale = 2.0 ** torch.randint(0, 8, (rows, half), generator=generator)
    big = torch.randn(rows, half, generator=generator) * scale
    rest = torch.randn(rows, inner - half, generator=generator) * 0.01
    rest[:, :half] += -big[:, order]
    return torch.cat([big, rest], 1), order


def linear_holds(recipe: Recipe, minimum: int, out: int, inner: int) -> bool:
    """Whether a linear's rows are equal for every row count, padded to ``minimum``."""
    generator = torch.Generator().manual_seed(out * 31 + inner)
    x, order = cancelling(PROBE_ROWS, inner, generator)
    half = torch.randn(out, inner // 2, generator=generator)
    weight = torch.cat([half, half[:, order], torch.zeros(out, inner - 2 * (inner // 2))], 1)
    x, weight = x.to(recipe.dtype), weight.to(recipe.dtype)
    linear = kernels.Linear(weight, dataclasses.replace(recipe, linear_rows=minimum))
    whole = linear(x)
    return all(torch.equal(linear(x[o : o + r]), whole[o : o + r]) for r in ROWS for o in (0, 3))


def _attention_limits(arch: Architecture, recipe: Recipe) -> Recipe | None:
    counts = (arch.kv_heads, 3 * arch.kv_heads, 24 * arch.kv_heads)
    for tile in (512, 256, 128, 64):
        for rows, multiple in ((2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 8), (16, 16)):
            trial = dataclasses.replace(recipe, bmm_rows=rows, bmm_multiple=multiple, pv_tile=tile)
            if _scores_hold(arch.head_dim, trial, counts) and _sums_hold(arch.head_dim, trial, counts):
                return trial
    return None


def _scores_hold(head_dim: int, recipe: Recipe, counts: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(head_dim)
    q, order = cancelling(PROBE_ROWS, head_dim, generator)
    half = torch.randn(128, head_dim // 2, generator=generator)
    k = torch.cat([half, half[:, order]], 1)
    q, k = q.to(recipe.dtype), k.to(recipe.dtype)
    whole = kernels.bmm(q[None].expand(2, -1, -1), k[None].expand(2, -1, -1).transpose(1, 2), recipe)[0]

    def holds(m: int, count: int, keys: int) -> bool:
        got = kernels.bmm(
            q[None, :m].expand(count, -1, -1), k[None, :keys].expand(count, -1, -1).transpose(1, 2), recipe
        )
        return torch.equal(got[0], whole[:m, :keys]) and torch.equal(got[-1], whole[:m, :keys])

    return _every_shape(holds, counts, (32, 64, 128))


def _sums_hold(head_dim: int, recipe: Recipe, counts: tuple[int, ...]) -> bool:
    generator = torch.Generator().manual_seed(head_dim + 1)
    longest = max(recipe.pv_tile, 64)
    w, order = cancelling(PROBE_ROWS, longest, generator)
    half = torch.randn(longest // 2, head_dim, generator=generator)
    v = torch.cat([half, half[order]], 0).to(recipe.dtype)
    w = w.to(recipe.dtype)

    def holds(m: int, count: int, keys: int) -> bool:
        if keys > longest:
            return True
        cut = w.clone()
        cut[:, keys:] = 0
        whole = kernels.weigh(cut[None].expand(2, -1, -1), v[None].expand(2, -1, -1), recipe)[0]
        got = kernels.weigh(
            cut[None, :m, :keys].expand(count, -1, -1), v[None, :keys].expand(count, -1, -1), recipe
        )
        return torch.equal(got[0], whole[:m]) and torch.equal(got[-1], whole[:m])

    return _every_shape(holds, counts, tuple(range(32, longest + 1, max(32, longest // 4))))


def _every_shape(
    holds: Callable[[int, int, int], bool], counts: tuple[int, ...], keys: tuple[int, ...]
) -> bool:
    return all(
        holds(m, count, t)
        for m in (1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 16, 24, 31, 33, 64, 128)
        for count in counts
        for t in keys
        if count * m * t <= 400_000
    )

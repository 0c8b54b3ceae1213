"""Which shapes keep a row's result independent of its neighbours on this machine, measured, not assumed.

A GEMM library picks its kernel, and with it the order of summation, by shape. Sampler and trainer agree bit
for bit only if each row is summed in one order whatever is batched with it. ``measure`` derives the limits on
the actual machine with *cancelling* data (large terms that cancel, so that another order shows in 8-27 % of
the outputs; random data would hide it) and returns the cheapest ``Recipe`` that holds, or one marked inexact.
Where none holds, fixed tiles (``croze.models.tiles``) do, at a price, and are measured in the same way.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from croze.errors import CheckFailed, ConfigError
from croze.models import kernels
from croze.models.architecture import Architecture
from croze.models.tiles import LADDER, Tiles

log = logging.getLogger("croze.models")

FEW = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 15, 24, 31, 33, 65, 200)
"""Row counts that padding may change."""
MANY = (512, 256, 128, 64, 32, 16)
"""Row counts that no padding changes."""
PADDINGS = ((2, 1), (4, 1), (8, 1), (4, 2), (8, 2), (8, 8), (16, 16))
"""Attention rows tried, cheapest first: (at least, a multiple of)."""
TILES = (512, 256, 128, 64)
"""Keys summed in one product, cheapest first."""
PROBE_ROWS = 512
PROBE_BIG = 1024
"""Rows of one large linear: about a micro-batch."""
PROBE_SIZE = 800_000
"""Largest attention probe, in scores."""


FUSED = "not exact: engine.attention is sdpa; every step shows the gap of the log-probs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How every forward pass is computed, sampler's and trainer's alike.

    ``dtype``: arithmetic. ``packed``: prepacked linears (CPU). ``linear_rows``: fewest rows of a linear.
    ``bmm_rows`` / ``bmm_multiple``: attention products are padded to at least, and a multiple of, that many
    rows, ``bmm_products`` the products of one call to a multiple. ``pv_tile``: keys summed in one product; tiles are
    added in order. ``region``: prompt and suffix key regions are padded to multiples of this. ``exact``:
    whether the measurement found the above to hold.
    ``attention``: "exact", products whose order of summation is known, or "sdpa", torch's fused kernels, which
    are never exact; the bmm and pv limits are then not used. ``tiles``: one shape for every product instead of
    the limits above; ``region`` is then a tile of keys.
    """

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    packed: bool = True
    linear_rows: int = 2
    bmm_rows: int = 4
    bmm_multiple: int = 1
    bmm_products: int = 1
    pv_tile: int = 128
    region: int = 32
    attention: Literal["exact", "sdpa"] = "exact"
    tiles: Tiles | None = None
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


def choose(
    arch: Architecture,
    dtype: str,
    device: str,
    check: bool,
    *,
    rank: int = 0,
    attention: Literal["auto", "exact", "sdpa"] = "auto",
    invariant: bool = False,
) -> Recipe:
    """The recipe for this machine. ``dtype``: "auto", "bfloat16" or "float32"; ``device``: "auto", "cpu" or
    "cuda"; ``rank``: of the adapter, 0 without one; ``attention``: auto is sdpa on CUDA; ``invariant``: fixed
    tiles. Raises ConfigError for a device that is not there, and for fused kernels that should be invariant."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device != "cpu" and not device.startswith("cuda"):
        raise ConfigError(f"engine.device={device} is neither cpu nor cuda", where="engine.device")
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"engine.device={device}, but torch finds no CUDA device",
            where="engine.device",
            fix="set engine.device=cpu, or install a torch build for this machine's accelerator",
        )
    chosen = default_dtype(device) if dtype == "auto" else getattr(torch, dtype)
    if attention == "sdpa" and invariant:
        raise ConfigError(
            "engine.invariant=true cannot hold for the fused kernels of engine.attention=sdpa",
            where="engine.invariant",
            fix="leave engine.attention out, or set it to exact",
        )
    if attention == "auto":
        attention = "exact" if device == "cpu" or invariant else "sdpa"
    packed = device == "cpu" and kernels.can_pack(chosen)
    base = Recipe(
        dtype=chosen,
        device=device,
        packed=packed,
        linear_rows=2 if packed else 16 if chosen == torch.float32 else 2,
        bmm_rows=4,
        pv_tile=256 if chosen == torch.bfloat16 else 128,
        attention=attention,
    )
    if base.attention == "sdpa":
        log.info("numerics: %s", FUSED)
        return dataclasses.replace(base, note=FUSED)
    if invariant:
        base = in_tiles(base, LADDER[0])
    if not check or device != "cpu":
        return base
    return measure(arch, base, rank=rank)


def measure(arch: Architecture, base: Recipe, *, rank: int = 0) -> Recipe:
    """Find the cheapest limits, or tiles, that hold here, with this thread's torch threads. 1 to 2 CPU-s for a 135M
    model."""
    with torch.inference_mode():
        recipe, notes = (_limits if base.tiles is None else _tiles)(arch, base, rank)
    recipe = dataclasses.replace(recipe, exact=not notes, checked=True)
    if notes:
        note = "; ".join(["not exact here: " + notes[0], *notes[1:], remedy(recipe)])
    elif recipe.tiles is None:
        note = "exact: rows do not depend on their neighbours"
    else:
        note = f"exact by fixed tiles of {recipe.tiles.rows} rows"
    log.log(logging.WARNING if notes else logging.INFO, "numerics: %s", note)
    return dataclasses.replace(recipe, note=note)


def _limits(arch: Architecture, base: Recipe, rank: int) -> tuple[Recipe, list[str]]:
    """The cheapest limits, and what does not hold all the same."""
    recipe, notes = base, []
    shapes = linear_shapes(arch, rank)
    rows = next((r for r in (2, 4, 16) if all(linear_holds(base, r, o, i) for o, i in shapes)), 0)
    if rows:
        recipe = dataclasses.replace(recipe, linear_rows=rows)
    else:
        notes.append("linear layers depend on the batch")
    found = _attention_limits(arch, recipe)
    if found is None:
        notes.append("attention depends on the batch")
    return found or recipe, notes + _rest(arch, found or recipe)


def _tiles(arch: Architecture, base: Recipe, rank: int) -> tuple[Recipe, list[str]]:
    """The cheapest tiles in which a row's place does not matter, and what does not hold all the same."""
    counts, d, threads = _counts(arch), arch.head_dim, torch.get_num_threads()
    for tiles in LADDER:
        shared = 1 if tiles.products == 1 else -(-tiles.products // threads) * threads
        recipe, notes = in_tiles(base, dataclasses.replace(tiles, products=shared)), []
        if not all(linear_holds(recipe, 0, o, i) for o, i in linear_shapes(arch, rank)):
            notes.append("linear layers depend on a row's place in a tile")
        if not (scores_hold(d, recipe, counts, FEW) and sums_hold(d, recipe, counts, FEW)):
            notes.append("attention depends on a row's place in a tile")
        notes += _rest(arch, recipe)
        if not notes:
            break
    return recipe, notes


def _rest(arch: Architecture, recipe: Recipe) -> list[str]:
    """What does not hold of all that has no limits to choose."""
    notes = []
    if not softmax_holds(recipe):
        notes.append("softmax depends on the padding")
    if not rows_hold(arch, recipe):
        notes.append("norms or activations depend on the batch")
    return notes


def in_tiles(recipe: Recipe, tiles: Tiles) -> Recipe:
    """``recipe`` with every product in ``tiles``."""
    return dataclasses.replace(
        recipe, tiles=tiles, region=tiles.keys, note="fixed tiles, not measured", exact=False, checked=False
    )


def remedy(recipe: Recipe) -> str:
    """What to set for a recipe that is not exact to become so."""
    if recipe.attention == "sdpa":
        return "set engine.attention=exact; only a CPU is measured to be exact"
    if recipe.device != "cpu":
        return "compute on a CPU (engine.device=cpu): only there exactness is measured"
    if not recipe.checked:
        return "set engine.self_check=true"
    if recipe.tiles is None:
        return "set engine.invariant=true: slower, everything in tiles of one shape"
    return "no setting helps here: use another machine or another torch"


def why_inexact(recipe: Recipe, what: str) -> str:
    """One sentence where ``what`` (a noun, as in "a resume") needs exactness that ``recipe`` does not have, with the
    remedy; "" where it has it."""
    if recipe.exact:
        return ""
    told, fix = f"{what} needs exact numerics to be bit for bit; here they are {recipe.note}", remedy(recipe)
    return told if fix in told else f"{told}; {fix}"


def require_exact(recipe: Recipe, what: str) -> None:
    """Raise CheckFailed where ``what`` (a noun, as in "a replay") cannot be bit for bit under ``recipe``."""
    if not recipe.exact:
        told = f"{what} needs exact numerics to be bit for bit; here they are {recipe.note}"
        raise CheckFailed(told, where="engine", fix=remedy(recipe))


def linear_shapes(arch: Architecture, rank: int = 0) -> list[tuple[int, int]]:
    """Distinct (out, in) of the model's linears and of an adapter's; the head cut to 4096 columns, which share
    a kernel."""
    q, kv, hidden, inner = (
        arch.heads * arch.head_dim,
        arch.kv_heads * arch.head_dim,
        arch.hidden,
        arch.intermediate,
    )
    shapes = {(q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner)}
    shapes.add((min(arch.vocab, 4096), hidden))
    if rank:
        shapes |= {(n * rank, hidden) for n in (1, 2, 3)} | {(rank, q), (rank, inner)}
        shapes |= {(out, rank) for out in (q, kv, hidden, inner)}
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
    """Whether a linear's rows are equal for every row count, padded to ``minimum``, or for every place in a tile."""
    generator = torch.Generator().manual_seed(out * 31 + inner)
    x, order = cancelling(256, inner, generator)
    half = torch.randn(out, inner // 2, generator=generator)
    weight = torch.cat([half, half[:, order], torch.zeros(out, inner - 2 * (inner // 2))], 1)
    x, weight = x.to(recipe.dtype), weight.to(recipe.dtype)
    linear = kernels.Linear(weight, dataclasses.replace(recipe, linear_rows=minimum))
    whole = linear(x)
    if not all(torch.equal(linear(x[r % 4 :][:r]), whole[r % 4 :][:r]) for r in FEW):
        return False
    rows = 0 if recipe.tiles is None else recipe.tiles.rows
    if not all(torch.equal(linear(x[s : s + rows]), whole[s : s + rows]) for s in range(rows)):
        return False
    times = PROBE_BIG // len(x)
    return torch.equal(linear(x.repeat(times, 1)), whole.repeat(times, 1))


def _attention_limits(arch: Architecture, recipe: Recipe) -> Recipe | None:
    """The cheapest paddings and tile under which attention's products hold, or None."""
    threads = torch.get_num_threads()
    for products in sorted({1, 2, threads, 2 * threads}):
        found = _paddings(arch, dataclasses.replace(recipe, bmm_products=products))
        if found is not None:
            return found
    return None


def _paddings(arch: Architecture, recipe: Recipe) -> Recipe | None:
    counts, d = _counts(arch), arch.head_dim
    tile = next(
        (t for t in TILES if sums_hold(d, dataclasses.replace(recipe, pv_tile=t), counts, MANY)), None
    )
    if tile is None or not scores_hold(d, recipe, counts, MANY):
        return None
    for rows, multiple in PADDINGS:
        trial = dataclasses.replace(recipe, bmm_rows=rows, bmm_multiple=multiple, pv_tile=tile)
        if scores_hold(d, trial, counts, FEW) and sums_hold(d, trial, counts, FEW):
            return trial
    return None


def _counts(arch: Architecture) -> tuple[int, ...]:
    """Numbers of products tried: a head's for so many sequences or groups, odd numbers among them, and many."""
    return tuple(arch.kv_heads * n for n in (1, 3, 2, 5, 24))


def scores_hold(head_dim: int, recipe: Recipe, counts: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    """Whether q k^T is the same for all of ``rows`` query rows, ``counts`` products and lengths of k."""
    longest = 512
    generator = torch.Generator().manual_seed(head_dim)
    q, order = cancelling(PROBE_ROWS, head_dim, generator)
    half = torch.randn(longest, head_dim // 2, generator=generator)
    k = torch.cat([half, half[:, order]], 1)
    q, k = q.to(recipe.dtype), k.to(recipe.dtype)
    whole = kernels.bmm(_times(q, 2), _times(k, 2).transpose(1, 2), recipe)[0]
    for m, count, keys in _probes(rows, counts, (32, 64, 128, longest)):
        rows_m = _some(m)
        got = kernels.bmm(_times(q[rows_m], count), _times(k[:keys], count).transpose(1, 2), recipe)
        if not torch.equal(
            got, _times(whole[rows_m, :keys], count)
        ):  # each: one in the middle may be the odd one
            return False
    return True


def sums_hold(head_dim: int, recipe: Recipe, counts: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    """Whether weighted sums of values are the same for all of ``rows`` and ``counts``, and for every number of
    keys up to the tile (or over four fixed ones), the rest of weight 0."""
    longest = recipe.pv_tile if recipe.tiles is None else 4 * recipe.tiles.keys
    generator = torch.Generator().manual_seed(head_dim + 1)
    w, order = cancelling(PROBE_ROWS, longest, generator)
    half = torch.randn(longest // 2, head_dim, generator=generator)
    v = torch.cat([half, half[order]], 0).to(recipe.dtype)
    w = w.to(recipe.dtype)
    wholes = {}
    for keys in range(recipe.region, longest + 1, recipe.region):
        cut = w.clone()
        cut[:, keys:] = 0
        wholes[keys] = kernels.weigh(_times(cut, 2), _times(v, 2), recipe)[0]
    for m, count, keys in _probes(rows, counts, tuple(wholes)):
        rows_m = _some(m)
        got = kernels.weigh(_times(w[rows_m, :keys], count), _times(v[:keys], count), recipe)
        if not torch.equal(got, _times(wholes[keys][rows_m], count)):
            return False
    return True


def softmax_holds(recipe: Recipe) -> bool:
    """Whether masked keys, in whole regions, leave the weights of the others as they are, for any count of rows."""
    generator, region = torch.Generator().manual_seed(1), recipe.region
    scores = (torch.randn(64, 6 * region, generator=generator) * 6).to(recipe.dtype)
    whole = kernels.softmax(scores, recipe)
    if not all(torch.equal(kernels.softmax(scores[m % 4 :][:m], recipe), whole[m % 4 :][:m]) for m in FEW):
        return False
    for at in (1, 2, 5, 6):
        for hole in (1, 2, 3, 7, 20):
            masked = scores.new_full((64, hole * region), kernels.MASKED)
            wide = kernels.softmax(
                torch.cat([scores[:, : at * region], masked, scores[:, at * region :]], 1), recipe
            )
            got = torch.cat([wide[:, : at * region], wide[:, (at + hole) * region :]], 1)
            if not torch.equal(got, whole):
                return False
    return True


def rows_hold(arch: Architecture, recipe: Recipe) -> bool:
    """Whether norm, activation and softmax of a row are the same however many rows there are."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(arch.hidden, generator=generator).to(recipe.dtype)
    operations = (
        (arch.hidden, lambda x: kernels.rms_norm(x, weight, arch.norm_eps)),
        (2 * arch.intermediate, kernels.swiglu),
        (min(arch.vocab, 4096), lambda x: torch.softmax(x.float(), -1)),
    )
    for width, operation in operations:
        x = (torch.randn(256, width, generator=generator) * 4).to(recipe.dtype)
        whole = operation(x)
        if not all(torch.equal(operation(x[m % 4 :][:m]), whole[m % 4 :][:m]) for m in FEW):
            return False
    return True


def _some(count: int) -> slice:
    """``count`` of the probe's rows, not always the first: a row's place must not matter either."""
    first = min(count % 7, PROBE_ROWS - count)
    return slice(first, first + count)


def _times(x: torch.Tensor, count: int) -> torch.Tensor:
    """[m, n] -> [count, m, n], the same matrix in every product."""
    return x[None].expand(count, -1, -1)


def _probes(
    rows: tuple[int, ...], counts: tuple[int, ...], keys: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """(rows, products, keys) of all probes that are not too large."""
    for m, count, t in itertools.product(rows, counts, keys):
        if count * m * t <= PROBE_SIZE or (m, count) == (max(rows), min(counts)):
            yield m, count, t

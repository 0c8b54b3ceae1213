"""The measurement of this machine: it finds limits, and what it says agrees with brute force."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F

import small_models as small
from croze.errors import ConfigError
from croze.models import kernels, numerics
from croze.models.numerics import Recipe

DTYPES = ("bfloat16", "float32")
ARCHS = {
    "small": small.architecture(),
    "one key head": small.architecture(hidden=96, heads=3, kv_heads=1, head_dim=64, intermediate=256),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARCHS)
def test_the_chosen_recipe_holds_by_brute_force(name, dtype):
    """Attention as the engine computes it, in sizes and places that the probes did not use, random data."""
    arch, recipe = ARCHS[name], small.recipe(ARCHS[name], dtype)
    assert recipe.checked
    if not recipe.exact:
        pytest.skip(f"numerics.measure says: {recipe.note}")
    generator = torch.Generator().manual_seed(11)
    keys, rows = 700, 331
    q, order = numerics.cancelling(rows, arch.head_dim, generator)
    half = torch.randn(keys, arch.head_dim // 2, generator=generator)
    k = torch.cat([half, half[:, order]], 1).to(recipe.dtype)
    q = (q * 0.05).to(recipe.dtype)  # weights spread over many keys
    v = torch.randn(keys, arch.head_dim, generator=generator)
    v = torch.cat([v[: keys // 2] * 64, -v[: keys // 2] * 64 + v[keys // 2 :]]).to(
        recipe.dtype
    )  # nearly cancel
    for used in (32, 224, 480, 700):
        padded = recipe.pad(used)
        whole = attend(q, k, v, used, 1024, arch.kv_heads, recipe)
        for m in (1, 3, 10, 47, 130):
            for count in (arch.kv_heads, 5 * arch.kv_heads):
                got = attend(q[:m], k, v, used, padded, count, recipe)
                assert torch.equal(got, whole[:m]), (used, m, count)


def attend(q, k, v, used: int, padded: int, count: int, recipe: Recipe) -> torch.Tensor:
    """Attention of rows q to the first ``used`` keys, in a region of ``padded``, ``count`` times over."""
    k, v = (F.pad(x, (0, 0, 0, max(0, padded - len(x))))[:padded] for x in (k, v))
    many = [x[None].expand(count, -1, -1) for x in (q / 8, k, v)]
    scores = kernels.bmm(many[0], many[1].transpose(1, 2), recipe)
    scores = scores.masked_fill(torch.arange(padded) >= used, kernels.MASKED)
    return kernels.weigh(torch.softmax(scores, -1), many[2], recipe)[-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("minimum", [1, 2])
def test_the_linear_probe_agrees_with_brute_force(minimum, dtype):
    """One row by itself is what some kernels sum otherwise. If all rows of large random products are the same,
    or not, the probe must have said so."""
    recipe = Recipe(
        dtype=getattr(torch, dtype), packed=kernels.can_pack(getattr(torch, dtype)), linear_rows=minimum
    )
    for out, inner in ((96, 1536), (64, 64)):
        says = numerics.linear_holds(recipe, minimum, out, inner)
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(1000, inner, generator=generator).to(recipe.dtype)
        linear = kernels.Linear(torch.randn(out, inner, generator=generator).to(recipe.dtype), recipe)
        whole = linear(x)
        same = all(torch.equal(linear(x[i : i + 1])[0], whole[i]) for i in range(0, 1000, 5))
        assert same or not says


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sums_probe_agrees_with_brute_force(dtype):
    """A tile that the probe accepts gives equal sums for every padding; one it refuses shows a difference."""
    recipe = Recipe(dtype=getattr(torch, dtype), bmm_rows=16, bmm_multiple=16)
    for tile in (1024, 512, 64):
        trial = dataclasses.replace(recipe, pv_tile=tile)
        says = numerics.sums_hold(64, trial, (3,), numerics.MANY)
        shapes = [(keys, rows) for keys in range(32, tile + 1, 32) for rows in numerics.MANY]
        assert says == all(sums_agree(trial, keys, rows) for keys, rows in shapes)


def sums_agree(recipe: Recipe, keys: int, rows: int) -> bool:
    generator = torch.Generator().manual_seed(9)
    w, order = numerics.cancelling(512, recipe.pv_tile, generator)
    half = torch.randn(recipe.pv_tile // 2, 64, generator=generator)
    v = torch.cat([half, half[order]]).to(recipe.dtype)
    w = w.to(recipe.dtype)
    w[:, keys:] = 0
    whole = kernels.weigh(w[None].expand(3, -1, -1), v[None].expand(3, -1, -1), recipe)[0]
    cut = kernels.weigh(w[None, :rows, :keys].expand(3, -1, -1), v[None, :keys].expand(3, -1, -1), recipe)[0]
    return torch.equal(cut, whole[:rows])


def test_cancelling_data_shows_what_random_data_hides():
    """The same sum in two orders: cancelling terms differ far more often than random ones."""
    generator = torch.Generator().manual_seed(0)
    x, order = numerics.cancelling(64, 256, generator)
    half = torch.randn(32, 128, generator=generator)
    weight = torch.cat([half, half[:, order]], 1)
    plain = torch.randn(64, 256, generator=generator), torch.randn(32, 256, generator=generator)

    def differing(a, b) -> float:
        terms = a.bfloat16()[:, None] * b.bfloat16()[None]
        one = terms.float().sum(-1).bfloat16()
        other = (terms[..., ::2].float().sum(-1) + terms[..., 1::2].float().sum(-1)).bfloat16()
        return float((one != other).float().mean())

    assert differing(x, weight) > 10 * differing(*plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_probe_sees_a_hole_that_shifts_lanes(dtype):
    """Regions that are no multiple of a vector's lanes move values to other lanes: accepted only if harmless."""
    recipe = small.recipe(ARCHS["small"], dtype)
    assert numerics.softmax_holds(recipe) or not recipe.exact
    odd = dataclasses.replace(recipe, region=5)
    scores = torch.randn(64, 30, generator=torch.Generator().manual_seed(1)).to(recipe.dtype) * 6
    hole = torch.cat([scores[:, :5], scores.new_full((64, 5), kernels.MASKED), scores[:, 5:]], 1)
    wide = torch.softmax(hole, -1)
    same = torch.equal(torch.cat([wide[:, :5], wide[:, 10:]], 1), torch.softmax(scores, -1))
    assert same or not numerics.softmax_holds(odd)


def test_adapters_bring_their_own_shapes():
    arch = ARCHS["small"]
    plain, adapted = set(numerics.linear_shapes(arch)), set(numerics.linear_shapes(arch, 4))
    assert adapted - plain == {(4, 64), (8, 64), (12, 64), (4, 96), (64, 4), (32, 4), (96, 4)}


def test_without_the_check_nothing_is_claimed():
    recipe = numerics.choose(ARCHS["small"], "auto", "cpu", False)
    assert (recipe.exact, recipe.checked, recipe.note) == (False, False, "not measured")
    assert recipe.dtype == numerics.default_dtype("cpu")


def test_devices_that_are_not_there():
    with pytest.raises(ConfigError, match="neither cpu nor cuda"):
        numerics.choose(ARCHS["small"], "auto", "tpu", False)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            numerics.choose(ARCHS["small"], "auto", "cuda", False)


def test_padding_to_regions():
    recipe = Recipe(region=32)
    assert [recipe.pad(n) for n in (0, 1, 32, 33, 64)] == [32, 32, 32, 64, 64]


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_product_is_the_odd_one_out(dtype: str, threads: int) -> None:
    """Threads that share one product of an odd number sum it in another order: it may lie in the middle."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        how = numerics.choose(small.architecture(head_dim=64, kv_heads=3, heads=9), dtype, "cpu", True)
        if not how.exact:
            pytest.skip(f"numerics.measure says: {how.note}")
        generator = torch.Generator().manual_seed(3)
        q, order = numerics.cancelling(64, 64, generator)
        half = torch.randn(96, 32, generator=generator)
        k = torch.cat([half, half[:, order]], 1).to(how.dtype)
        alike = kernels.bmm(q.to(how.dtype).expand(6, -1, -1), k.expand(6, -1, -1).transpose(1, 2), how)[0]
        for count in (3, 6, 9, 15, 21, 27, 33):
            for m in (1, 2, 3, 5, 8, 13, 27):
                some = q[:m].to(how.dtype).expand(count, -1, -1)
                got = kernels.bmm(some, k.expand(count, -1, -1).transpose(1, 2), how)
                assert all(torch.equal(one, alike[:m]) for one in got), (count, m)
    finally:
        torch.set_num_threads(before)

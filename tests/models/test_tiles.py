"""Fixed tiles: the values of plain products, in one shape, and each row by itself."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import small_models as small
from croze.errors import CheckFailed, ConfigError
from croze.models import kernels, numerics, tiles
from croze.models.numerics import Recipe
from croze.models.tiles import LADDER, Tiles

TINY = Tiles(rows=4, queries=2, keys=16, products=3)
DTYPES = (torch.float32, torch.bfloat16)
PRODUCTS = ("bmm", "mm", "addmm", "linear", "_linear_pointwise")


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 12])
def test_a_linear_is_computed_so_many_rows_at_a_time(count):
    x, weight, shapes = randn(count + 1, 6)[1:], randn(5, 6), set()

    def product(part: torch.Tensor) -> torch.Tensor:
        shapes.add((part.shape, part.stride(), part.data_ptr() % tiles.ALIGNED))
        return F.linear(part, weight)

    y = tiles.linear(x, product, 4)
    assert shapes == {((4, 6), (6, 1), 0)}
    torch.testing.assert_close(y, F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", [TINY, *LADDER])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 5, 16), (7, 2, 70), (2, 33, 160)])
def test_values_are_those_of_plain_products(shape, how, dtype):
    count, rows, keys = shape
    q, k = randn(count, rows, 8, dtype=dtype), randn(count, keys, 8, dtype=dtype)
    near = 2e-2 if dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(tiles.scores(q, k, how), torch.bmm(q, k.transpose(1, 2)), rtol=near, atol=near)
    weights = torch.softmax(randn(count, rows, keys, dtype=dtype), -1)
    torch.testing.assert_close(tiles.sums(weights, k, how), torch.bmm(weights, k), rtol=near, atol=near)
    wide = randn(count, rows, 4 * how.keys, dtype=dtype) * 4
    torch.testing.assert_close(tiles.softmax(wide, how), torch.softmax(wide, -1), rtol=near, atol=near)


def test_gradients_are_those_of_plain_products():
    q, k, v = (randn(3, n, 8, seed=n).double().requires_grad_() for n in (5, 32, 33))
    v = v[:, :32]

    def attend(product, softmax, weigh) -> list[torch.Tensor]:
        out = weigh(softmax(product(q, k)), v)
        return [out.float(), *(g.float() for g in torch.autograd.grad((out**2).sum(), (q, k, v)))]

    found = attend(
        lambda q, k: tiles.scores(q, k, TINY),
        lambda x: tiles.softmax(x, TINY),
        lambda w, v: tiles.sums(w, v, TINY),
    )
    wanted = attend(lambda q, k: q @ k.transpose(1, 2), lambda x: torch.softmax(x, -1), torch.bmm)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_masked_tiles_change_nothing_wherever_they_lie():
    scores, values = randn(2, 3, 48) * 5, randn(2, 48, 8)
    hole = torch.full((2, 3, 32), kernels.MASKED)
    garbage = torch.full((2, 32, 8), 1e30)
    base = tiles.sums(tiles.softmax(scores, TINY), values, TINY)
    for at in (0, 16, 48):
        holed = tiles.softmax(torch.cat([scores[..., :at], hole, scores[..., at:]], -1), TINY)
        padded = torch.cat([values[:, :at], garbage, values[:, at:]], 1)
        assert torch.equal(tiles.sums(holed, padded, TINY), base)


class Shapes(TorchDispatchMode):
    """The shapes and strides of every product's operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[object, ...]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        if name in PRODUCTS:
            operands = [a for a in args[:2] if isinstance(a, torch.Tensor)]
            self.seen.add((name, *((tuple(a.shape), a.is_mkldnn or a.stride()) for a in operands)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("packed", [True, False])
def test_every_schedule_has_the_same_few_shapes(packed):
    """By construction: a library that sees the same shapes has nothing to choose by."""
    arch, how = small.architecture(layers=1), Recipe(packed=packed and kernels.can_pack(torch.float32))
    rig = small.make_rig(arch, how=numerics.in_tiles(how, LADDER[0]))
    seen = []
    for siblings, prompt, turn, chunk in ((1, 1, 0, 64), (4, 150, 0, 30), (3, 70, 90, 7)):
        request = small.request(
            "x", [i % 300 for i in range(prompt)], siblings, suffixes=[[1] * turn] * siblings
        )
        with Shapes() as shapes:
            records = small.drive(rig.engine(prefill_chunk=chunk), [request])
            rig.trainer.logprobs(small.to_samples([request], records))
        seen.append(shapes.seen)
    assert seen[0] == seen[1] == seen[2]
    assert 5 <= len(seen[0]) <= 7, seen[0]  # scores, sums, and five linears, of which some are alike


def test_layers_in_tiles_train_as_others_do():
    arch = small.architecture(vocab=64)
    samples = small.random_samples(64, [(20, [5, 9]), (3, [12])])
    plain, tiled = (
        small.gradients(small.make_rig(arch, how=how).trainer, samples)
        for how in (Recipe(), numerics.in_tiles(Recipe(), LADDER[0]))
    )
    assert plain[0] == pytest.approx(tiled[0], rel=1e-5)
    assert small.relative_gap(tiled[1], plain[1]) < 1e-4


def test_fused_kernels_cannot_be_invariant():
    with pytest.raises(ConfigError, match="invariant"):
        numerics.choose(small.architecture(), "float32", "cpu", False, attention="sdpa", invariant=True)


def test_what_needs_exactness_says_so_and_what_to_set():
    arch = small.architecture()
    unchecked = numerics.choose(arch, "float32", "cpu", False)
    fused = numerics.choose(arch, "float32", "cpu", True, attention="sdpa")
    failed = Recipe(checked=True, note="not exact here: linear layers depend on the batch")
    for recipe, fix in (
        (unchecked, "engine.self_check=true"),
        (fused, "engine.attention=exact"),
        (failed, "engine.invariant=true"),
        (Recipe(device="cuda"), "engine.device=cpu"),
        (numerics.in_tiles(failed, LADDER[0]), "engine.self_check=true"),
    ):
        told = numerics.why_inexact(recipe, "a replay")
        assert told.startswith("a replay needs exact numerics") and fix in told and recipe.note in told
        with pytest.raises(CheckFailed, match="a replay needs exact") as caught:
            numerics.require_exact(recipe, "a replay")
        assert fix in str(caught.value.fix)
    exact = small.recipe(arch, "float32")
    if exact.exact:
        assert numerics.why_inexact(exact, "a replay") == ""
        numerics.require_exact(exact, "a replay")


def test_a_failed_check_names_the_fix_and_the_fix_helps(monkeypatch):
    """A library whose softmax depends on the width, as others may: the note says what to set, and that is exact."""
    monkeypatch.setattr(torch, "softmax", lambda x, dim: F.softmax(x, dim) * (1 + x.shape[-1] * 1e-6))
    arch = small.architecture()
    plain = numerics.choose(arch, "float32", "cpu", True)
    assert not plain.exact and plain.note.endswith(numerics.remedy(plain))
    assert "softmax depends on the padding" in plain.note and "engine.invariant=true" in plain.note
    assert numerics.why_inexact(plain, "a resume").count("engine.invariant=true") == 1
    tiled = numerics.choose(arch, "float32", "cpu", True, invariant=True)
    assert tiled.exact and tiled.note == "exact by fixed tiles of 32 rows"


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_activations_have_one_form_for_every_place(threads):
    """torch's silu has two, and where threads meet in the middle of a vector it takes the other."""
    x = randn(96, 2 * 1100) * 4
    torch.set_num_threads(threads)
    try:
        whole = kernels.swiglu(x)
        for count in (1, 31, 45, 63, 95):
            assert torch.equal(kernels.swiglu(x[:count]), whole[:count])
    finally:
        torch.set_num_threads(1)
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(whole, F.silu(gate) * up)

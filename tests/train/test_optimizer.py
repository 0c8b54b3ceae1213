"""AdamW on fp32 masters: against a float64 reference, over bad gradients, and gone on with."""

from __future__ import annotations

import itertools
import math
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import croze.train.optimizer as optimizer_module
from croze.config import Optim
from croze.errors import CheckFailed, ConfigError, InvariantViolated
from croze.train.optimizer import MAX_SKIPS, AdamW, Schedule, global_norm

SHAPES = {"w": (7, 5), "b": (5,), "head": (3, 700)}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def copies(named: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: t.numpy().copy() for name, t in named.items()}


def moments(adamw: AdamW) -> dict[str, np.ndarray]:
    return {
        f"{n}/{kind}": t.numpy().copy() for kind, named in adamw.moments().items() for n, t in named.items()
    }


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return left.keys() == right.keys() and all(np.array_equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_updates_equal_a_float64_adamw(clip: float, weight_decay: float) -> None:
    optim = Optim(lr=1e-2, betas=(0.9, 0.95), weight_decay=weight_decay, clip=clip, schedule="linear")
    masters = tensors(0)
    weights = {k: v.astype(np.float64) for k, v in copies(masters).items()}
    first = {k: np.zeros_like(v) for k, v in weights.items()}
    second = {k: np.zeros_like(v) for k, v in weights.items()}
    adamw = AdamW(masters, optim, steps=6)
    for t in range(1, 6):
        grads = tensors(t)
        plain = {k: v.astype(np.float64) for k, v in copies(grads).items()}
        norm = math.sqrt(sum(float((g**2).sum()) for g in plain.values()))
        stats = adamw.step(grads, step=t)
        assert stats.grad_norm == pytest.approx(norm, rel=1e-6) and not stats.skipped
        lr = 1e-2 * (1 - (t - 1) / 6)
        assert stats.lr == pytest.approx(lr)
        for k, g in plain.items():
            g = g * min(1.0, clip / norm) if clip else g
            first[k] = 0.9 * first[k] + 0.1 * g
            second[k] = 0.95 * second[k] + 0.05 * g**2
            decay = weight_decay if weights[k].ndim >= 2 else 0.0
            corrected = (first[k] / (1 - 0.9**t)) / (np.sqrt(second[k] / (1 - 0.95**t)) + 1e-8)
            weights[k] = weights[k] * (1 - lr * decay) - lr * corrected
    for k, wanted in weights.items():
        np.testing.assert_allclose(masters[k].numpy(), wanted, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    masters = tensors(0)
    adamw = AdamW(masters, Optim(lr=1e-2), steps=10)
    adamw.step(tensors(1), step=1)
    before, state = copies(masters), moments(adamw)
    grads = tensors(2)
    grads["head"][2, 699] = bad
    stats = adamw.step(grads, step=2)
    assert stats.skipped and not math.isfinite(stats.grad_norm) and adamw.skipped == 1
    assert same(copies(masters), before) and same(moments(adamw), state)
    assert grads == {}
    assert not adamw.step(tensors(3), step=3).skipped


def test_gradients_that_stay_bad_end_the_run_with_a_reason() -> None:
    masters = tensors(0)
    adamw = AdamW(masters, Optim(), steps=10)
    before = copies(masters)
    for step in range(1, MAX_SKIPS):
        assert adamw.step({"b": torch.full((5,), math.nan)}, step=step).skipped
    with pytest.raises(CheckFailed, match="not finite"):
        adamw.step({"b": torch.full((5,), math.nan)}, step=MAX_SKIPS)
    assert same(copies(masters), before)


def test_bad_gradients_between_good_ones_go_on() -> None:
    adamw = AdamW(tensors(0), Optim(), steps=40)
    for step in range(1, 4 * MAX_SKIPS, 2):
        assert adamw.step({"b": torch.full((5,), math.nan)}, step=step).skipped
        assert not adamw.step(tensors(step), step=step + 1).skipped
    assert adamw.skipped == 2 * MAX_SKIPS


def test_gradients_are_taken_over_and_freed() -> None:
    masters = tensors(0)
    adamw = AdamW(masters, Optim(), steps=10)
    grads = tensors(1)
    watch = [weakref.ref(g) for g in grads.values()]
    adamw.step(grads, step=1)
    assert grads == {} and all(m.grad is None for m in masters.values())
    assert all(ref() is None for ref in watch)


def test_a_missing_gradient_is_a_gradient_of_zero() -> None:
    left, right = tensors(0), tensors(0)
    a, b = AdamW(left, Optim(lr=1e-2), steps=10), AdamW(right, Optim(lr=1e-2), steps=10)
    for adamw in (a, b):
        adamw.step(tensors(1), step=1)
    a.step({}, step=2)
    b.step({k: torch.zeros_like(v) for k, v in right.items()}, step=2)
    assert same(copies(left), copies(right)) and same(moments(a), moments(b))


def test_bfloat16_gradients_update_as_their_fp32_values() -> None:
    left, right = tensors(0), tensors(0)
    a, b = AdamW(left, Optim(), steps=10), AdamW(right, Optim(), steps=10)
    grads = {k: v.bfloat16() for k, v in tensors(1).items()}
    wide = {k: v.float() for k, v in grads.items()}
    assert a.step(grads, step=1) == b.step(wide, step=1)
    assert same(copies(left), copies(right))


def test_the_bucket_size_is_not_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for elements in (1, 40, 1 << 25):
        monkeypatch.setattr(optimizer_module, "BUCKET_ELEMENTS", elements)
        masters = tensors(0)
        adamw = AdamW(masters, Optim(weight_decay=0.1), steps=10)
        for step in (1, 2):
            adamw.step(tensors(step), step=step)
        results.append(copies(masters))
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_with_its_moments_and_counts_another_goes_on_with_the_same_bytes() -> None:
    masters = tensors(0)
    adamw = AdamW(masters, Optim(lr=1e-2, schedule="cosine"), steps=10)
    for step in (1, 2):
        adamw.step(tensors(step), step=step)
    assert adamw.updates == 2
    resumed_masters = {k: v.clone() for k, v in masters.items()}
    resumed = AdamW(resumed_masters, Optim(lr=1e-2, schedule="cosine"), steps=10)
    for kind, named in resumed.moments().items():
        for name, tensor in named.items():
            tensor.copy_(adamw.moments()[kind][name])
    resumed.resume(updates=adamw.updates, skipped=3, skips_in_a_row=1)
    assert (resumed.updates, resumed.skipped, resumed.skips_in_a_row) == (2, 3, 1)
    for step in (3, 4):
        assert adamw.step(tensors(step), step=step) == resumed.step(tensors(step), step=step)
    assert same(copies(masters), copies(resumed_masters))
    assert same(moments(adamw), moments(resumed)) and resumed.updates == adamw.updates == 4


def test_foreign_gradients_are_refused_before_anything_moves() -> None:
    masters = tensors(0)
    adamw = AdamW(masters, Optim(), steps=10)
    before = copies(masters)
    for odd in ({"lora": torch.ones(2)}, {"b": torch.ones(6)}):
        grads = tensors(1) | odd
        with pytest.raises(InvariantViolated, match="fit no master"):
            adamw.step(grads, step=1)
        assert grads == {} and same(copies(masters), before)


def test_clipping_bounds_the_norm_and_zero_is_off() -> None:
    huge = {"b": torch.full((5,), 1e4)}
    for clip, wanted in ((1.0, 1.0), (0.0, 1e4 * math.sqrt(5)), (1e9, 1e4 * math.sqrt(5))):
        adamw = AdamW(tensors(0), Optim(clip=clip, betas=(0.0, 0.99)), steps=10)
        stats = adamw.step({k: v.clone() for k, v in huge.items()}, step=1)
        assert stats.grad_norm == pytest.approx(1e4 * math.sqrt(5))
        assert float(adamw.moments()["exp_avg"]["b"].norm()) == pytest.approx(wanted, rel=1e-5)


def test_the_norm_is_accurate_on_large_tensors_and_odd_shapes() -> None:
    big = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    wanted = float(big.double().square().sum().sqrt())
    assert global_norm([big]) == pytest.approx(wanted, rel=1e-5)
    strided = big[:3_000_000].view(1000, 3000).t()
    assert global_norm([strided, torch.zeros(0), torch.ones(())]) == pytest.approx(
        math.hypot(float(strided.double().norm()), 1.0), rel=1e-5
    )
    assert global_norm([]) == 0.0 and global_norm([torch.zeros(3)]) == 0.0


# --- the schedule ------------------------------------------------------------------------------------------

kinds = st.sampled_from(["constant", "linear", "cosine"])


@given(kinds, st.integers(1, 200), st.integers(0, 250))
def test_rates_rise_then_never_rise_again_and_no_step_is_idle(kind, steps, warmup) -> None:
    schedule = Schedule(kind=kind, peak=1e-3, warmup_steps=warmup, steps=steps)
    rates = [schedule.lr(step) for step in range(1, steps + 1)]
    assert all(0.0 < rate <= 1e-3 for rate in rates)
    rising, falling = rates[:warmup], rates[warmup:]
    assert all(a < b for a, b in itertools.pairwise(rising))
    assert all(a >= b for a, b in itertools.pairwise(falling))
    if falling:
        assert falling[0] == 1e-3


@pytest.mark.parametrize(
    ("kind", "warmup", "steps", "rates"),
    [
        ("constant", 0, 3, [1.0, 1.0, 1.0]),
        ("constant", 2, 4, [0.5, 1.0, 1.0, 1.0]),
        ("linear", 0, 4, [1.0, 0.75, 0.5, 0.25]),
        ("linear", 2, 4, [0.5, 1.0, 1.0, 0.5]),
        ("cosine", 0, 2, [1.0, 0.5]),
        ("linear", 0, 1, [1.0]),
        ("cosine", 0, 1, [1.0]),
        ("cosine", 1, 1, [1.0]),
        ("linear", 4, 2, [0.25, 0.5]),
    ],
)
def test_rates_worked_out_by_hand(kind, warmup, steps, rates) -> None:
    schedule = Schedule(kind=kind, peak=1.0, warmup_steps=warmup, steps=steps)
    assert [schedule.lr(s) for s in range(1, steps + 1)] == pytest.approx(rates)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_rate_is_zero_after_the_last_step(kind) -> None:
    schedule = Schedule(kind=kind, peak=1.0, warmup_steps=1, steps=5)
    assert schedule.lr(6) == pytest.approx(0.0, abs=1e-12) and schedule.lr(100) == pytest.approx(
        0.0, abs=1e-12
    )


@pytest.mark.parametrize(
    "optim",
    [
        Optim(lr=-1.0),
        Optim(lr=math.nan),
        Optim(warmup_steps=-1),
        Optim(betas=(0.9, 1.0)),
        Optim(eps=0.0),
        Optim(weight_decay=-0.1),
        Optim(clip=-1.0),
        Optim(minibatches=0),
        Optim(tokens_per_microbatch=0),
    ],
)
def test_options_that_make_no_optimizer_are_refused(optim: Optim) -> None:
    with pytest.raises(ConfigError, match=r"^error\[config\]: optim\."):
        AdamW(tensors(0), optim, steps=10)

"""pass@k against exact arithmetic, its interval against scipy's and by simulation."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from croze.loop.passk import pass_at_k, summarize, wilson


@given(st.data())
def test_pass_at_k_is_the_exact_ratio(data):
    n = data.draw(st.integers(1, 200))
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    exact = 1 - Fraction(comb(n - c, k), comb(n, k))
    assert pass_at_k(n, c, k) == float(exact)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [(4, 1, 1, 0.25), (4, 1, 4, 1.0), (10, 3, 2, 8 / 15), (5, 0, 5, 0.0), (200, 1, 100, 0.5), (1, 1, 1, 1.0)],
)
def test_golden_values(n, c, k, expected):
    assert pass_at_k(n, c, k) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0), (0, 0, 1)])
def test_impossible_counts_are_refused(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


@given(n=st.integers(1, 500), share=st.floats(0, 1))
def test_wilson_is_scipys(n, share):
    passed = round(n * share)
    expected = stats.binomtest(passed, n).proportion_ci(method="wilson")
    assert wilson(passed / n, n, stats.norm.ppf(0.975)) == pytest.approx(
        (expected.low, expected.high), abs=1e-9
    )


@given(
    counts=st.lists(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n))), min_size=1)
)
def test_the_interval_holds_the_estimate_and_stays_between_0_and_1(counts):
    result = summarize(counts)
    assert 0 <= result.low <= result.estimate + 1e-12 and result.estimate - 1e-12 <= result.high <= 1
    assert result.low < result.high
    assert (result.tasks, result.samples) == (len(counts), sum(n for n, _ in counts))


def test_alike_samples_of_one_task_are_not_independent():
    alike = summarize([(8, 8), (8, 0)] * 8)
    mixed = summarize([(8, 4)] * 16)
    assert alike.estimate == mixed.estimate == 0.5
    assert alike.high - alike.low > 2.5 * (mixed.high - mixed.low)
    once = summarize([(1, 1), (1, 0)] * 8)
    assert (alike.low, alike.high) == pytest.approx((once.low, once.high))


def test_no_tasks_are_refused():
    with pytest.raises(ValueError):
        summarize([])


@pytest.mark.parametrize(("tasks", "samples", "k"), [(16, 4, 1), (32, 1, 1), (64, 8, 4)])
def test_the_interval_covers_the_truth_as_often_as_it_says(tasks, samples, k):
    rng = np.random.default_rng(0)
    truth = float((1 - (1 - rng.beta(0.5, 1.0, 200_000)) ** k).mean())
    hits = 0
    for _ in range(300):
        passed = rng.binomial(samples, rng.beta(0.5, 1.0, tasks))
        found = summarize([(samples, int(c)) for c in passed], k)
        hits += found.low <= truth <= found.high
    assert hits / 300 >= 0.91

"""Orders of rows: permutations whatever the size, near enough uniform, entered anywhere, the same for ever."""

import itertools
import math
import tracemalloc
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from croze.env.order import Shuffle, WindowShuffle

sizes_st = st.lists(st.integers(0, 60), min_size=1, max_size=12)


def key(number: int) -> bytes:
    return f"key {number}".encode()


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers())
@example(size=1, seed=0)
@example(size=2, seed=0)
@example(size=4096, seed=0)
@example(size=4097, seed=0)
def test_a_shuffle_is_a_permutation(size, seed):
    order = Shuffle(size, key(seed))
    assert len(order) == size
    assert sorted(order[at] for at in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [10_000_000, 2**32 + 3, 10**15])
def test_a_large_shuffle_gives_no_row_twice(size):
    order = Shuffle(size, key(1))
    places = [*range(5000), *range(size - 5000, size)]
    rows = [order[at] for at in places]
    assert len(set(rows)) == len(places)
    assert min(rows) >= 0 and max(rows) < size
    mean = sum(rows) / len(rows) / size
    assert abs(mean - 0.5) < 5 * (1 / 12 / len(rows)) ** 0.5


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_order_of_a_small_table_is_as_likely(size):
    draws, possible = 2400, math.factorial(size)
    counts = Counter(tuple(Shuffle(size, key(seed))[at] for at in range(size)) for seed in range(draws))
    expected = draws / possible
    chi = sum((counts[p] - expected) ** 2 / expected for p in itertools.permutations(range(size)))
    assert chi < possible - 1 + 5 * (2 * (possible - 1)) ** 0.5


def test_neighbours_do_not_stay_neighbours():
    size, hits = 1000, Counter()
    for seed in range(30):
        order = Shuffle(size, key(seed))
        rows = [order[at] for at in range(size)]
        hits.update((b - a) % size for a, b in itertools.pairwise(rows))
    total = 30 * (size - 1)
    assert max(hits.values()) < total / size + 6 * (total / size) ** 0.5
    assert hits[0] == 0


def test_keys_give_unrelated_orders():
    size = 500
    first = [Shuffle(size, key(0))[at] for at in range(size)]
    same = [sum(Shuffle(size, key(seed))[at] == row for at, row in enumerate(first)) for seed in range(1, 60)]
    assert sum(same) / len(same) < 2  # one on average between independent permutations


def test_orders_are_the_same_for_ever():
    order = Shuffle(10_000_000, b"croze tasks 0 train 0")
    assert [order[at] for at in (0, 1, 2, 9_999_999)] == [4792678, 5941512, 1392444, 4794359]
    windows = WindowShuffle([5, 0, 7, 3, 9], [1, 1, 1, 1, 1], 2, b"croze tasks 0 train 0")
    rows = bytes(windows[at] for at in range(len(windows)))
    assert rows.hex() == "07050a0c060b0d09080e16111714100f1315120102000304"


@pytest.mark.parametrize("position", [-1, 5, 10**9])
def test_a_position_outside_is_refused(position):
    for order in (Shuffle(5, b""), WindowShuffle([2, 3], [1, 1], 9, b"")):
        with pytest.raises(IndexError):
            order[position]


def test_a_shuffle_costs_no_memory():
    tracemalloc.start()
    try:
        order = Shuffle(10**9, b"k")
        for at in range(100):
            order[at * 10**7]
        assert tracemalloc.get_traced_memory()[1] < 20_000
    finally:
        tracemalloc.stop()


@settings(max_examples=80, deadline=None)
@given(sizes=sizes_st, limit=st.integers(0, 8), data=st.data(), seed=st.integers())
def test_a_window_shuffle_is_a_permutation_that_visits_each_block_once(sizes, limit, data, seed):
    weights = data.draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    order = WindowShuffle(sizes, weights, limit, key(seed))
    rows = [order[at] for at in range(len(order))]
    assert sorted(rows) == list(range(sum(sizes)))
    assert [order[at] for at in reversed(range(len(order)))] == rows[::-1]
    ends = list(itertools.accumulate(sizes))
    blocks = [next(b for b, end in enumerate(ends) if row < end) for row in rows]
    places = {b: [at for at, other in enumerate(blocks) if other == b] for b in set(blocks)}
    for at in range(len(rows)):  # what must be held at one time: blocks begun and not ended
        held = [b for b, where in places.items() if where[0] <= at <= where[-1]]
        assert len(held) == 1 or sum(weights[b] for b in held) <= limit


def test_a_table_within_the_limit_is_shuffled_whole():
    order = WindowShuffle([10] * 20, [1] * 20, 20, key(3))
    rows = [order[at] for at in range(200)]
    first = Counter(row // 10 for row in rows[:20])
    assert max(first.values()) <= 6 and len(first) >= 10

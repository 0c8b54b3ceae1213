"""Mean concurrency against counting, moment by moment."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from croze.trace.concurrency import mean_concurrency

SECONDS = st.integers(0, 30)
INTERVALS = st.lists(st.tuples(SECONDS, SECONDS).map(lambda pair: (min(pair), max(pair))), max_size=12)


def counted(piece: tuple[int, int], every: list[tuple[int, int]]) -> float:
    start, end = piece
    if start == end:
        return sum(s <= start <= e for s, e in every)
    return sum(sum(s <= t < e for s, e in every) for t in range(start, end)) / (end - start)


@given(pieces=INTERVALS, beside=INTERVALS, epoch=st.sampled_from([0.0, 1e6, 1.8e9]))
def test_it_is_what_counting_gives(pieces, beside, epoch):
    def late(intervals: list[tuple[int, int]]) -> list[tuple[float, float]]:
        return [(start + epoch, end + epoch) for start, end in intervals]

    found = mean_concurrency(late(pieces), late(beside))
    assert found == pytest.approx([counted(p, [*pieces, *beside]) for p in pieces], abs=1e-6)


def test_a_step_of_a_hundred_thousand_short_pieces_stays_exact():
    pieces = [(1e6 + i / 1000, 1e6 + (i + 4) / 1000) for i in range(100_000)]
    found = mean_concurrency(pieces)
    assert found[50_000] == pytest.approx(4.0, rel=1e-3)

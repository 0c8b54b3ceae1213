"""Who runs and who is blamed."""

from hypothesis import given, settings
from hypothesis import strategies as st

from croze.reward.desk import Desk

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def test_at_most_limit_are_under_way():
    desk = Desk(2)
    for n in (1, 2, 3):
        desk.add(n)
    assert desk.next() == [1, 2] and desk.next() == []
    desk.done(1)
    assert desk.next() == [3]


def test_the_known_guilty_goes_and_the_innocent_run_again():
    desk = Desk(3)
    for n in (1, 2, 3, 4):
        desk.add(n)
    desk.next()
    assert desk.lost({2}) == {2}
    assert desk.next() == [1, 3, 4]


def test_suspects_run_alone_until_one_is_caught():
    desk = Desk(3)
    for n in (1, 2, 3, 4):
        desk.add(n)
    desk.next()
    assert desk.lost({0}) == set()
    assert desk.next() == [1] and desk.next() == []
    desk.done(1)
    assert desk.next() == [2]
    assert desk.lost(set()) == {2}
    assert desk.next() == [3]
    desk.done(3)
    assert desk.next() == [4]


def test_the_only_one_is_to_blame():
    desk = Desk(3)
    desk.add(1)
    desk.next()
    assert desk.lost(set()) == {1} and desk.next() == []


def test_nobody_is_run_for_ever():
    desk = Desk(2)
    desk.add(100)
    given_up: set[int] = set()
    for n in range(10):
        desk.add(n)
        started = desk.next()
        given_up |= desk.lost({max(started, key=lambda c: (c != 100, c))} - {100})
        if 100 in given_up:
            break
    assert 100 in given_up


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.sampled_from(["add", "done", "lost", "blame"]), st.integers(0, 9)), max_size=80),
)
def test_every_call_ends_once_and_the_limit_holds(limit, events):
    """Whatever happens, each call is done or given up exactly once, and a finished one never comes back."""
    desk, added, ended = Desk(limit), 0, set()
    for what, pick in events:
        flying = sorted(desk.under_way)
        if what == "add":
            desk.add(added)
            added += 1
        elif what == "done" and flying:
            desk.done(flying[pick % len(flying)])
            ended.add(flying[pick % len(flying)])
        elif what == "lost":
            gone = desk.lost(set())
            assert not gone & ended
            ended |= gone
        elif what == "blame" and flying:
            gone = desk.lost({flying[pick % len(flying)]})
            assert flying[pick % len(flying)] in gone
            ended |= gone
        assert not set(desk.next()) & ended and len(desk.under_way) <= limit
    for _ in range(4 * added + 4):
        desk.next()
        for n in sorted(desk.under_way):
            desk.done(n)
            ended.add(n)
    assert ended == set(range(added))

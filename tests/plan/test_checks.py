"""Checks as such: each once, none stopped by another's crash, failures first."""

import dataclasses
import signal
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from croze.errors import TasksError, WaitExpired
from croze.plan.checks import INTERNAL, SKIPPED, WORST_FIRST, Check, Report, deadline, make

ACTS = ("nothing", "ok", "warn", "fail", "error", "crash", "part", "many")


def act(what: str, report: Report) -> None:
    if what in ("ok", "many"):
        report.ok("fine")
    if what in ("warn", "many"):
        report.warn("some.kind", "odd")
    if what in ("fail", "many"):
        report.fail("some.kind", "bad", where="there", fix="mend it")
    if what == "error":
        raise TasksError("no rows", where="list", fix="give one")
    if what == "crash":
        raise KeyError("a defect")
    if what == "part":
        with report.part():
            raise TasksError("no rows")
        report.ok("the other part")


@st.composite
def plans(draw):
    names = [f"c{i}" for i in range(draw(st.integers(1, 8)))]
    acts = draw(st.lists(st.sampled_from(ACTS), min_size=len(names), max_size=len(names)))
    needs = [tuple(draw(st.sets(st.sampled_from(names[:i])))) if i else () for i in range(len(names))]
    aside = draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    return list(zip(names, acts, needs, aside, strict=True))


@given(plans())
def test_every_check_is_made_once_and_told_failures_first(plan):
    made: list[str] = []

    def looker(name, what):
        def look(context, report):
            made.append(name)
            act(what, report)

        return look

    checks = tuple(
        Check(name=n, look=looker(n, what), needs=needs, aside=aside) for n, what, needs, aside in plan
    )
    findings = make(checks, None)
    ranks = [WORST_FIRST[f.status] for f in findings]
    assert ranks == sorted(ranks)
    assert len(made) == len(set(made))
    out: set[str] = set()
    for name, what, needs, _ in plan:
        own = [f for f in findings if f.check == name]
        assert own, "every check is heard of"
        if out & set(needs):
            out.add(name)
            assert name not in made and [f.kind for f in own] == [SKIPPED]
            continue
        assert name in made
        if what in ("fail", "error", "crash", "part", "many"):
            assert any(f.status == "fail" for f in own)
            out.add(name)
        else:
            assert all(f.status != "fail" for f in own)


def test_an_error_keeps_its_kind_and_a_defect_says_where():
    checks = tuple(
        Check(name=what, look=lambda _, report, what=what: act(what, report)) for what in ("error", "crash")
    )
    error, crash = make(checks, None)
    assert (error.kind, error.message, error.where, error.fix) == ("tasks", "no rows", "list", "give one")
    assert crash.kind == INTERNAL and "KeyError: 'a defect'" in crash.message
    assert __file__ in (crash.where or "")


def test_code_that_does_not_end_is_ended():
    before = signal.getsignal(signal.SIGALRM)
    with (
        pytest.raises(WaitExpired, match=r"counting took longer than 0\.1 s"),
        deadline(0.1, "counting", "here"),
    ):
        while True:
            pass
    assert signal.getsignal(signal.SIGALRM) == before
    time.sleep(0.15)  # no alarm is left over


def test_the_deadline_lets_go_of_its_alarm_and_needs_the_main_thread():
    with deadline(0.05, "nothing", "here"):
        pass
    time.sleep(0.1)
    ended = []

    def elsewhere():
        with deadline(0.01, "sleeping", "here"):
            time.sleep(0.05)
        ended.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert ended == [True]


def test_a_check_cannot_be_changed():
    check = Check(name="x", look=lambda context, report: None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        check.name = "y"  # type: ignore[misc]


def test_a_check_that_waits_is_made_beside_others():
    met = threading.Barrier(2, timeout=10)
    checks = (
        Check(name="waits", look=lambda context, report: met.wait() and None, aside=True),
        Check(name="other", look=lambda context, report: met.wait() and None),
    )
    assert {f.status for f in make(checks, None)} == {"ok"}

"""The decisions under every interleaving: the account always adds up and nothing is trained twice."""

from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from croze.errors import InvariantViolated
from croze.loop.decisions import (
    Cancelled,
    Committed,
    Counts,
    Decisions,
    Dispatch,
    Ended,
    GroupDone,
    Key,
    Settled,
    StepDone,
)


def make(groups: int = 2, size: int = 3, retries: int = 1, committed: int = 0) -> Decisions:
    return Decisions(groups_per_step=groups, group_size=size, retries=retries, committed=committed)


def end_all(decisions: Decisions, dispatches, **ended) -> list:
    return [action for d in dispatches for action in decisions.on(Ended(key=d.key, **ended))]


def test_a_step_is_dispatched_whole_and_trained_whole():
    decisions = make()
    dispatches = decisions.open()
    assert [(d.key.group, d.key.member) for d in dispatches] == [(g, m) for g in (0, 1) for m in (0, 1, 2)]
    assert {d.step for d in dispatches} == {1}
    actions = end_all(decisions, dispatches)
    assert [type(a) for a in actions] == [GroupDone, GroupDone, StepDone]
    assert actions[-1].kept == tuple(actions[:2])
    assert decisions.counts() == Counts(dispatched=6, in_flight=6)
    settled = decisions.on(Committed(step=1))
    assert {a.state for a in settled} == {"trained"} and len(settled) == 6
    assert decisions.counts() == Counts(dispatched=6, trained=6)
    assert [d.key.group for d in decisions.open()] == [2, 2, 2, 3, 3, 3]


def test_a_resumed_run_goes_on_after_its_last_committed_step():
    first = make(committed=4).open()[0]
    assert first == Dispatch(key=Key(group=8, member=0), step=5)


@pytest.mark.parametrize("fault", ["infra", "unknown"])
def test_a_fault_of_the_machinery_is_tried_again_then_given_up(fault):
    decisions = make(groups=1, size=3, retries=2)
    decisions.open()
    key = Key(group=0, member=1)
    for attempt in (1, 2):
        settled, again = decisions.on(Ended(key=key, valid=False, fault=fault, reason="gone"))
        assert settled == Settled(key=key, state="failed", reason="gone")
        assert again == Dispatch(key=Key(group=0, member=1, attempt=attempt), step=1)
        key = again.key
    assert [type(a) for a in decisions.on(Ended(key=key, valid=False, fault=fault))] == [Settled]
    assert decisions.counts() == Counts(dispatched=5, in_flight=2, failed=3)


def test_a_rollout_without_score_is_filtered_and_not_tried_again():
    decisions = make(groups=1, size=3)
    first, *rest = decisions.open()
    (settled,) = decisions.on(Ended(key=first.key, valid=False, fault="none"))
    assert settled.state == "filtered"
    done, _ = end_all(decisions, rest)
    assert done.kept and done.members == tuple(d.key for d in rest)


def test_a_fault_of_the_policy_is_scored_like_any_other_end():
    decisions = make(groups=1, size=2)
    done, _ = end_all(decisions, decisions.open(), valid=True, fault="policy")
    assert done.kept and len(done.members) == 2


def test_a_group_with_one_valid_member_is_dropped_and_counted():
    decisions = make(groups=2, size=2, retries=0)
    a, b, c, d = decisions.open()
    decisions.on(Ended(key=a.key, valid=False, fault="infra"))
    (done,) = decisions.on(Ended(key=b.key))
    assert not done.kept and done.reason == "1 valid members, 2 needed"
    _, step = end_all(decisions, [c, d])
    assert [g.group for g in step.kept] == [1]
    states = {s.key: s.state for s in decisions.on(Committed(step=1))}
    assert states == {b.key: "filtered", c.key: "trained", d.key: "trained"}
    assert decisions.counts() == Counts(dispatched=4, trained=2, filtered=1, failed=1)


def test_a_step_of_which_nothing_is_left_is_still_complete():
    decisions = make(groups=1, size=2, retries=0)
    *_, step = end_all(decisions, decisions.open(), valid=False, fault="infra")
    assert step == StepDone(step=1, kept=())
    assert decisions.on(Committed(step=1)) == ()
    decisions.open()


def test_groups_of_one_need_one_valid_member():
    decisions = make(groups=1, size=1)
    done, _ = end_all(decisions, decisions.open())
    assert done.kept


def test_late_and_repeated_news_of_an_attempt_is_ignored():
    decisions = make(groups=1, size=2)
    a, b = decisions.open()
    _, again = decisions.on(Ended(key=a.key, valid=False, fault="infra"))
    assert decisions.on(Ended(key=a.key)) == ()
    assert decisions.on(Cancelled(key=a.key)) == ()
    decisions.on(Ended(key=again.key))
    assert decisions.on(Ended(key=again.key)) == ()
    assert decisions.on(Ended(key=Key(group=77, member=0))) == ()
    assert [type(x) for x in decisions.on(Ended(key=b.key))] == [GroupDone, StepDone]
    decisions.on(Committed(step=1))
    assert decisions.on(Ended(key=b.key)) == ()
    assert decisions.counts() == Counts(dispatched=3, trained=2, failed=1)


def test_steps_are_committed_once_complete_and_in_order():
    decisions = make(groups=1, size=2)
    dispatches = decisions.open()
    for step in (1, 2):
        with pytest.raises(InvariantViolated):
            decisions.on(Committed(step=step))
    with pytest.raises(InvariantViolated):
        decisions.open()
    end_all(decisions, dispatches)
    decisions.on(Committed(step=1))
    with pytest.raises(InvariantViolated):
        decisions.on(Committed(step=1))


def test_stopping_cancels_running_and_waiting_alike():
    decisions = make(groups=1, size=3)
    a, b, c = decisions.open()
    decisions.on(Ended(key=a.key))
    settled = decisions.cancel_all("interrupted")
    assert {s.key for s in settled} == {a.key, b.key, c.key}
    assert decisions.counts() == Counts(dispatched=3, cancelled=3)
    with pytest.raises(InvariantViolated):
        decisions.on(Committed(step=1))


def test_an_account_that_does_not_add_up_says_its_numbers():
    with pytest.raises(InvariantViolated, match=r"3 rollouts were dispatched, but 1 in_flight \+ 1 trained"):
        Counts(dispatched=3, in_flight=1, trained=1).check("test")
    with pytest.raises(InvariantViolated):
        Counts(dispatched=0, in_flight=-1, trained=1).check("test")


def test_a_machinery_fault_cannot_be_valid():
    with pytest.raises(ValueError):
        Ended(key=Key(group=0, member=0), valid=True, fault="infra")


class AnyInterleaving(RuleBasedStateMachine):
    """Events in any order, news of dead attempts too; bookkeeping by the actions alone must agree."""

    @initialize(groups=st.integers(1, 3), size=st.integers(1, 4), retries=st.integers(0, 2))
    def start(self, groups, size, retries):
        self.decisions = make(groups, size, retries)
        self.groups, self.size, self.retries = groups, size, retries
        self.live: list[Key] = []
        self.seen: list[Key] = []
        self.final: dict[Key, str] = {}
        self.valid: set[Key] = set()
        self.complete: StepDone | None = None
        self.committed = 0
        self.open = False

    def take(self, actions):
        for action in actions:
            if isinstance(action, Dispatch):
                assert action.key not in self.seen
                assert action.key.attempt <= self.retries
                self.seen.append(action.key)
                self.live.append(action.key)
            elif isinstance(action, Settled):
                assert action.key not in self.final
                self.final[action.key] = action.state
                self.live = [k for k in self.live if k != action.key]
            elif isinstance(action, GroupDone):
                assert not any(k.group == action.group for k in self.live)
                assert action.kept == (len(action.members) >= min(2, self.size))
                assert set(action.members) == {k for k in self.valid if k.group == action.group}
            else:
                assert not self.live
                self.complete = action

    @precondition(lambda self: not self.open)
    @rule()
    def open_step(self):
        self.open = True
        self.take(self.decisions.open())
        assert len(self.live) == self.groups * self.size

    @precondition(lambda self: self.seen)
    @rule(data=st.data(), event=st.sampled_from(["valid", "infra", "unknown", "none", "policy", "cancel"]))
    def news(self, data, event):
        key = data.draw(
            st.sampled_from(self.live if self.live and data.draw(st.integers(0, 4)) else self.seen)
        )
        was_live = key in self.live
        if event == "cancel":
            actions = self.decisions.on(Cancelled(key=key))
        else:
            valid = event == "valid"
            if was_live and valid:
                self.valid.add(key)
                self.live.remove(key)
            actions = self.decisions.on(Ended(key=key, valid=valid, fault="none" if valid else event))
        assert was_live or actions == ()
        self.take(actions)

    @precondition(lambda self: self.complete is not None)
    @rule()
    def commit(self):
        assert self.complete is not None
        expected = {k for group in self.complete.kept for k in group.members}
        actions = self.decisions.on(Committed(step=self.complete.step))
        self.take(actions)
        assert {a.key for a in actions if isinstance(a, Settled) and a.state == "trained"} == expected
        self.committed, self.complete, self.open = self.complete.step, None, False

    @rule()
    def stop(self):
        assume(self.seen)
        self.take(self.decisions.cancel_all("stop"))
        assert self.decisions.counts().in_flight == 0
        assert len(self.final) == len(self.seen)
        self.decisions = make(self.groups, self.size, self.retries, committed=10_000)
        self.live, self.seen, self.final, self.valid = [], [], {}, set()
        self.complete, self.open = None, False

    @invariant()
    def the_account_adds_up(self):
        counts = self.decisions.counts()
        told = Counter(self.final.values())
        assert counts.dispatched == len(self.seen)
        assert counts.in_flight == len(self.seen) - len(self.final)
        for state in ("trained", "filtered", "stale", "failed", "cancelled"):
            assert getattr(counts, state) == told[state]
        trained = Counter((k.group, k.member) for k, state in self.final.items() if state == "trained")
        assert not trained or max(trained.values()) == 1


TestAnyInterleaving = AnyInterleaving.TestCase
TestAnyInterleaving.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_groups_left_out_of_the_loss_end_as_filtered():
    decisions = Decisions(groups_per_step=2, group_size=2, retries=0)
    for dispatch in decisions.open():
        decisions.on(Ended(key=dispatch.key))
    settled = decisions.on(Committed(step=1, untrained=frozenset({"g1"})))
    assert [(a.key.group, a.state) for a in settled] == [
        (0, "trained"),
        (0, "trained"),
        (1, "filtered"),
        (1, "filtered"),
    ]
    counts = decisions.counts()
    assert (counts.trained, counts.filtered, counts.in_flight) == (2, 2, 0)

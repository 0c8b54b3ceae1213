"""What a run is told when it learns nothing: each cause from evidence that has it, once, and never too early."""

import dataclasses

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import croze as cz
from croze.loop.signals import CUT, PATIENCE, Evidence, Signals, evidence, together
from croze.types import Finish, Outcome, Rollout, Task


def right(reply):
    return 1.0


RUN = cz.Run(model="tiny-calc", tasks=[], reward=right, dir="runs/x")
QUIET = Evidence(rollouts=8, scored=8, cut=0, compared=2, alike=0, lowest=0.0, highest=0.0, taught=False)


def like(**fields) -> Evidence:
    return msgspec.structs.replace(QUIET, **fields)


def kinds(*steps: Evidence, run: cz.Run = RUN) -> list[str]:
    signals = Signals(run)
    return [warned.kind for step in steps if (warned := signals.see(step)) is not None]


@st.composite
def steps(draw) -> Evidence:
    rollouts = draw(st.integers(0, 20))
    scored, cut = draw(st.integers(0, rollouts)), draw(st.integers(0, rollouts))
    compared = draw(st.integers(0, rollouts // 2))
    lowest = draw(st.sampled_from([-1.0, 0.0, 0.3, 1.0])) if scored else 0.0
    highest = max(lowest, draw(st.sampled_from([0.0, 0.3, 1.0, 2.0]))) if scored else 0.0
    return Evidence(
        rollouts=rollouts,
        scored=scored,
        cut=cut,
        compared=compared,
        alike=draw(st.integers(0, compared)),
        lowest=lowest,
        highest=highest,
        taught=draw(st.booleans()),
    )


@given(st.lists(steps(), max_size=12))
def test_each_cause_is_told_once_and_only_of_steps_in_a_row_that_show_it(seen):
    signals, told = Signals(RUN), []
    for number, step in enumerate(seen, 1):
        warned = signals.see(step)
        if warned is None:
            continue
        last = seen[max(0, number - PATIENCE) : number]
        assert number >= PATIENCE and warned.kind not in told
        told.append(warned.kind)
        assert warned.message and warned.where and warned.fix
        if warned.kind == "replies.cut":
            assert all(s.cut >= CUT * s.rollouts for s in last)
        else:
            assert not any(s.taught for s in last) and warned.kind.startswith("no_signal.")


@given(steps(), st.integers(1, 10))
def test_a_run_that_learns_and_ends_its_replies_hears_nothing(step, count):
    fine = msgspec.structs.replace(step, taught=True, cut=0, rollouts=max(step.rollouts, 1))
    assert kinds(*[fine] * count) == []


@given(steps(), steps(), steps())
def test_what_steps_show_together_is_what_they_show_as_one(a, b, c):
    assert together([a, b, c]) == together([together([a, b]), c]) == together([c, a, b])


def test_the_likely_causes():
    assert kinds(*[QUIET] * 2) == []
    assert kinds(*[QUIET] * 9) == ["no_signal.zero"]
    assert kinds(*[like(lowest=-1.0, highest=-1.0)] * 3) == ["no_signal.zero"]
    assert kinds(*[like(lowest=0.1, highest=0.1)] * 3) == ["no_signal.constant"]
    assert kinds(*[like(lowest=1.0, highest=1.0)] * 3) == ["no_signal.solved"]
    assert kinds(*[like(lowest=1.0, highest=2.0, alike=2)] * 3) == ["no_signal.solved"]
    assert kinds(*[like(alike=2)] * 3) == ["no_signal.identical"]
    assert kinds(*[like(lowest=0.0, highest=1.0)] * 3) == ["no_signal.by_task"]
    assert kinds(*[like(scored=0)] * 3) == ["no_signal.unscored"]
    assert kinds(*[like(cut=8)] * 3) == ["replies.cut"], "one cause, not two"
    assert kinds(*[like(cut=7)] * 3) == ["no_signal.zero"]
    assert kinds(*[like(taught=True, cut=8)] * 3) == ["replies.cut"], "it learns, from cut replies"
    assert kinds(QUIET, QUIET, like(taught=True), QUIET, QUIET) == []
    assert kinds(*[QUIET] * 3, *[like(lowest=1.0, highest=1.0)] * 3) == [
        "no_signal.zero",
        "no_signal.by_task",  # over the border both are in sight
        "no_signal.solved",
    ]


def warned(run: cz.Run, step: Evidence):
    signals = Signals(run)
    (found,) = [w for w in (signals.see(step) for _ in range(PATIENCE)) if w is not None]
    return found


def test_stop_strings_that_are_never_reached_are_named():
    cut = like(cut=8)
    plain = warned(RUN, cut)
    assert (
        plain.where == "sampling.max_tokens" and "24 of 24 replies in 3 steps were cut off" in plain.message
    )
    assert "sampling.max_tokens=256" in plain.message and "croze trace runs/x" in plain.fix
    stopped = dataclasses.replace(RUN, sampling=cz.Sampling(stop=("END", "\n")))
    said = warned(stopped, cut)
    assert said.where == "sampling.stop" and "none of the stop strings 'END', '\\n'" in said.message
    assert "backslash" not in said.fix
    assert "backslash" in warned(dataclasses.replace(RUN, sampling=cz.Sampling(stop=("\\n",))), cut).fix


def test_where_to_look():
    zero = warned(RUN, QUIET)
    assert zero.where.startswith("reward right (") and zero.where.endswith(")") and __file__ in zero.where
    assert warned(RUN, like(alike=2)).where == "sampling.temperature"
    assert warned(RUN, like(lowest=1.0, highest=1.0)).where == "tasks"
    assert "runs/x/faults.jsonl" in warned(RUN, like(scored=0)).fix


def rollout(group: int, reply: str, score: float | None, finish: Finish = "stop") -> Rollout:
    outcome = Outcome(valid=False) if score is None else Outcome(score=score)
    nothing = np.zeros(0)
    return Rollout(
        id=f"g{group}",
        group_id=f"g{group}",
        member=0,
        attempt=0,
        task=Task(id="0", prompt="x"),
        step=1,
        prompt_tokens=1,
        ids_T=nothing,
        logprobs_T=nothing,
        mask_T=nothing,
        turns=(),
        weights=(),
        finish=finish,
        reply=reply,
        outcome=outcome,
    )


def test_evidence_counts_replies_groups_and_scores():
    rollouts = [
        rollout(0, "a", 0.5), rollout(0, "a", 1.0, "length"),
        rollout(1, "a", None), rollout(1, "b", 0.0, "context"),
        rollout(2, "c", 0.25),
    ]  # fmt: skip
    assert evidence(rollouts, taught=True) == Evidence(
        rollouts=5, scored=4, cut=2, compared=2, alike=1, lowest=0.0, highest=1.0, taught=True
    )
    assert evidence([], taught=False) == Evidence(
        rollouts=0, scored=0, cut=0, compared=0, alike=0, lowest=0.0, highest=0.0, taught=False
    )
    assert kinds(*[evidence([], taught=False)] * 3) == ["no_signal.unscored"]

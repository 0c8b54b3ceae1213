"""Rewards by argument name: what a signature asks for, what comes back, what is refused."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import rollout

from croze.errors import DeclarationError, RewardFault, TasksError
from croze.reward import call
from croze.types import Outcome

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")


def spec_of(source: str):
    space: dict = {}
    exec(source, space)
    return call.inspect_reward(space["f"])


def test_signature_is_read():
    spec = spec_of("async def f(reply, sandbox, *, answer, weight=1): ...")
    assert spec.wants == ("reply", "sandbox", "answer", "weight") and spec.needs == (
        "reply",
        "sandbox",
        "answer",
    )
    assert spec.is_async and spec.needs_sandbox and not spec.batched and not spec.everything
    batched = spec_of("def f(completions, **kwargs): ...")
    assert batched.batched and batched.everything and not batched.is_async


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(reply, /): ...", "position"),
        ("def f(*replies): ...", "position"),
        ("def f(reply, sandbox): ...", "await"),
        ("f = 3", "signature"),
    ],
)
def test_signatures_that_cannot_be_called_are_refused(source, says):
    with pytest.raises(DeclarationError, match=says):
        spec_of(source)


def test_columns_are_checked_with_the_nearest_name():
    spec = spec_of("def f(reply, anwser): ...")
    with pytest.raises(DeclarationError) as info:
        call.check_columns(spec, ["answer", "level"])
    assert "anwser" in info.value.message and info.value.fix == "did you mean 'answer'?"
    call.check_columns(spec_of("def f(reply, answer, weight=2): ..."), ["answer"])
    call.check_columns(spec_of("def f(completions, prompts, answer, **kw): ..."), ["answer"])
    with pytest.raises(DeclarationError, match="sandbx"):
        call.check_columns(spec_of("def f(sandbx): ..."), [])
    with pytest.raises(DeclarationError, match="reply"):
        call.check_columns(spec_of("def f(completions, reply): ..."), ["answer"])
    with pytest.raises(DeclarationError, match="rollout"):
        call.check_columns(spec_of("def f(rollout): ..."), ["rollout"])


def test_arguments_are_those_asked_for():
    r = rollout("45", answer="45", level=3)
    assert call.arguments(spec_of("def f(reply, answer, more=1): ..."), r) == {"reply": "45", "answer": "45"}
    assert call.arguments(spec_of("def f(**kw): ..."), r) == {"answer": "45", "level": 3}
    words = call.arguments(spec_of("def f(rollout, task, prompt): ..."), r)
    assert words == {"rollout": r, "task": r.task, "prompt": "add"}


def test_batched_arguments_are_trls():
    rows = [rollout("a", member=0, answer=1), rollout("b", member=1, answer=2)]
    words = call.batched_arguments(spec_of("def f(prompts, completions, completion_ids, answer): ..."), rows)
    assert words["completions"] == ["a", "b"] and words["prompts"] == ["add", "add"]
    assert words["completion_ids"] == [[2, 3, 4]] * 2 and words["answer"] == [1, 2]
    chat = [rollout("a", prompt=[{"role": "user", "content": "hi"}], only=1)]
    words = call.batched_arguments(spec_of("def f(completions, **kw): ..."), chat)
    assert words["completions"] == [[{"role": "assistant", "content": "a"}]]
    assert set(words) == {"completions", "prompts", "completion_ids", "only"}


@pytest.mark.parametrize(
    ("value", "score"),
    [(1, 1.0), (0.5, 0.5), (True, 1.0), (np.float32(0.25), 0.25), (np.array(2), 2.0), (Fraction(1, 4), 0.25),
     (Decimal("0.5"), 0.5), (-3, -3.0)],
)  # fmt: skip
def test_numbers_are_scores(value, score):
    assert call.outcome_of(value, "f") == Outcome(score=score)


def test_parts_sum_and_none_abstains():
    assert call.outcome_of({"a": 1, "b": 0.5}, "f") == Outcome(score=1.5, parts={"a": 1.0, "b": 0.5})
    none = call.outcome_of(None, "f")
    assert not none.valid and none.fault == "none"
    own = Outcome(score=1, valid=False, fault="infra", message="x")
    assert call.outcome_of(own, "f") == own


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), "1", b"1", 1j, [1], (), {}, {"a": None}, {"a": "x"}, {1: 1.0}, {"a": float("nan")},
     np.array([1.0]), object(), 10**400, Outcome(score=float("nan")), Outcome(parts={"a": float("inf")}),
     {"a": 1e308, "b": 1e308}],
)  # fmt: skip
def test_all_else_is_a_fault_that_names_the_function(value):
    with pytest.raises(RewardFault, match="my_reward") as info:
        call.outcome_of(value, "my_reward")
    assert "finite number" in info.value.fix and len(str(info.value)) < 500


@given(
    st.floats() | st.integers() | st.text() | st.none() | st.dictionaries(st.text(), st.floats(), max_size=3)
)
def test_no_value_becomes_an_unfinite_score(value):
    try:
        outcome = call.outcome_of(value, "f")
    except RewardFault:
        return
    assert np.isfinite(outcome.score) and all(np.isfinite(v) for v in outcome.parts.values())


def test_batched_values():
    assert [o.score for o in call.outcomes_of((1, 0.5), "f", 2)] == [1.0, 0.5]
    assert [o.score for o in call.outcomes_of(np.array([1.0, 2.0]), "f", 2)] == [1.0, 2.0]
    assert not call.outcomes_of([None, 1], "f", 2)[0].valid
    for bad in ([1.0], 1.0, "ab", {"a": 1, "b": 2}, None, [1, float("nan")]):
        with pytest.raises(RewardFault):
            call.outcomes_of(bad, "f", 2)


@pytest.mark.parametrize(
    "bad",
    [
        Outcome(turns=({"a": float("nan")},)),
        Outcome(turns=({"a": 1.0}, {"b": float("inf")})),
        Outcome(turns=({"a": "good"},)),
        Outcome(turns=(3,)),
        Outcome(turns=3),
        Outcome(turns=({1: 1.0},)),
        Outcome(parts={"a": float("nan")}),
        Outcome(parts={1: 1.0}),
        Outcome(parts=None),
        Outcome(score=float("-inf")),
        Outcome(score="1"),
        Outcome(valid=1),
        Outcome(fault="mine"),
        Outcome(message=b"bytes"),
    ],
)
def test_an_outcome_is_held_to_the_same_as_a_number(bad):
    with pytest.raises(RewardFault):
        call.outcome_of(bad, "f")


def test_a_sound_outcome_stays_as_it_was():
    outcome = Outcome(score=1, parts={"a": np.float32(0.5)}, turns=[{"b": 2}], message="m")
    assert call.outcome_of(outcome, "f") == Outcome(
        score=1.0, parts={"a": 0.5}, turns=({"b": 2.0},), message="m"
    )


def test_every_task_is_held_to_what_the_reward_needs():
    spec = spec_of("def f(reply, answer, weight=1): ...")
    call.check_task(spec, rollout(answer=1).task)
    with pytest.raises(TasksError, match=r"task-g.*'answer'") as info:
        call.check_task(spec, rollout(level=1).task)
    assert "level" in info.value.fix
    batched = spec_of("def f(prompts, completions, answer): ...")
    with pytest.raises(TasksError):
        call.check_task(batched, rollout().task)

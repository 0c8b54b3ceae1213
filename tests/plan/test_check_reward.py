"""Rewards that would spoil a run, tried as ``croze check`` tries them."""

import asyncio
import os
import time

import plan_cases as cases
import pytest
from plan_help import a_run, look, only

from croze.config import RewardOptions, SandboxOptions
from croze.env.tasks import as_tasks
from croze.loop.usage import descendants
from croze.plan.checks_reward import PATIENCE_S, allowed
from croze.plan.probing import Allowed, Probe, try_reward
from croze.sandbox.protocol import Limits

TASK = as_tasks(cases.sums).first()


def reward_of(function, **fields):
    return only(look(a_run(reward=function, **fields), "reward"), "reward")


def line_of(function, offset=1) -> str:
    return f"{cases.__file__}:{function.__code__.co_firstlineno + offset}"


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = set(descendants(os.getpid()))
    yield
    deadline = time.monotonic() + 5
    while set(descendants(os.getpid())) - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not set(descendants(os.getpid())) - before


@pytest.mark.parametrize("function", [cases.right, cases.wants_a_box, cases.loud, cases.trl])
def test_a_sound_reward_passes(function):
    found = reward_of(function)
    assert (found.status, found.kind) == ("ok", "reward")
    assert "gold 1" in found.message and "garbage 0" in found.message


def test_a_reward_that_wants_a_sandbox_gets_one():
    run = a_run(reward=cases.runs_it, sandbox=SandboxOptions(allow_unsafe=True))
    assert only(look(run, "reward"), "reward").status == "ok"


@pytest.mark.parametrize(
    ("function", "said", "offset"),
    [
        (cases.gives_text, "the score is str 'good', which is no number", 0),
        (cases.gives_nan, "the score is nan", 0),
        (cases.raises, "ValueError: cannot read '", 1),
        (cases.raises_on_nonsense, "ValueError: invalid literal for int()", 1),
        (cases.ends_its_process, "exited with code 3", 0),
        (cases.leaves_by_the_door, "SystemExit: 3", 1),
        (cases.forks, "more with every call", 0),
        (cases.forks_and_goes_on, "more with every call", 0),
    ],
)
def test_a_reward_that_gives_no_number_or_forks_fails(function, said, offset):
    found = reward_of(function)
    assert (found.status, found.kind) == ("fail", "reward")
    assert said in found.message and "Traceback" not in found.message
    assert found.where == line_of(function, offset) and found.fix


def test_the_replies_it_fails_on_are_named():
    assert "garbage, long, unicode" in reward_of(cases.raises_on_nonsense).message


@pytest.mark.parametrize("function", [cases.spins, cases.waits, cases.hangs_on_garbage])
def test_a_reward_that_hangs_fails_after_one_deadline(function):
    began = time.monotonic()
    found = reward_of(function, reward_options=RewardOptions(timeout_s=1.5))
    assert (found.status, found.kind) == ("fail", "reward")
    assert f"{function.__name__} gave nothing within 1.5 s" in found.message
    assert "reward.timeout_s" in (found.fix or "")
    assert time.monotonic() - began < 12


def test_how_long_is_waited():
    assert allowed(a_run()).call_s == PATIENCE_S
    assert allowed(a_run(reward_options=RewardOptions(timeout_s=25))).call_s == 25
    assert allowed(a_run(reward_options=RewardOptions(timeout_s=900))).call_s == 60


@pytest.mark.parametrize(
    ("function", "memory", "said"),
    [
        (cases.forks_without_end, 1 << 40, "started more than 20 processes"),
        (cases.eats_memory, 300 << 20, "MiB of memory, 300 are allowed"),
    ],
)
def test_a_reward_that_takes_the_machine_is_killed(function, memory, said):
    limits = Allowed(call_s=20, total_s=20, memory_bytes=memory, processes=20)
    probes = [Probe(name="gold", reply="1", task=TASK), Probe(name="empty", reply="", task=TASK)]
    trial = asyncio.run(try_reward(a_run(reward=function), probes, limits))
    (tried,) = trial.tried
    assert said in tried.broke and not tried.outcome.valid


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (cases.says_nothing, "reward.none"),
        (cases.same_for_all, "reward.flat"),
        (cases.throws_dice, "reward.random"),
        (cases.likes_garbage, "reward.gold"),
        (cases.keeps_a_server, "reward.processes"),
    ],
)
def test_what_could_be_meant_is_a_warning(function, kind):
    found = reward_of(function)
    assert (found.status, found.kind) == ("warn", kind)
    assert found.where == line_of(function, 0) and found.fix


def test_a_reward_that_asks_for_a_column_that_is_not_there_is_not_called():
    findings = look(a_run(reward=cases.wants_a_reference), "reward")
    columns, reward = only(findings, "columns"), only(findings, "reward")
    assert (columns.status, columns.kind) == ("fail", "declaration") and "'refrence'" in columns.message
    assert (reward.status, reward.kind) == ("warn", "skipped") and "columns failed" in reward.message


def test_a_row_without_the_column_is_found_among_others():
    rows = [{"prompt": f"{i}+1=", "answer": "2"} for i in range(30)] + [{"prompt": "9+9="}]
    found = only(look(a_run(tasks=rows), "columns"), "columns")
    assert (found.status, found.kind) == ("fail", "tasks") and "'answer'" in found.message


@pytest.mark.parametrize("function", [lambda reply: 1.0, print, "right".count])
def test_a_reward_that_cannot_travel_fails_the_declaration(function):
    found = only(look(a_run(reward=function), "declaration"), "declaration")
    assert (found.status, found.kind) == ("fail", "declaration") and found.fix


def test_limits_that_no_sandbox_has_fail_the_declaration():
    run = a_run(sandbox=SandboxOptions(disk_mib=600))
    found = only(look(run, "declaration"), "declaration")
    assert (found.status, found.kind, found.where) == ("fail", "config", "sandbox.disk_mib")
    assert Limits().disk_mib < 600


def test_a_check_inside_an_event_loop():
    async def as_in_a_notebook():
        return reward_of(cases.right)

    assert asyncio.run(as_in_a_notebook()).status == "ok"

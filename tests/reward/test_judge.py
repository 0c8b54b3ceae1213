"""The judge: scores come back, and whatever a reward does, it never becomes a score it did not give."""

import asyncio
import contextlib
import functools
import os
import signal
import subprocess
import sys
import time

import pytest
import reward_cases as cases
from made import rollout

from croze.config import RewardOptions, SandboxOptions
from croze.errors import ConfigError, DeclarationError, TasksError
from croze.loop.usage import descendants
from croze.reward.judge import Judge
from croze.reward.math import math_reward
from croze.sandbox import cgroup

QUICK = RewardOptions(timeout_s=1.0, concurrency=4)


def judged(reward, rollouts, options=QUICK, sandbox=None, output=None):
    """Outcomes, and the judge as it was at the end."""
    printed = []

    async def main():
        async with Judge(reward, options=options, sandbox=sandbox, output=output or printed.append) as judge:
            return await judge.judge(rollouts), judge

    outcomes, judge = asyncio.run(main())
    judge.printed = b"".join(printed)
    return outcomes, judge


def acts(*names, reply="45"):
    return [rollout(reply, group=f"g{i}", behave=name) for i, name in enumerate(names)]


def children() -> list[str]:
    """Live processes that this one started: "PID STATE WORDS"."""
    out = subprocess.run(
        ["ps", "-eo", "ppid=,pid=,stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 1) for line in out.splitlines()]
    mine = [row[1] for row in rows if row[0] == str(os.getpid()) and " ps -eo" not in row[1]]
    return [line for line in mine if not line.split()[1].startswith("Z")]


_before: set[str] = set()


@pytest.fixture(autouse=True)
def those_of_other_tests() -> None:
    """Tests of other files that ran in this process may have started helpers that stay, as multiprocessing does."""
    _before.clear()
    _before.update(line.split()[0] for line in children())


def strays() -> list[str]:
    return [line for line in children() if line.split()[0] not in _before]


@pytest.mark.parametrize("reward", [cases.right, cases.right_later])
def test_scores_come_back_in_order(reward):
    outcomes, _ = judged(reward, [rollout(str(i), member=i, answer="7") for i in range(40)])
    assert [round(o.parts.get("right", o.score)) for o in outcomes] == [int(i == 7) for i in range(40)]
    assert all(o.valid and o.fault == "none" for o in outcomes)
    assert strays() == []


def test_calls_run_at_once():
    began = time.monotonic()
    outcomes, _ = judged(cases.by_column, acts(*["slow"] * 16), RewardOptions(timeout_s=9, concurrency=16))
    assert all(o.score == 1 for o in outcomes) and time.monotonic() - began < 16 * 0.15 + 1.0


def test_values_of_every_kind():
    outcomes, judge = judged(
        cases.by_column, acts("none", "array", "outcome", "nan", "text", "raise", "loud", "fine")
    )
    none, array, outcome, nan, text, raised, loud, fine = outcomes
    assert not none.valid and none.fault == "none"
    assert (array.score, outcome.score, outcome.parts, loud.score, fine.score) == (
        0.25,
        2.0,
        {"a": 2.0},
        1.0,
        1.0,
    )
    for bad in (nan, text, raised):
        assert not bad.valid and bad.fault == "infra" and bad.score == 0.0
    assert "by_column" in nan.message and "ValueError: no good: 45" in raised.message
    assert "reward_cases.py:" in raised.message
    assert b"said on stdout 45" in judge.printed and b"said on stderr" in judge.printed


def test_a_reward_may_call_exit_or_interrupt():
    outcomes, judge = judged(cases.by_column, acts("sysexit", "keyboard", "fine"))
    assert [o.fault for o in outcomes] == ["infra", "infra", "none"] and judge.restarts == 0
    outcomes, judge = judged(cases.by_column_async, acts("sysexit", "keyboard", "fine"))
    assert [o.fault for o in outcomes] == ["infra", "infra", "none"] and judge.restarts == 0


@pytest.mark.parametrize("reward", [cases.by_column, cases.by_column_async])
@pytest.mark.parametrize("behave", ["spin", "bigint"])
def test_a_hanging_reward_is_killed_and_its_neighbours_are_not_hurt(reward, behave):
    outcomes, judge = judged(reward, acts("slow", "fine", behave, "slow", "fine", "fine"))
    assert [o.score for o in outcomes] == [1, 1, 0, 1, 1, 1]
    assert not outcomes[2].valid and outcomes[2].fault == "unknown" and "timeout_s=1" in outcomes[2].message
    assert all(o.valid for i, o in enumerate(outcomes) if i != 2) and judge.restarts >= 1
    assert strays() == []


def test_a_late_coroutine_is_stopped_without_a_new_worker():
    outcomes, judge = judged(cases.by_column_async, acts("await", "fine"))
    assert (outcomes[0].fault, outcomes[0].valid, outcomes[1].score) == ("unknown", False, 1.0)
    assert judge.restarts == 0


def test_a_coroutine_that_will_not_stop_costs_the_worker():
    outcomes, judge = judged(cases.by_column_async, acts("swallow", "fine"))
    assert (outcomes[0].fault, outcomes[1].score, judge.restarts) == ("unknown", 1.0, 1)


@pytest.mark.parametrize("reward", [cases.by_column, cases.by_column_async])
@pytest.mark.parametrize("behave", ["exit", "segv", "killed"])
def test_a_reward_that_kills_the_worker_is_found(reward, behave):
    outcomes, judge = judged(reward, acts("slow", behave, "slow", "fine"))
    assert [o.valid for o in outcomes] == [True, False, True, True]
    assert outcomes[1].fault == "unknown" and "reward worker" in outcomes[1].message
    assert 1 <= judge.restarts <= 3


@pytest.mark.parametrize("reward", [cases.by_column, cases.by_column_async])
@pytest.mark.parametrize("behave", ["closes", "closes and hangs"])
def test_a_reward_that_closes_the_workers_descriptors_is_found_at_once(reward, behave):
    began = time.monotonic()
    outcomes, judge = judged(reward, acts("fine", behave, "fine"), RewardOptions(timeout_s=60, concurrency=4))
    assert [o.valid for o in outcomes] == [True, False, True] and judge.restarts <= 3
    assert outcomes[1].fault == "unknown" and "reward worker" in outcomes[1].message
    assert time.monotonic() - began < 8
    assert strays() == []


def test_a_task_without_a_needed_column_is_a_wrong_declaration_and_no_fault():
    async def main():
        async with Judge(cases.right, options=QUICK) as judge:
            with pytest.raises(TasksError) as info:
                await judge.judge([rollout(answer="45"), rollout(group="h", anser="45")])
            return info.value, await judge.judge([rollout(answer="45")])

    error, outcomes = asyncio.run(main())
    assert "task-h" in error.message and "'answer'" in error.message and "right" in error.message
    assert error.fix == "did you mean 'anser'?" and error.exit_code == 2 and outcomes[0].score == 1.0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("memory_mib", 0),
        ("memory_mib", 8),
        ("disk_mib", 600),
        ("disk_mib", 0),
        ("pids", 0),
        ("cpu_s", float("nan")),
        ("wall_s", float("inf")),
        ("cpu_s", 0.0),
    ],
)
def test_limits_no_sandbox_could_have_are_refused_before_anything_starts(key, value):
    with pytest.raises(ConfigError, match=f"sandbox.{key}") as info:
        Judge(cases.right, sandbox=SandboxOptions(**{key: value}))
    assert info.value.where == f"sandbox.{key}"


def test_options_under_which_no_call_could_be_made_are_refused():
    with pytest.raises(ConfigError, match=r"reward\.concurrency"):
        Judge(cases.right, options=RewardOptions(concurrency=0))
    with pytest.raises(ConfigError, match=r"reward\.timeout_s"):
        Judge(cases.right, options=RewardOptions(timeout_s=float("nan")))


def test_turns_come_back_as_numbers_or_not_at_all():
    fine, bad = judged(cases.turned, [rollout("2"), rollout("nan", member=1)])[0]
    assert fine.turns == ({"a": 2.0},)
    assert (bad.valid, bad.fault) == (False, "infra") and "turn 0" in bad.message


def test_the_tier_is_in_every_result():
    outcomes, _ = judged(cases.asks_the_tier, [rollout()], RewardOptions(timeout_s=20))
    assert outcomes[0].score == 1.0


def test_what_a_reward_started_dies_with_its_worker():
    judged(cases.by_column, acts("orphan"))
    left = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout
    assert "sleep 4243" not in left


def test_the_batched_form_gets_groups():
    rows = [
        rollout(r, group=g, member=i, answer="45", extra=1)
        for g in "ab"
        for i, r in enumerate(("45", "skip", "7"))
    ]
    outcomes, _ = judged(cases.trl, [rows[i] for i in (0, 3, 1, 4, 2, 5)])
    assert [(o.score, o.valid) for o in outcomes] == [(1, True)] * 2 + [(0, False)] * 2 + [(0, True)] * 2
    chat = [rollout(r, prompt=[{"role": "user", "content": "x"}]) for r in ("45", "7")]
    assert [o.score for o in judged(cases.trl_chat, chat)[0]] == [1.0, 0.0]
    short, _ = judged(cases.trl_short, rows[:3])
    assert all(o.fault == "infra" and "1 rewards for 3" in o.message for o in short)


def test_the_whole_rollout_arrives():
    outcomes, _ = judged(cases.uses_rollout, [rollout(a=1, b=2)])
    assert outcomes[0].score == 3 + 2 + 3 + 7


def test_an_installed_reward_is_imported_by_name():
    outcomes, _ = judged(
        math_reward, [rollout("\\boxed{45}", answer="45"), rollout("7", member=1, answer="45")]
    )
    assert [o.score for o in outcomes] == [1.0, 0.0]


def test_code_runs_in_sandboxes():
    replies = ["40 + 5", "6 * 7", "40 +", "__import__('os')._exit(0)", "open('/etc/shadow').read()"]
    rows = [rollout(r, member=i, answer="45") for i, r in enumerate(replies)]
    outcomes, _ = judged(cases.runs_it, rows, RewardOptions(timeout_s=20, concurrency=4))
    assert [o.score for o in outcomes] == [1.0, 0.1, 0.0, 0.1, 0.0]
    assert strays() == []


def test_sandboxes_end_with_their_call():
    options = RewardOptions(timeout_s=3, concurrency=4)
    assert judged(cases.leaves_everything_open, [rollout()], options)[0][0].score == 1
    late = judged(
        cases.hangs_in_a_sandbox, [rollout()], RewardOptions(timeout_s=0.5), SandboxOptions(wall_s=60)
    )[0]
    assert late[0].fault == "unknown"
    left = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout
    assert "sleep 4245" not in left


def test_a_lost_sandbox_is_an_infra_fault():
    outcomes, _ = judged(cases.kills_its_sandbox, [rollout()], RewardOptions(timeout_s=9))
    assert outcomes[0].fault == "infra" and not outcomes[0].valid and "SandboxLost" in outcomes[0].message


@pytest.mark.parametrize(
    "reward",
    [
        lambda reply: 1,
        cases.outer(),
        cases.Holder().method,
        cases.Holder,
        cases.Callable(),
        functools.partial(cases.right, answer="4"),
        len,
        eval("lambda reply: 1"),
    ],
)
def test_functions_that_cannot_travel_are_refused(reward):
    with pytest.raises(DeclarationError) as info:
        Judge(reward)
    assert "name every argument" in info.value.fix or "at the top level of a file" in info.value.fix


def from_file(path):
    import importlib.util

    spec = importlib.util.spec_from_file_location("user_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_file_is_loaded_as_no_main_with_its_neighbours(tmp_path):
    (tmp_path / "helper_of_reward.py").write_text("HALF = 0.5\n")
    (tmp_path / "task.py").write_text(
        "import sys\nsys.path.insert(0, __file__.rpartition('/')[0])\n"
        "from helper_of_reward import HALF\n"
        "def mine(reply):\n    return HALF * (__name__ != '__main__') * ('torch' not in sys.modules)\n"
        "if __name__ == '__main__':\n    raise SystemExit('never')\n"
    )
    outcomes, _ = judged(from_file(tmp_path / "task.py").mine, [rollout()])
    assert outcomes[0].score == 0.5


def test_a_file_that_fails_in_the_worker_says_where(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("import os\nif os.environ.get('CROZE_ROLE'):\n    1 / 0\ndef mine(reply): return 1\n")
    with pytest.raises(DeclarationError, match=r"ZeroDivisionError.*bad\.py:3"):
        judged(from_file(path).mine, [rollout()])
    path.write_text("def mine(reply): return 1\n")
    mine = from_file(path).mine
    path.write_text("x = 1\n")
    with pytest.raises(DeclarationError, match="no 'mine'"):
        judged(mine, [rollout()])
    assert strays() == []


def test_columns_that_cannot_travel_are_refused_and_the_rest_goes_on():
    async def main():
        async with Judge(cases.right, options=QUICK) as judge:
            with pytest.raises(DeclarationError, match="another process"):
                await judge.judge([rollout(answer=object()), rollout(answer="45")])
            return await judge.judge([rollout(answer="45")])

    assert asyncio.run(main())[0].score == 1.0


def test_a_cancelled_caller_disturbs_no_one():
    async def main():
        async with Judge(cases.by_column, options=QUICK) as judge:
            slow = asyncio.ensure_future(judge.judge(acts(*["slow"] * 12)))
            await asyncio.sleep(0.1)
            slow.cancel()
            return await judge.judge(acts("fine", "fine"))

    assert [o.score for o in asyncio.run(main())] == [1.0, 1.0]


def test_an_outside_kill_of_the_worker_costs_nothing():
    async def main():
        async with Judge(cases.by_column, options=QUICK) as judge:
            running = asyncio.ensure_future(judge.judge(acts(*["slow"] * 12)))
            await asyncio.sleep(0.2)
            os.kill(judge._worker._process.pid, signal.SIGKILL)
            return await running, judge.restarts

    outcomes, restarts = asyncio.run(main())
    assert [o.score for o in outcomes] == [1.0] * 12 and restarts == 1


def test_the_worker_dies_with_the_judge(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {os.path.dirname(cases.__file__)!r})\n"
        "import asyncio, os, signal, reward_cases as cases\n"
        "from made import rollout\n"
        "from croze.config import RewardOptions\n"
        "from croze.reward.judge import Judge\n"
        "async def main():\n"
        "  async with Judge(cases.by_column, options=RewardOptions(timeout_s=60)) as judge:\n"
        "    asyncio.ensure_future(judge.judge([rollout(behave='bigint')]))\n"
        "    await asyncio.sleep(0.5)\n"
        "    print(judge._worker._process.pid, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stdout
    time.sleep(0.3)
    status = subprocess.run(["ps", "-o", "stat=", "-p", out.strip()], capture_output=True, text=True).stdout
    assert out.strip().isdigit() and (not status or status.startswith("Z"))


@pytest.mark.parametrize("whole_tree", [False, True])
def test_sandboxes_end_with_the_judge_their_cgroups_too(whole_tree):
    program = (
        f"import sys; sys.path.insert(0, {os.path.dirname(cases.__file__)!r})\n"
        "import asyncio, os, signal, reward_cases as cases\n"
        "from made import rollout\n"
        "from croze.config import RewardOptions, SandboxOptions\n"
        "from croze.reward.judge import Judge\n"
        "async def main():\n"
        "  options, limits = RewardOptions(timeout_s=60), SandboxOptions(wall_s=60)\n"
        "  async with Judge(cases.hangs_in_a_sandbox, options=options, sandbox=limits) as judge:\n"
        "    asyncio.ensure_future(judge.judge([rollout(member=i) for i in range(4)]))\n"
        "    await asyncio.sleep(1)\n"
        "    print(judge._worker._process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    judge = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert judge.stdout is not None
    worker = int(judge.stdout.readline())
    found = cgroup.find()
    homes = set(found.homes.values()) if found else set()

    def left():
        return [d for home in homes for d in home.glob(f"croze-*-{worker}-*")]

    assert len(left()) >= 4 * len(homes)
    below = descendants(worker) if whole_tree else []
    for pid in (judge.pid, *([worker] if whole_tree else []), *below):
        with contextlib.suppress(ProcessLookupError):  # a child may die of its parent's death first
            os.kill(pid, signal.SIGKILL)
    judge.communicate()
    deadline = time.monotonic() + 5
    while left() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert left() == []


def test_judge_and_worker_import_no_torch():
    program = "import sys, croze.reward.judge, croze.reward.worker; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0

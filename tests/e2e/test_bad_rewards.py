"""Rewards that fail while a run trains: never a score, always said with type, text and place, and no process left."""

import contextlib
import json
import os
import time
from pathlib import Path

import pytest

from bad_inputs import Wrong, hold, rewarded, task_file, train

VALUES = {
    "text": ("return 'good'", "the score is str 'good', which is no number"),
    "nan": ("return float('nan')", "the score is nan"),
    "inf": ("return -float('inf')", "the score is -inf"),
    "complex": ("return 1j", "the score is complex 1j"),
    "a list": ("return [1.0]", "the score is list [1.0]"),
    "an array": ("import numpy; return numpy.ones(2)", "the score is ndarray"),
    "too large": ("return 10**400", "the score is int 1000"),
    "no parts": ("return {}", "returned {}: parts need names"),
    "parts of text": ("return {'form': 'x'}", "part 'form' is str 'x'"),
    "parts that are nan": ("return {'size': float('nan')}", "part 'size' is nan"),
    "parts without names": ("return {1: 2.0}", "parts are a dict, and need names"),
    "parts too large together": ("return {'a': 1e308, 'b': 1e308}", "the sum of the parts is inf"),
    "an outcome of text": ("return cz.Outcome(score='y')", "the score is str 'y'"),
    "a coroutine": ("return later()", "the score is coroutine"),
}
RAISED = {
    "an outcome at odds": ("return cz.Outcome(valid=True, fault='infra')", "an outcome with fault='infra'"),
    "raises": ("raise KeyError('no judge')", "KeyError: 'no judge'"),
    "raises deep": ("return sum(int(c) for c in 'x')", "ValueError: invalid literal"),
    "raises what has no text": ("raise Textless", "Textless: (its text"),
    "raises what no encoding has": ("raise ValueError('\\ud800')", "ValueError: ?"),
    "raises at length": ("raise ValueError('z' * 10_000_000)", "ValueError: zzz"),
    "exits": ("sys.exit(3)", "SystemExit: 3"),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "base exception": ("raise BaseException('odd')", "BaseException: odd"),
    "ends a generator": ("raise GeneratorExit", "GeneratorExit"),
    "ends an iteration": ("raise StopIteration(3)", "StopIteration: 3"),
    "cancels": ("import asyncio; raise asyncio.CancelledError", "CancelledError"),
    "calls itself": ("return bad(reply, act)", "RecursionError"),
    "reads stdin": ("return float(input())", "EOFError"),
    "eats memory": ("return float(len(bytearray(10 << 30)))", "reward.memory_mib allows 2048 MiB"),
}
DEADLY = {
    "ends its process": ("os._exit(3)", "the reward worker exited with code 3 under bad"),
    "crashes": ("import ctypes; ctypes.string_at(0)", "died of SIGSEGV"),
    "is killed": ("import signal; os.kill(os.getpid(), signal.SIGKILL)", "killed from outside"),
    "hangs": ("time.sleep(600)", "longer than reward.timeout_s=2, and its worker was killed"),
}
LATER = {
    "raises later": ("raise ValueError('later')", "ValueError: later"),
    "cancels itself": ("asyncio.current_task().cancel(); await asyncio.sleep(9)", "CancelledError"),
    "sleeps": ("await asyncio.sleep(600)", "longer than reward.timeout_s=2"),
    "interrupts later": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
}
BEFORE = """import asyncio
class Textless(Exception):
    def __str__(self): raise ValueError
async def later(): return 1.0
"""
ONCE_EACH = ("algo.name=reinforce++", "group_size=1", "reward.timeout_s=2", "reward.memory_mib=2048")


def told_faults(folder: Path) -> list[dict]:
    lines = (folder / "run" / "faults.jsonl").read_text().splitlines()
    return [fault for line in lines if "fault" in (fault := json.loads(line))]


def acted(acts: dict[str, str], kind: str = "def") -> str:
    """A file whose reward does what each task's "act" says; one more task is judged as it should be."""
    arms = [f"    if act == {act!r}:\n        {code}" for act, code in acts.items()]
    body = "\n".join([BEFORE, f"{kind} bad(reply, act):", *arms, "    return 1.0\n\n"])
    rows = [{"prompt": f"{n}=", "act": act} for n, act in enumerate([*acts, "none"])]
    return task_file(body, tasks=repr(rows), reward="bad")


@pytest.mark.parametrize(
    ("acts", "kind", "fault"),
    [
        (VALUES, "def", "infra"),
        (RAISED, "def", "infra"),
        (DEADLY, "def", "unknown"),
        (LATER, "async def", ""),
    ],
    ids=["values", "raised", "deadly", "later"],
)
def test_each_fault_is_told_with_its_place_and_is_no_score(tmp_path: Path, acts: dict, kind: str, fault: str):
    text = acted({act: code for act, (code, _) in acts.items()}, kind)
    answer = train(tmp_path, text, "run.dir=run", f"groups_per_step={len(acts) + 1}", *ONCE_EACH)
    assert answer.code == 0, (answer.events, answer.stderr)
    (step,), faults = answer.steps(), told_faults(tmp_path)
    assert step["infra_faults"] == len(faults) == len(acts) and step["reward_mean"] == 1.0
    assert not fault or {f["fault"] for f in faults} == {fault}
    assert "Traceback" not in answer.stderr
    lines = text.splitlines()
    for act, (code, what) in acts.items():
        (message,) = (f["message"] for f in faults if what in f["message"])
        assert len(message) <= 1000
        if acts is VALUES:  # what a reward returns belongs to the whole of it
            assert message.endswith(f"task.py:{lines.index('def bad(reply, act):') + 1})"), message
        elif acts is RAISED and act != "calls itself":
            assert f"task.py:{lines.index(8 * ' ' + code) + 1})" in message, message


@pytest.mark.parametrize(
    ("body", "what", "signature"),
    [
        ("return float('nan')", "4 of them: bad: the score is nan (", "reply"),
        ("raise ValueError('no judge')", "4 of them: ValueError: no judge (", "reply"),
        ("while True: pass", "4 of them: bad took longer than reward.timeout_s=1", "reply"),
        ("return [1.0]", "4 of them: bad: returned 1 rewards for 2 completions (", "completions"),
        ("return None", "4 of them: bad: returned NoneType None", "completions"),
    ],
)
def test_a_reward_that_never_works_ends_the_run(tmp_path: Path, body: str, what: str, signature: str):
    answer = train(tmp_path, rewarded(body, signature), "run.dir=run", "reward.timeout_s=1")
    hold(answer, Wrong("reward", what, "reward bad (", "croze check", code=3))
    assert "task.py:15" in answer.error["where"] and "run/faults.jsonl" in answer.error["fix"]
    assert not answer.steps() and len(told_faults(tmp_path)) == 4


SOMETIMES = {
    "ends its process": ("os._exit(3)", "unknown"),
    "eats memory": ("bytearray(10 << 30)", "infra"),
    "hangs": ("time.sleep(600)", "unknown"),
}


@pytest.mark.parametrize("name", SOMETIMES)
def test_a_reward_that_fails_for_some_tasks_costs_those_alone(tmp_path: Path, name: str):
    body, fault = SOMETIMES[name]
    text = rewarded(f"if n == 5:\n    {body}\nreturn float(len(reply) % 2)", "reply, n")
    answer = train(
        tmp_path,
        text,
        "run.dir=run",
        "steps=4",
        "reward.timeout_s=1",
        "reward.memory_mib=2048",
        "loop.retries=1",
    )
    assert answer.code == 0, (answer.events, answer.stderr)
    faults = [f for f in told_faults(tmp_path) if "fault" in f]
    assert sum(s["infra_faults"] for s in answer.steps()) == len(faults) == 4, (
        "two siblings, each tried twice"
    )
    assert {f["fault"] for f in faults} == {fault}
    assert [s["valid"] for s in answer.steps()].count(1.0) == 3


FINE = {
    "truth": "return len(reply) > 2",
    "whole number": "return 1",
    "numpy": "import numpy; return numpy.float32(0.5)",
    "numpy truth": "import numpy; return numpy.bool_(True)",
    "decimal": "import decimal; return decimal.Decimal('0.5')",
    "prints at length": "print('y' * 3_000_000); return 1.0",
    "changes the folder": "os.chdir('/'); return 1.0",
    "deletes its file": "os.unlink(__file__); return 1.0",
    "starts a thread": "import threading; threading.Thread(target=time.sleep, args=(600,)).start(); return 1.0",
    "closes stdout": "sys.stdout.close(); os.close(1); return 1.0",
}


def test_odd_rewards_that_are_no_fault(tmp_path: Path):
    answer = train(
        tmp_path,
        acted(FINE),
        "run.dir=run",
        f"groups_per_step={len(FINE) + 1}",
        "reward.concurrency=1",
        *ONCE_EACH,
    )
    assert answer.code == 0, (answer.events, answer.stderr)
    (step,) = answer.steps()
    assert (step["valid"], step["infra_faults"]) == (1.0, 0), told_faults(tmp_path)
    assert "Traceback" not in answer.stderr


def test_a_reward_that_is_not_applicable_gives_no_score(tmp_path: Path):
    answer = train(tmp_path, rewarded("return None"), "run.dir=run")
    (step,) = answer.steps()
    assert (answer.code, step["reward_mean"], step["valid"], step["infra_faults"]) == (0, None, 0.0, 0)


START = """
import subprocess
child = subprocess.Popen({words}, start_new_session=True)
with open({file!r}, 'a') as f: f.write(f'{{child.pid}}\\n')
"""
TWICE = ["sh", "-c", "(sleep 600 & echo $! >> pids); exit 0"]


@pytest.mark.parametrize("ending", ["return 1.0", "os._exit(3)", "time.sleep(600)"])
def test_what_a_reward_starts_does_not_outlive_the_run(tmp_path: Path, ending: str):
    started = str(tmp_path / "pids")
    body = START.format(words=["sleep", "600"], file=started) + START.format(words=TWICE, file="/dev/null")
    train(tmp_path, rewarded(body + "time.sleep(0.1)\n" + ending), "run.dir=run", "reward.timeout_s=1")
    pids = [int(line) for line in Path(started).read_text().split()]
    assert len(pids) >= 2
    deadline = time.monotonic() + 2
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 9)
    assert not left


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


FORKS = """if os.fork() == 0:
    os.setsid()
    with open({file!r}, "a") as f: f.write(f"{{os.getpid()}} ")
    time.sleep(600)
return 1.0
"""


def test_a_reward_that_forks_leaves_no_fork(tmp_path: Path):
    file = tmp_path / "pids"
    answer = train(tmp_path, rewarded(FORKS.format(file=str(file))), "run.dir=run")
    assert answer.code == 0
    assert not [pid for pid in map(int, file.read_text().split()) if runs(pid)]


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("1 / 0", Wrong("declaration", "ZeroDivisionError", "task.py", "imported there once more")),
        ("sys.exit(1)", Wrong("declaration", "SystemExit: 1", "task.py", "imported there once more")),
        ("raise BaseException", Wrong("declaration", "BaseException", "task.py", "once more")),
        ("del right", Wrong("declaration", "'right' is not defined", "task.py", "once more")),
        ("os._exit(5)", Wrong("reward", "exited with code 5", "task.py", "ends the process", code=3)),
    ],
)
def test_a_file_that_fails_in_the_rewards_process_alone(tmp_path: Path, line: str, wrong: Wrong):
    answer = train(tmp_path, task_file(f"if os.environ.get('CROZE_ROLE') == 'reward':\n    {line}\n"))
    hold(answer, wrong)

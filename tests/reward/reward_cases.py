"""Rewards for the tests, at the top level of a file as a user's would be."""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time

import numpy as np

import croze as cz


def right(reply, answer):
    return reply == answer


async def right_later(reply, answer):
    await asyncio.sleep(0.01)
    return {"right": float(reply == answer), "short": 0.5 * (len(reply) < 3)}


def by_column(behave, reply):
    """Does what the task says."""
    return ACTS[behave](reply)


async def by_column_async(behave, reply):
    if behave == "await":
        await asyncio.sleep(60)
    if behave == "swallow":
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                continue
    await asyncio.sleep(0.05)
    return ACTS[behave](reply)


def _spin(_):
    while True:
        pass


def _raise(reply):
    raise ValueError(f"no good: {reply}")


def _orphan(_):
    subprocess.Popen(["sleep", "4243"])
    os._exit(3)


def _loud(reply):
    print("said on stdout", reply)
    os.write(1, b"\x00\xff raw bytes \xde\xad\n" * 3)
    os.write(2, b"said on stderr\n")
    return 1


def _closes_all(_):
    os.closerange(3, 256)
    return 1


def _closes_and_hangs(_):
    os.closerange(3, 256)
    time.sleep(60)


ACTS = {
    "closes": _closes_all,
    "closes and hangs": _closes_and_hangs,
    "fine": lambda reply: 1.0,
    "slow": lambda reply: time.sleep(0.15) or 1.0,
    "spin": _spin,
    "bigint": lambda reply: 10**10**9,
    "exit": lambda reply: os._exit(3),
    "sysexit": lambda reply: sys.exit(4),
    "segv": lambda reply: ctypes.string_at(0),
    "killed": lambda reply: os.kill(os.getpid(), signal.SIGKILL),
    "orphan": _orphan,
    "raise": _raise,
    "nan": lambda reply: float("nan"),
    "text": lambda reply: "good",
    "none": lambda reply: None,
    "array": lambda reply: np.float32(0.25),
    "loud": _loud,
    "outcome": lambda reply: cz.Outcome(score=2.0, parts={"a": 2.0}),
    "keyboard": lambda reply: (_ for _ in ()).throw(KeyboardInterrupt),
}


async def asks_the_tier(reply, sandbox):
    result = await sandbox.exec_python("print(1)")
    return float(result.tier == sandbox.tier and bool(result.driver))


async def falls_with_its_worker(reply, sandbox):
    if reply == "x":
        os._exit(3)
    assert (await sandbox.exec_python("print(1)")).tier == "unsafe"
    return float(reply)


def turned(reply):
    return cz.Outcome(score=1.0, turns=({"a": float(reply)},))


async def runs_it(reply, answer, sandbox):
    result = await sandbox.exec_python(f"print({reply})")
    return 1.0 if result.text.strip() == answer else 0.1 * (result.exit_code == 0)


async def leaves_everything_open(reply, sandbox):
    other = await sandbox.sibling()
    await other.exec_python("open('/box/x', 'w')")
    running = asyncio.ensure_future(sandbox.exec(["sleep", "4245"]))
    await asyncio.sleep(0.2)
    return 1 if not running.done() else 0


async def hangs_in_a_sandbox(reply, sandbox):
    await sandbox.exec(["sleep", "4245"])
    return 1


async def kills_its_sandbox(reply, sandbox):
    await sandbox.exec(["true"])
    sandbox._made._start.process.kill()
    await sandbox.exec(["true"])


def trl(completions, answer, **kwargs):
    assert set(kwargs) >= {"prompts", "extra"}
    return [1.0 if c == a else None if c == "skip" else 0.0 for c, a in zip(completions, answer, strict=True)]


def trl_chat(prompts, completions):
    return [
        float(c[0]["content"] == "45" and p[0]["role"] == "user")
        for p, c in zip(prompts, completions, strict=True)
    ]


def trl_short(completions):
    return [1.0]


def uses_rollout(rollout, task, prompt, extra=7):
    return rollout.generated + len(task.columns) + len(prompt) + extra


def outer():
    def inner(reply):
        return 1

    return inner


class Holder:
    def method(self, reply):
        return 1


class Callable:
    def __call__(self, reply):
        return 1

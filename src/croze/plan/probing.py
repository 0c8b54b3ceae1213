"""Calls a reward on replies of our own, through the judge that a run uses, under a guard.

The judge holds a call to its deadline. The guard holds what the reward's worker starts to a number of processes
and to memory: a reward that breaks the limits is killed with all below it, before the machine suffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from croze.loop.usage import descendants
from croze.reward.judge import Judge
from croze.run import Run
from croze.types import Outcome, Rollout, Task, Turn

LOOK_S = 0.05
"""Seconds between two looks of the guard."""
SETTLE_S = 0.5
"""What a call started may take so long to go when the call has ended."""
PROCESSES = 64
"""Most processes under a reward, beside those of its sandboxes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A reply to try: ``name`` says which ("gold", "empty", ...)."""

    name: str
    reply: str
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What became of a probe. ``late``: it met the deadline; ``broke``: the limit that the guard killed it for."""

    probe: Probe
    outcome: Outcome
    seconds: float
    late: bool
    broke: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """All that were tried, in order. ``left``: processes of the reward that outlived its first call, and its last."""

    tried: tuple[Tried, ...]
    left: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """What a reward may use while it is tried: seconds a call, seconds in all, bytes, processes."""

    call_s: float
    total_s: float
    memory_bytes: int
    processes: int = PROCESSES


async def try_reward(run: Run, probes: Sequence[Probe], allowed: Allowed) -> Trial:
    """Judge every probe by itself, in order, until one hangs, breaks a limit or takes its worker down.

    Raises what opening a judge raises: DeclarationError, SandboxUnavailable, ...
    """
    options = dataclasses.replace(run.reward_options, timeout_s=allowed.call_s)
    judge = Judge(run.reward, options=options, sandbox=run.sandbox, output=_unheard)
    tried: list[Tried] = []
    left: list[int] = []
    async with judge:
        worker = judge.worker_pid
        own = set(descendants(worker))
        guard = Guard(worker, allowed)
        watching = asyncio.create_task(guard.watch())
        try:
            began = time.monotonic()
            for number, probe in enumerate(probes):
                tried.append(await _try(judge, guard, probe, number, allowed.call_s))
                if judge.restarts or tried[-1].late or time.monotonic() - began > allowed.total_s:
                    break
                if number in (0, len(probes) - 1):
                    left.append(await _left_behind(worker, own))
        finally:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
    return Trial(tried=tuple(tried), left=(left[0], left[-1]) if left else (0, 0))


async def _try(judge: Judge, guard: Guard, probe: Probe, number: int, limit_s: float) -> Tried:
    started = time.monotonic()
    (outcome,) = await judge.judge([_rollout(probe, number)])
    seconds = time.monotonic() - started
    late = outcome.fault == "unknown" and seconds >= limit_s and not guard.broke
    return Tried(probe=probe, outcome=outcome, seconds=seconds, late=late, broke=guard.broke)


class Guard:
    """Watches a reward's worker and all processes below it."""

    def __init__(self, worker: int, allowed: Allowed) -> None:
        self._worker, self._allowed = worker, allowed
        self.broke = ""

    async def watch(self) -> None:
        while not self.broke:
            await asyncio.sleep(LOOK_S)
            pids = self._pids()
            if len(pids) > self._allowed.processes:
                self.broke = f"started more than {self._allowed.processes} processes"
            elif (used := sum(map(_resident, pids))) > self._allowed.memory_bytes:
                limit = self._allowed.memory_bytes
                self.broke = f"used {used >> 20} MiB of memory, {limit >> 20} are allowed"
        while pids := self._pids():  # what forks while it is killed is killed in the next round
            for pid in pids:
                _kill(pid)
            await asyncio.sleep(0)
            if not set(self._pids()) & set(pids):
                return

    def _pids(self) -> list[int]:
        return [p for p in (self._worker, *descendants(self._worker)) if _alive(p)]


async def _left_behind(worker: int, own: set[int]) -> int:
    """Processes that go on though the call has ended; those of the worker itself (``own``) not counted."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        left = [p for p in descendants(worker) if p not in own and _alive(p)]
        if not left or time.monotonic() > deadline:
            return len(left)
        await asyncio.sleep(LOOK_S)


def _kill(pid: int) -> None:
    """The process and its group, which no fork can leave while the signal is sent; never our own group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        group = os.getpgid(pid)
        if group != os.getpgrp():
            os.killpg(group, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> bool:
    """Whether a process is more than an entry that nobody has waited for."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def _resident(pid: int) -> int:
    """Bytes of memory of a process that are no file's."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def _unheard(_: bytes) -> None:
    """What a reward prints is for its own run."""


def _rollout(probe: Probe, number: int) -> Rollout:
    """A finished attempt with the probe's reply; its token ids stand for none."""
    tokens = 1 + len(probe.reply) // 4
    mask_T = np.r_[False, np.ones(tokens, bool)]
    return Rollout(
        id=f"check.{number}.0.0",
        group_id=f"check.{number}",
        member=0,
        attempt=0,
        task=probe.task,
        step=1,
        prompt_tokens=1,
        ids_T=np.zeros(1 + tokens, np.int32),
        logprobs_T=np.where(mask_T, np.float32(-1.0), np.float32("nan")),
        mask_T=mask_T,
        turns=(
            Turn(producer="prompt", start=0, end=1),
            Turn(producer="model", start=1, end=1 + tokens, finish="stop"),
        ),
        weights=(),
        finish="stop",
        reply=probe.reply,
    )

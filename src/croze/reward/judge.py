"""``Judge``: rollouts in, outcomes out, whatever the reward does meanwhile.

Rewards run in one worker process. A call that passes its deadline or takes the worker down never becomes a
score: it ends as an invalid outcome, the worker is replaced, and the calls that were merely beside it run
again. Who is to blame is decided by ``Desk``.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from croze.config import RewardOptions, SandboxOptions, check_range
from croze.errors import CrozeError, RewardFault
from croze.reward.call import RewardFunction, check_task, inspect_reward
from croze.reward.desk import Desk
from croze.reward.locate import locate
from croze.reward.messages import Call, Ping, Pong, Result, Setup
from croze.reward.process import Output, WorkerProcess
from croze.sandbox.protocol import Limits
from croze.types import Outcome, Rollout

_PING_S = 1.0
_GRACE_S = 0.5
"""An asynchronous reward is stopped by its own worker at the deadline; only if that fails the worker dies."""


def _to_stderr(data: bytes) -> None:
    sys.stderr.write(data.decode("utf-8", "replace"))


class Watch(Protocol):
    """Told of a call's borders as they happen: its turn comes (at most once), its outcomes are there."""

    def starts(self) -> None: ...

    def ends(self) -> None: ...


class _Ask:
    """One call: its rollouts, who waits for the outcomes, until when, and who watches."""

    def __init__(self, rollouts: list[Rollout], watch: Watch | None) -> None:
        self.rollouts, self.watch = rollouts, watch
        self.started = False
        self.outcomes: asyncio.Future[list[Outcome]] = asyncio.get_running_loop().create_future()
        self.deadline = 0.0
        self.alarm: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """It goes to the worker; what goes there again, after a loss, has started before."""
        if self.watch is not None and not self.started:
            self.watch.starts()
        self.started = True

    def settle(self, outcomes: list[Outcome]) -> None:
        self.rest()
        if not self.outcomes.done():
            self.outcomes.set_result(outcomes)
            if self.watch is not None:
                self.watch.ends()

    def fail(self, error: Exception) -> None:
        self.rest()
        if not self.outcomes.done():
            self.outcomes.set_exception(error)

    def rest(self) -> None:
        if self.alarm is not None:
            self.alarm.cancel()
            self.alarm = None


class Judge:
    """``async with Judge(reward, options=..., sandbox=...) as judge: await judge.judge(rollouts)``.

    ``judge`` may be called many times at once. ``output`` gets what the reward prints (stderr by default).
    Raises DeclarationError where the reward cannot travel to another process or its file cannot be imported,
    and ConfigError for options that no sandbox or worker could work under.
    """

    def __init__(
        self,
        reward: RewardFunction,
        *,
        options: RewardOptions | None = None,
        sandbox: SandboxOptions | None = None,
        output: Output = _to_stderr,
    ) -> None:
        self.spec = inspect_reward(reward)
        self._options, sandbox = options or RewardOptions(), sandbox or SandboxOptions()
        check_range("reward.timeout_s", self._options.timeout_s)
        check_range("reward.concurrency", self._options.concurrency)
        Limits.of(sandbox)
        self._setup = Setup(reward=locate(reward), options=self._options, sandbox=sandbox)
        self._output = output
        self._desk = Desk(self._options.concurrency)
        self._asks: dict[int, _Ask] = {}
        self._numbers = itertools.count(1)
        self._pong = asyncio.Event()
        self._rescue: asyncio.Task[None] | None = None
        self._broken: CrozeError | None = None
        self._closing = False
        self.restarts = 0
        """Workers that had to be replaced."""

    async def __aenter__(self) -> Judge:
        await self._start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closing = True
        tasks = [t for t in (self._rescue, self._listener) if t is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._worker.close()
        for ask in self._asks.values():
            ask.fail(RewardFault("the judge was closed under a call", where="reward worker"))

    async def _start(self) -> None:
        worker = WorkerProcess(self._output)
        await worker.start(msgspec.structs.replace(self._setup, again=self.restarts > 0))
        self._worker = worker
        self._listener = asyncio.create_task(self._listen(worker))

    @property
    def worker_pid(self) -> int:
        """The process in which rewards run now; another after a restart."""
        return self._worker.pid

    @property
    def where(self) -> str:
        """Which reward, and where it is defined."""
        return self.spec.where

    @property
    def batched(self) -> bool:
        """Whether siblings are judged in one call."""
        return self.spec.batched

    async def judge(self, rollouts: Sequence[Rollout], *, watch: Watch | None = None) -> list[Outcome]:
        """One outcome a rollout, in order. A batched reward is called once per group. ``watch`` sees every call.

        Raises TasksError for a task without a column that the reward needs, DeclarationError for columns that
        cannot travel, and whatever made a new worker impossible.
        """
        for rollout in rollouts:
            check_task(self.spec, rollout.task)
        calls = _by_group(rollouts) if self.spec.batched else [[r] for r in rollouts]
        asks = [self._ask(call, watch) for call in calls]
        self._pump()
        done = await asyncio.gather(*(ask.outcomes for ask in asks))
        by_rollout = {
            id(r): o
            for ask, outcomes in zip(asks, done, strict=True)
            for r, o in zip(ask.rollouts, outcomes, strict=True)
        }
        return [by_rollout[id(r)] for r in rollouts]

    def _ask(self, rollouts: list[Rollout], watch: Watch | None) -> _Ask:
        if self._broken is not None:
            raise self._broken
        number, ask = next(self._numbers), _Ask(rollouts, watch)
        self._asks[number] = ask
        self._desk.add(number)
        return ask

    def _pump(self) -> None:
        """Send what may start now, unless the worker is being replaced."""
        if self._broken is not None or (self._rescue is not None and not self._rescue.done()):
            return
        loop = asyncio.get_running_loop()
        while started := self._desk.next():
            for number in started:
                ask = self._asks[number]
                if ask.outcomes.done():  # its caller has gone
                    self._finish(number)
                    continue
                try:
                    self._worker.send(Call(id=number, rollouts=ask.rollouts))
                except CrozeError as error:
                    ask.fail(error)
                    self._finish(number)
                    continue
                ask.start()
                ask.deadline = loop.time() + self._options.timeout_s + (_GRACE_S if self.spec.is_async else 0)
                ask.alarm = loop.call_at(ask.deadline, self._overdue)

    def _finish(self, number: int) -> None:
        self._desk.done(number)
        del self._asks[number]

    async def _listen(self, worker: WorkerProcess) -> None:
        while (message := await self._heard(worker)) is not None:
            if isinstance(message, Pong):
                self._pong.set()
            elif isinstance(message, Result) and message.id in self._desk.under_way:
                ask = self._asks[message.id]
                if len(message.outcomes) == len(ask.rollouts):
                    ask.settle(message.outcomes)
                    self._finish(message.id)
                    self._pump()
        if not self._closing and worker is self._worker and not self._rescuing:
            self._rescue = asyncio.create_task(self._after_death())

    async def _heard(self, worker: WorkerProcess) -> Any:
        try:
            return await worker.receive()
        except msgspec.DecodeError:  # user code got hold of the socket: this worker is lost
            return None

    @property
    def _rescuing(self) -> bool:
        return self._rescue is not None and not self._rescue.done()

    def _overdue(self) -> None:
        if not self._rescuing and not self._closing:
            self._rescue = asyncio.create_task(self._after_deadline())

    async def _after_deadline(self) -> None:
        """Calls are late. If the worker's loop still answers, they are to blame; else what holds it is."""
        self._pong.clear()
        self._worker.send(Ping())
        try:
            await asyncio.wait_for(self._pong.wait(), _PING_S)
            now = asyncio.get_running_loop().time()
            late = {n for n in self._desk.under_way if self._asks[n].deadline <= now}
            if not late:
                self._resume()
                return
        except TimeoutError:
            late = {self._worker.running}
        limit = f"took longer than reward.timeout_s={self._options.timeout_s:g}"
        await self._replace(late, f"{self.spec.name} {limit}, and its worker was killed")

    async def _after_death(self) -> None:
        ending = await self._worker.how_it_ended()
        await self._replace({self._worker.running}, f"the reward worker {ending} under {self.spec.name}")

    async def _replace(self, guilty: set[int], why: str) -> None:
        """Kill the worker, give up who is to blame, and go on with a fresh one."""
        self._listener.cancel()
        await self._worker.kill()
        self.restarts += 1
        for number in self._desk.under_way:
            self._asks[number].rest()
        for number in self._desk.lost(guilty):
            ask = self._asks[number]
            ask.settle([Outcome(valid=False, fault="unknown", message=why[:1000])] * len(ask.rollouts))
            self._finish(number)
        try:
            await self._start()
        except CrozeError as error:
            self._broken = error
            for ask in self._asks.values():
                ask.fail(error)
            return
        self._resume()

    def _resume(self) -> None:
        self._rescue = None
        self._pump()


def _by_group(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.group_id, []).append(rollout)
    return list(groups.values())

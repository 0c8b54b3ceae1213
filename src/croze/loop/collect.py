"""One step's rollouts: dispatched, generated, judged as each ends, until the step is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from croze.clock import Clock
from croze.errors import InvariantViolated
from croze.loop.decisions import Action, Cancelled, Decisions, Dispatch, Ended, Key, Settled, StepDone
from croze.loop.ledger import Dispatched, Finished, Ledger
from croze.rollout.groups import Attempt, Generator
from croze.trace.metrics import JsonLines
from croze.trace.recorder import Recorder, Span
from croze.types import Group, Outcome, Rollout, Task


class Judges(Protocol):
    """What the loop needs of judging: outcomes in the order of the rollouts; infra faults come as outcomes."""

    @property
    def batched(self) -> bool:
        """Whether siblings are judged in one call."""
        ...

    async def judge(self, rollouts: Sequence[Rollout]) -> list[Outcome]: ...


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """A complete step. ``groups`` are to be trained; ``rollouts`` every attempt of the step, judged.

    ``generated_at`` and ``judged_at``: clock seconds when the last rollout ended and was judged.
    """

    step: int
    groups: tuple[Group, ...]
    rollouts: tuple[Rollout, ...]
    generated_at: float
    judged_at: float
    last_span: Span | None

    @property
    def infra_faults(self) -> int:
        return sum(r.outcome is not None and r.outcome.fault in ("infra", "unknown") for r in self.rollouts)


class Collector:
    """Feeds the decisions with what happens and carries out what they answer."""

    def __init__(
        self,
        *,
        decisions: Decisions,
        ledger: Ledger,
        tasks: Iterator[Task],
        generator: Generator,
        judge: Judges,
        recorder: Recorder,
        faults: JsonLines,
        clock: Clock,
    ) -> None:
        self.decisions, self.ledger, self.tasks = decisions, ledger, tasks
        self.generator, self.judge, self.recorder = generator, judge, recorder
        self.faults, self.clock = faults, clock
        self._task_of: dict[int, Task] = {}

    async def step(self, enabler: Span | None) -> Collected:
        """Run the next step's rollouts to their outcomes. ``enabler``: the span that published the weights."""
        collecting = _Collecting(self, enabler)
        return await collecting.run()

    def open(self) -> list[list[Dispatch]]:
        """The next step's first attempts, by group, each group with its task."""
        groups: dict[int, list[Dispatch]] = {}
        for dispatch in self.decisions.open():
            groups.setdefault(dispatch.key.group, []).append(dispatch)
        for group in groups:
            self._task_of[group] = next(self.tasks)
        self.dispatched([d for dispatches in groups.values() for d in dispatches])
        return list(groups.values())

    def dispatched(self, dispatches: Sequence[Dispatch]) -> None:
        self.ledger.dispatch(
            [Dispatched(key=d.key, step=d.step, task_id=self._task_of[d.key.group].id) for d in dispatches]
        )

    def task(self, group: int) -> Task:
        return self._task_of[group]

    def forget(self, groups: Sequence[int]) -> None:
        for group in groups:
            self._task_of.pop(group, None)


class _Collecting:
    """The state of one step while it is collected."""

    def __init__(self, collector: Collector, enabler: Span | None) -> None:
        self.c, self.enabler = collector, enabler
        self.latest: dict[Key, Rollout] = {}
        self.attempts: list[Rollout] = []
        self.done: StepDone | None = None
        self.generated_at = self.judged_at = collector.clock.now()
        self.last_span = enabler

    async def run(self) -> Collected:
        groups = self.c.open()
        try:
            async with asyncio.TaskGroup() as self.work:
                for dispatches in groups:
                    self.work.create_task(self._attempts(dispatches, self.enabler))
        except BaseExceptionGroup as failed:
            raise _first(failed) from None
        if self.done is None:
            raise InvariantViolated("every rollout ended but the step is not complete", where="collect")
        self.c.forget([dispatches[0].key.group for dispatches in groups])
        return Collected(
            step=self.done.step,
            groups=tuple(self._group(done.members) for done in self.done.kept),
            rollouts=tuple(self.attempts),
            generated_at=self.generated_at,
            judged_at=self.judged_at,
            last_span=self.last_span,
        )

    def _group(self, members: Sequence[Key]) -> Group:
        rollouts = tuple(self.latest[key] for key in members)
        first = rollouts[0]
        return Group(id=first.group_id, task=first.task, step=first.step, rollouts=rollouts)

    async def _attempts(self, dispatches: Sequence[Dispatch], enabler: Span | None) -> None:
        """Generate siblings; judge each as it ends, or all at once where the reward wants them together."""
        task, step = self.c.task(dispatches[0].key.group), dispatches[0].step
        attempts = [_attempt(d.key) for d in dispatches]
        keys = {d.key.rollout_id: d.key for d in dispatches}
        started = self.c.clock.now()
        ended: list[tuple[Key, Rollout]] = []
        async with aclosing(self.c.generator.run(task, attempts, step)) as rollouts:
            async for rollout in rollouts:
                self.generated_at = self.c.clock.now()
                ended.append((keys[rollout.id], rollout))
                if not self.c.judge.batched:
                    decode = self._decode_span([rollout], started, enabler)
                    self.work.create_task(self._judge(ended[-1:], decode))
        if self.c.judge.batched:
            decode = self._decode_span([r for _, r in ended], started, enabler)
            await self._judge(ended, decode)

    def _decode_span(self, rollouts: Sequence[Rollout], start: float, enabler: Span | None) -> Span:
        span = self.c.recorder.add_span(
            "decode",
            start,
            self.c.clock.now(),
            enabler=enabler,
            enabler_type="version" if enabler is self.enabler else "data",
            step=rollouts[0].step,
            rollout_id=rollouts[0].id,
            role="engine",
            requested=start,
        )
        span.work(tokens=sum(r.generated for r in rollouts), rollouts=len(rollouts))
        return span

    async def _judge(self, ended: Sequence[tuple[Key, Rollout]], decode: Span) -> None:
        start = self.c.clock.now()
        outcomes = await self.c.judge.judge([rollout for _, rollout in ended])
        self.judged_at = self.c.clock.now()
        self.last_span = self.c.recorder.add_span(
            "reward",
            start,
            self.judged_at,
            enabler=decode,
            enabler_type="data",
            step=ended[0][1].step,
            rollout_id=ended[0][1].id,
            role="reward",
            requested=decode.t_end,
        )
        self.last_span.work(rollouts=len(ended))
        for (key, rollout), outcome in zip(ended, outcomes, strict=True):
            self._ended(key, rollout.judged(outcome), outcome)

    def _ended(self, key: Key, rollout: Rollout, outcome: Outcome) -> None:
        self.latest[key] = rollout
        self.attempts.append(rollout)
        if not outcome.valid:
            self.c.faults.write(
                {
                    "step": rollout.step,
                    "rollout_id": rollout.id,
                    "fault": outcome.fault,
                    "message": outcome.message,
                }
            )
        event = Ended(key=key, valid=outcome.valid, fault=outcome.fault, reason=outcome.message)
        actions = self.c.decisions.on(event)
        settled = {a.key: a for a in actions if isinstance(a, Settled)}
        self.c.ledger.finish([_finished(key, rollout, settled.get(key))])
        for action in actions:
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Dispatch):
            self.c.dispatched([action])
            self.work.create_task(self._attempts([action], self.last_span))
        elif isinstance(action, StepDone):
            self.done = action


def cancel(collector: Collector, reason: str) -> None:
    """The run ends with a step unfinished: everything in flight is accounted as cancelled."""
    for key in collector.decisions.running:
        collector.decisions.on(Cancelled(key=key, reason=reason))
    collector.decisions.cancel_all(reason)
    collector.ledger.cancel_in_flight(reason)


def _attempt(key: Key) -> Attempt:
    stream = key.group << 24 | key.member << 8 | key.attempt
    return Attempt(key.rollout_id, key.group_id, key.member, key.attempt, stream)


def _finished(key: Key, rollout: Rollout, settled: Settled | None) -> Finished:
    outcome = rollout.outcome
    assert outcome is not None
    return Finished(
        key=key,
        state="finished" if settled is None else settled.state,  # type: ignore[arg-type]
        reason=outcome.message if settled is None else settled.reason,
        prompt_tokens=rollout.prompt_tokens,
        generated_tokens=rollout.generated,
        score=outcome.score if outcome.valid else None,
        weights_id=rollout.weights[-1].weights_id if rollout.weights else "",
    )


def _first(group: BaseExceptionGroup) -> BaseException:
    """The first error of a group of failed tasks; the others follow from it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error

"""One step's rollouts: dispatched, generated, judged as each ends, until the step is complete."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, insort
from collections.abc import Sequence
from contextlib import aclosing
from typing import Protocol

import msgspec

from croze.clock import Clock
from croze.env.tasks import TaskStream
from croze.errors import InvariantViolated
from croze.loop.decisions import Action, Cancelled, Decisions, Dispatch, Ended, Key, Settled, StepDone
from croze.loop.ledger import Dispatched, Finished, Ledger
from croze.loop.look import Look
from croze.reward.judge import Watch
from croze.rollout.groups import Attempt, Generator
from croze.trace.metrics import JsonLines
from croze.trace.recorder import EnablerType, Recorder, Span
from croze.types import Group, Outcome, Rollout, Task


class Judges(Protocol):
    """What the loop needs of judging: outcomes in the order of the rollouts; infra faults come as outcomes."""

    @property
    def batched(self) -> bool:
        """Whether siblings are judged in one call."""
        ...

    @property
    def where(self) -> str:
        """Which reward judges, and where it is defined."""
        ...

    async def judge(self, rollouts: Sequence[Rollout], *, watch: Watch | None = None) -> list[Outcome]: ...


class Collected(msgspec.Struct, frozen=True, kw_only=True):
    """A complete step. ``groups`` are to be trained; ``rollouts`` every attempt of the step, judged, in the order of
    their keys: figures over them do not depend on who ended first.

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
        tasks: TaskStream,
        generator: Generator,
        judge: Judges,
        look: Look,
        recorder: Recorder,
        faults: JsonLines,
        clock: Clock,
    ) -> None:
        self.decisions, self.ledger, self.tasks = decisions, ledger, tasks
        self.generator, self.judge, self.look, self.recorder = generator, judge, look, recorder
        self.faults, self.clock = faults, clock
        self._task_of: dict[int, Task] = {}
        self._prompt_of: dict[int, list[int]] = {}

    async def step(self, enabler: Span | None) -> Collected:
        """Run the next step's rollouts to their outcomes. ``enabler``: the span whose end lets them start."""
        groups = self.open()
        try:
            async with asyncio.TaskGroup() as work:
                collecting = _Collecting(self, enabler, work)
                for dispatches in groups:
                    collecting.start(dispatches)
        except BaseExceptionGroup as failed:
            raise _first(failed) from None
        self.forget([dispatches[0].key.group for dispatches in groups])
        return collecting.collected()

    def open(self) -> list[list[Dispatch]]:
        """The next step's first attempts, by group, each group with its task. Raises TasksError for one that no
        rollout could come of, before any of the step is begun."""
        groups: dict[int, list[Dispatch]] = {}
        for dispatch in self.decisions.open():
            groups.setdefault(dispatch.key.group, []).append(dispatch)
        for group in groups:
            self._task_of[group] = task = next(self.tasks)
            self._prompt_of[group] = self.look.at(task, self.tasks.place)
        self.dispatched([d for dispatches in groups.values() for d in dispatches])
        return list(groups.values())

    def dispatched(self, dispatches: Sequence[Dispatch]) -> None:
        self.ledger.dispatch(
            [Dispatched(key=d.key, step=d.step, task_id=self._task_of[d.key.group].id) for d in dispatches]
        )

    def task(self, group: int) -> Task:
        return self._task_of[group]

    def prompt(self, group: int) -> list[int]:
        return self._prompt_of[group]

    def forget(self, groups: Sequence[int]) -> None:
        for group in groups:
            self._task_of.pop(group, None)
            self._prompt_of.pop(group, None)


class _Collecting:
    """The state of one step while it is collected; its tasks belong to ``work``."""

    def __init__(self, collector: Collector, enabler: Span | None, work: asyncio.TaskGroup) -> None:
        self.c, self.enabler, self.work = collector, enabler, work
        self.latest: dict[Key, Rollout] = {}
        self.attempts: dict[Key, Rollout] = {}
        self.done: StepDone | None = None
        self.generated_at = self.judged_at = collector.clock.now()
        self.last_span = enabler
        self.ended: dict[str, list[Span]] = {"decode": [], "reward": []}

    def start(self, dispatches: Sequence[Dispatch]) -> None:
        """A group's first attempts."""
        synced = self.enabler is not None and self.enabler.stave == "sync"
        self.work.create_task(self._attempts(dispatches, self.enabler, "version" if synced else "gate"))

    def collected(self) -> Collected:
        if self.done is None:
            raise InvariantViolated("every rollout ended but the step is not complete", where="collect")
        return Collected(
            step=self.done.step,
            groups=tuple(self._group(done.members) for done in self.done.kept),
            rollouts=tuple(self.attempts[key] for key in sorted(self.attempts)),
            generated_at=self.generated_at,
            judged_at=self.judged_at,
            last_span=self.last_span,
        )

    def _group(self, members: Sequence[Key]) -> Group:
        rollouts = tuple(self.latest[key] for key in members)
        first = rollouts[0]
        return Group(id=first.group_id, task=first.task, step=first.step, rollouts=rollouts)

    async def _attempts(
        self, dispatches: Sequence[Dispatch], enabler: Span | None, enabler_type: EnablerType
    ) -> None:
        """Generate siblings; judge each as it ends, or all at once where the reward wants them together."""
        group, step = dispatches[0].key.group, dispatches[0].step
        task, prompt = self.c.task(group), self.c.prompt(group)
        keys = {d.key.rollout_id: d.key for d in dispatches}
        decoding = {
            name: self.c.recorder.begin(
                "decode",
                enabler=enabler,
                enabler_type=enabler_type,
                step=step,
                rollout_id=name,
                role="engine",
            )
            for name in keys
        }
        ended: list[tuple[Key, Rollout]] = []
        decode: Span | None = None
        try:
            async with aclosing(
                self.c.generator.run(task, [_attempt(k) for k in keys.values()], step, prompt)
            ) as rollouts:
                async for rollout in rollouts:
                    self.generated_at = self.c.clock.now()
                    ended.append((keys[rollout.id], rollout))
                    decode = self._decoded(decoding.pop(rollout.id), rollout)
                    if not self.c.judge.batched:
                        self.work.create_task(self._judge(ended[-1:], decode))
        finally:
            for span in decoding.values():
                self.c.recorder.end(span, ok=False)
        if self.c.judge.batched and decode is not None:
            await self._judge(ended, decode)

    def _decoded(self, span: Span, rollout: Rollout) -> Span:
        span.t_start = rollout.t_start
        span.work(tokens=rollout.generated, rollouts=1)
        if rollout.waited_s > 0:
            self._waited(span)
        self.c.recorder.end(span, ok=rollout.finish != "aborted")
        insort(self.ended["decode"], span, key=_end)
        return span

    async def _judge(self, ended: Sequence[tuple[Key, Rollout]], decode: Span) -> None:
        first = ended[0][1]
        with self.c.recorder.span(
            "reward", enabler=decode, enabler_type="data", step=first.step, rollout_id=first.id, role="reward"
        ) as span:
            span.work(rollouts=len(ended))
            call = _Call(self.c.clock)
            outcomes = await self.c.judge.judge([rollout for _, rollout in ended], watch=call)
            span.ok = not any(outcome.fault in ("infra", "unknown") for outcome in outcomes)
        span.t_start, span.t_end = call.started, call.ended
        if call.waited:
            self._waited(span)
        insort(self.ended["reward"], span, key=_end)
        self.judged_at, self.last_span = span.t_end, span
        for (key, rollout), outcome in zip(ended, outcomes, strict=True):
            self._ended(key, rollout.judged(outcome), outcome)

    def _waited(self, span: Span) -> None:
        """It waited for its turn: what let it start is the piece that ended when it did, and made room."""
        ended = self.ended[span.stave]
        at = bisect_left(ended, span.t_start, key=_end)
        near = ended[max(at - 1, 0) : at + 1]
        if near:
            freed = min(near, key=lambda s: abs(s.t_end - span.t_start))
            span.enabler_span_id, span.enabler_type = freed.span_id, "resource"

    def _ended(self, key: Key, rollout: Rollout, outcome: Outcome) -> None:
        self.latest[key] = rollout
        self.attempts[key] = rollout
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
            self.work.create_task(self._attempts([action], self.last_span, "data"))
        elif isinstance(action, StepDone):
            self.done = action


class _Call:
    """Watches a reward call. It starts at once, by the task that asks for it, or later, when another made room."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._asking = asyncio.current_task()
        self.started = self.ended = clock.now()
        self.waited = False

    def starts(self) -> None:
        self.started = self._clock.now()
        self.waited = asyncio.current_task() is not self._asking

    def ends(self) -> None:
        self.ended = self._clock.now()


def _end(span: Span) -> float:
    return span.t_end


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

"""The RL loop: publish, collect, learn, commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from croze.clock import Clock
from croze.errors import Interrupted, InvariantViolated, RewardFault, TasksError
from croze.inference.protocol import Engine
from croze.loop.checkpoints import Cut
from croze.loop.collect import Collected, Collector, cancel
from croze.loop.decisions import Committed, Final, Settled
from croze.loop.evaluation import Evaluation
from croze.loop.figures import Learned, Timing, step_event, valid_scores
from croze.loop.learning import Learning
from croze.loop.ledger import Ledger, StepCommit
from croze.loop.saving import Saver
from croze.loop.signals import Signals
from croze.loop.stop import Stop, Stopped
from croze.loop.usage import cpu_seconds, peak_mib
from croze.models.device import ComputeThread
from croze.run import Run
from croze.sync.identity import Identity
from croze.trace.marks import mark
from croze.trace.metrics import JsonLines
from croze.trace.recorder import Recorder, Span
from croze.train.protocol import Algorithm, Trainer
from croze.types import WeightsId

OnEvent = Callable[[dict[str, Any]], None]
EMPTY_STEPS = 3
"""Steps in a row without any outcome after which a run that once worked ends."""


class Controller:
    """Runs a declared loop over its parts. Everything is handed in; nothing is looked up."""

    def __init__(
        self,
        run: Run,
        *,
        engine: Engine,
        trainer: Trainer,
        algorithm: Algorithm,
        collector: Collector,
        evaluation: Evaluation | None,
        identity: Identity,
        thread: ComputeThread,
        ledger: Ledger,
        recorder: Recorder,
        metrics: JsonLines,
        saver: Saver,
        stop: Stop,
        clock: Clock,
        on_event: OnEvent,
        cut: Cut | None = None,
    ) -> None:
        """``cut``: the committed step whose weights the trainer holds; None before the first."""
        self.run, self.engine, self.trainer = run, engine, trainer
        self.learning = Learning(trainer, algorithm, thread)
        self.collector, self.evaluation, self.identity, self.thread = collector, evaluation, identity, thread
        self.ledger, self.recorder, self.metrics = ledger, recorder, metrics
        self.saver, self.stop = saver, stop
        self.clock, self.on_event = clock, on_event
        self.signals = Signals(run)
        self._cut = cut
        self._empty = 0

    @property
    def committed(self) -> int:
        return self._cut.step if self._cut else 0

    async def train(self) -> WeightsId:
        """All steps that are left; returns the id of the last weights.

        Raises Interrupted, the state saved, when asked to stop; InvariantViolated when the weights it goes on from
        are not those that were saved.
        """
        try:
            weights_id, last = await self.publish(step=self.committed, enabler=None)
            self._hold_to(self._cut, weights_id)
            evaluated = self._cut is not None and self._cut.state["evaluated"]
            if not evaluated and self._evaluates_after(self.committed):
                last = await self.evaluate(self.committed, last)
            for step in range(self.committed + 1, self.run.steps + 1):
                weights_id, last = await self.step(step, last)
                if self._evaluates_after(step):
                    last = await self.evaluate(step, last)
                if self._cut is not None and self.saver.due(step):
                    await self.saver.begin(self._cut)
            await self.saver.keep(self._cut)
            return weights_id
        except Stopped:
            cancel(self.collector, "the run was stopped")
            await self.saver.keep(self._cut)
            raise Interrupted(
                f"stopped after step {self.committed} of {self.run.steps}",
                where=self.run.dir,
                fix=f"croze resume {self.run.dir}",
            ) from None
        except TasksError as error:
            cancel(self.collector, "the run ended: a task is wrong")
            await self.saver.keep(self._cut)
            raise self.resumable(error) from error
        except BaseException as error:
            cancel(self.collector, f"the run ended: {type(error).__name__}")
            raise

    def resumable(self, error: TasksError) -> TasksError:
        """The error, with how to go on where something is trained."""
        if self._cut is None:
            return error
        file = self.run.file or "FILE"
        fix = f"{error.fix or 'mend it'}; then: croze resume {self.run.dir} --changed (croze check {file} reads ahead)"
        return TasksError(error.message, where=error.where, fix=fix)

    def cut(self, step: int, weights_id: WeightsId, *, evaluated: bool) -> Cut:
        """What belongs to a committed step beside the trainer's state: the place in the tasks, the files' ends, and
        whether an evaluation that is due after it was made."""
        self.recorder.flush()
        state = {
            "evaluated": evaluated,
            "tasks": msgspec.to_builtins(self.collector.tasks.cursor),
            "marks": mark(Path(self.run.dir)),
        }
        return Cut(step=step, weights_id=weights_id, state=state)

    def _hold_to(self, cut: Cut | None, weights_id: WeightsId) -> None:
        if cut is not None and weights_id != cut.weights_id:
            raise InvariantViolated(
                f"the weights of step {cut.step} are {weights_id[:12]} now and were {cut.weights_id[:12]} when saved",
                where="resume",
                fix="resume with the model files and options that the run began with",
            )

    async def step(self, step: int, last: Span) -> tuple[WeightsId, Span]:
        """Collect, learn, publish, commit: one step of the run, which starts when ``last`` has ended."""
        started, cpu = self.clock.now(), cpu_seconds()
        collected = await self.stop.unless(self.collector.step(last))
        self.refuse_without_outcomes(collected)
        learned, trained = await self.learn(collected)
        weights_id, published = await self.publish(step, enabler=trained)
        with self.recorder.span("save", enabler=published, enabler_type="data", step=step) as saved:
            self.commit(collected, learned, weights_id)
            saved.work(rollouts=len(collected.rollouts))
        timing = Timing(
            started=started,
            trained=(trained.t_start, trained.t_end),
            published=(published.t_start, published.t_end),
            saved=(saved.t_start, saved.t_end),
            cpu_s=cpu_seconds() - cpu,
            peak_mib=peak_mib(),
        )
        event = step_event(collected, learned, weights_id, timing)
        self.metrics.write(event)
        self._cut = self.cut(step, weights_id, evaluated=not self._evaluates_after(step))
        for told in (event, *self.signals.after(collected, learned)):
            self.on_event(told)
        return weights_id, saved

    async def publish(self, step: int, enabler: Span | None) -> tuple[WeightsId, Span]:
        """Give the trainer's weights an id and have the engine serve them."""
        kind = "data" if enabler is not None else None
        with self.recorder.span(
            "sync", enabler=enabler, enabler_type=kind, step=step, role="trainer"
        ) as span:
            weights_id = await self.thread.run(
                lambda: self.identity.of(_weighed(self.trainer.export(), span))
            )
            await self.engine.pause()
            await self.thread.run(self.trainer.publish, weights_id)
            await self.engine.prepare(weights_id, self.trainer.export())
            await self.engine.commit(weights_id)
            await self.engine.resume()
        return weights_id, span

    def refuse_without_outcomes(self, collected: Collected) -> None:
        """Faults alone teach nothing: end the run if its first step, or EMPTY_STEPS in a row, had no outcome."""
        if len(collected.rollouts) > collected.infra_faults:
            self._empty = 0
            return
        self._empty += 1
        if collected.step == 1 or self._empty >= EMPTY_STEPS:
            told = Counter(r.outcome.message for r in collected.rollouts if r.outcome is not None)
            message, times = told.most_common(1)[0]
            raise RewardFault(
                f"all {len(collected.rollouts)} rollouts of step {collected.step} met a fault, "
                f"{times} of them: {message}",
                where=self.collector.judge.where,
                fix=f"`croze check {self.run.file or 'FILE'}` tries the reward on replies of its own; all faults are"
                f" in {self.run.dir}/faults.jsonl",
            )

    async def learn(self, collected: Collected) -> tuple[Learned, Span]:
        """Groups to batches, each one forward-backward and one optimizer step."""
        enabler = collected.last_span
        with self.recorder.span(
            "train", enabler=enabler, enabler_type="data", step=collected.step, role="trainer"
        ) as span:
            learned = await self.learning.learn(collected.groups, collected.step)
            span.work(tokens=sum(s.tokens_computed for s in learned.stats), rollouts=len(learned.trained))
        return learned, span

    def commit(self, collected: Collected, learned: Learned, weights_id: WeightsId) -> None:
        """The step is trained: settle its rollouts in the ledger and hold the account to its identity."""
        untrained = frozenset(g.id for g in collected.groups) - learned.groups
        settled = self.collector.decisions.on(Committed(step=collected.step, untrained=untrained))
        states: dict[str, Final] = {a.key.rollout_id: a.state for a in settled if isinstance(a, Settled)}
        scores = valid_scores(collected.rollouts)
        self.ledger.settle(
            StepCommit(
                step=collected.step,
                weights_id=weights_id,
                reward_mean=float(np.mean(scores)) if scores else None,
            ),
            states,
        )
        self.ledger.counts()  # raises unless all that was dispatched is accounted for
        advantages, gaps = learned.advantages, learned.gaps
        for rollout in collected.rollouts:
            self.recorder.rollout(rollout, advantage=advantages.get(rollout.id), max_gap=gaps.get(rollout.id))
        self.recorder.flush()

    def _evaluates_after(self, step: int) -> bool:
        every = self.run.loop.eval_every
        return self.evaluation is not None and (
            step in (0, self.run.steps) or (every > 0 and step % every == 0)
        )

    async def evaluate(self, step: int, last: Span) -> Span:
        """pass@1 on the held-out tasks; the span that ended last."""
        assert self.evaluation is not None
        kind = "version" if last.stave == "sync" else "gate"
        sampled = self.engine.stats().generated_tokens
        with self.recorder.span("eval", enabler=last, enabler_type=kind, step=step) as span:
            event = {"event": "eval", "step": step, **await self.stop.unless(self.evaluation.measure(step))}
            span.work(
                tokens=self.engine.stats().generated_tokens - sampled,
                rollouts=event["tasks"] * event["samples"],
            )
        self.metrics.write(event)
        if self._cut is not None:
            self._cut = self.cut(step, WeightsId(self._cut.weights_id), evaluated=True)
        self.on_event(event)
        return span


def _weighed(tensors: Iterable[tuple[str, Any]], span: Span) -> Iterator[tuple[str, Any]]:
    """The tensors, their bytes noted as work done."""
    for name, tensor in tensors:
        span.work(bytes=tensor.nbytes)
        yield name, tensor

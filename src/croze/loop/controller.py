"""The RL loop: publish, collect, learn, commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from croze.clock import Clock
from croze.errors import RewardFault
from croze.inference.protocol import Engine
from croze.loop.collect import Collected, Collector, cancel
from croze.loop.decisions import Committed, Final, Settled
from croze.loop.evaluation import Evaluation
from croze.loop.figures import Learned, Timing, step_event, valid_scores
from croze.loop.ledger import Ledger, StepCommit
from croze.loop.usage import cpu_seconds, peak_mib
from croze.models.device import ComputeThread
from croze.run import Run
from croze.sync.identity import Identity
from croze.trace.metrics import JsonLines
from croze.trace.recorder import Recorder, Span
from croze.train.protocol import Algorithm, Trainer
from croze.types import Batch, Sample, WeightsId

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
        clock: Clock,
        on_event: OnEvent,
    ) -> None:
        self.run, self.engine, self.trainer, self.algorithm = run, engine, trainer, algorithm
        self.collector, self.evaluation, self.identity, self.thread = collector, evaluation, identity, thread
        self.ledger, self.recorder, self.metrics = ledger, recorder, metrics
        self.clock, self.on_event = clock, on_event
        self._empty = 0

    async def train(self) -> WeightsId:
        """All steps; returns the id of the last weights."""
        try:
            weights_id, published = await self.publish(step=0, enabler=None)
            await self.evaluate(step=0)
            for step in range(1, self.run.steps + 1):
                weights_id, published = await self.step(step, published)
                if self._evaluates_after(step):
                    await self.evaluate(step)
            return weights_id
        except BaseException as error:
            cancel(self.collector, f"the run ended: {type(error).__name__}")
            raise

    async def step(self, step: int, published: Span) -> tuple[WeightsId, Span]:
        """Collect, learn, publish, commit: one step of the run."""
        started, cpu = self.clock.now(), cpu_seconds()
        collected = await self.collector.step(published)
        self.refuse_without_outcomes(collected)
        learned, trained = await self.learn(collected)
        weights_id, published = await self.publish(step, enabler=trained)
        saving = self.clock.now()
        self.commit(collected, learned, weights_id)
        timing = Timing(
            started=started,
            trained=(trained.t_start, trained.t_end),
            published=(published.t_start, published.t_end),
            saved=(saving, self.clock.now()),
            cpu_s=cpu_seconds() - cpu,
            peak_mib=peak_mib(),
        )
        event = step_event(collected, learned, weights_id, timing)
        self.metrics.write(event)
        self.on_event(event)
        return weights_id, published

    async def publish(self, step: int, enabler: Span | None) -> tuple[WeightsId, Span]:
        """Give the trainer's weights an id and have the engine serve them."""
        with self.recorder.span("sync", enabler=enabler, enabler_type="data", step=step) as span:
            weights_id = await self.thread.run(lambda: self.identity.of(self.trainer.export()))
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
                where="reward",
                fix=f"see {self.run.dir}/faults.jsonl",
            )

    async def learn(self, collected: Collected) -> tuple[Learned, Span]:
        """Groups to batches, each one forward-backward and one optimizer step."""
        enabler = collected.last_span
        with self.recorder.span("train", enabler=enabler, enabler_type="data", step=collected.step) as span:
            batches = [
                await self._anchored(b) for b in self.algorithm.minibatches(collected.groups, collected.step)
            ]
            stats, steps = [], []
            for batch in batches:
                if batch.stats.get("tokens", 0) > 0:
                    stats.append(await self.thread.run(self.trainer.forward_backward, batch))
                    steps.append(await self.thread.run(self.trainer.step, collected.step))
            span.work(tokens=sum(s.tokens_computed for s in stats), rollouts=len(collected.rollouts))
        return Learned(stats=tuple(stats), steps=tuple(steps), batches=tuple(batches)), span

    async def _anchored(self, batch: Batch) -> Batch:
        """With the trainer's own log-probs, and the reference's, where the algorithm divides by them."""
        samples: Sequence[Sample] = batch.samples
        if self.algorithm.recompute_anchor:
            found = await self.thread.run(self.trainer.logprobs, samples)
            samples = [msgspec.structs.replace(s, anchor_S=a) for s, a in zip(samples, found, strict=True)]
        if self.algorithm.needs_reference:
            found = await self.thread.run(self.trainer.reference_logprobs, samples)
            samples = [msgspec.structs.replace(s, reference_S=r) for s, r in zip(samples, found, strict=True)]
        return msgspec.structs.replace(batch, samples=tuple(samples))

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
        advantages = learned.advantages
        for rollout in collected.rollouts:
            self.recorder.rollout(rollout, advantage=advantages.get(rollout.id))
        self.recorder.flush()

    def _evaluates_after(self, step: int) -> bool:
        every = self.run.loop.eval_every
        return step == self.run.steps or (every > 0 and step % every == 0)

    async def evaluate(self, step: int) -> None:
        """pass@1 on the held-out tasks, where there are any."""
        if self.evaluation is None:
            return
        event = {"event": "eval", "step": step, **await self.evaluation.measure(step)}
        self.metrics.write(event)
        self.on_event(event)

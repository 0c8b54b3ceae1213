"""The RL loop: publish, collect, learn, commit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from croze.clock import Clock
from croze.inference.protocol import Engine
from croze.loop.collect import Collected, Collector, cancel
from croze.loop.decisions import Committed, Final, Settled
from croze.loop.evaluation import Evaluation
from croze.loop.ledger import Ledger, StepCommit
from croze.loop.usage import cpu_seconds, resident_mib
from croze.models.device import ComputeThread
from croze.run import Run
from croze.sync.identity import Identity
from croze.trace.metrics import JsonLines
from croze.trace.recorder import Recorder, Span
from croze.train.protocol import Algorithm, StepStats, Trainer, TrainStats
from croze.types import Batch, Rollout, Sample, WeightsId

OnEvent = Callable[[dict[str, Any]], None]


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's optimizer batches did; ``first`` is the batch before any update: its gap is on-policy."""

    stats: tuple[TrainStats, ...]
    steps: tuple[StepStats, ...]
    batches: tuple[Batch, ...]


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

    async def train(self) -> WeightsId:
        """All steps; returns the id of the last weights."""
        weights_id, published = await self.publish(step=0, enabler=None)
        await self.evaluate(step=0)
        for step in range(1, self.run.steps + 1):
            started, cpu = self.clock.now(), cpu_seconds()
            collected = await self.collect(published)
            learned, trained = await self.learn(collected)
            weights_id, published = await self.publish(step, enabler=trained)
            self.commit(collected, learned, weights_id)
            self.report(collected, learned, weights_id, started, cpu, trained, published)
            if self._evaluates_after(step):
                await self.evaluate(step)
        return weights_id

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

    async def collect(self, published: Span) -> Collected:
        """The next step's rollouts, judged."""
        try:
            return await self.collector.step(published)
        except BaseException as error:
            cancel(self.collector, f"the run ended: {type(error).__name__}")
            raise

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
        untrained = frozenset(g.id for g in collected.groups) - learned_groups(learned.batches)
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
        self.ledger.counts()
        self.collector.decisions.counts()
        advantages = _advantages(learned.batches)
        for rollout in collected.rollouts:
            self.recorder.rollout(rollout, advantage=advantages.get(rollout.id))

    def report(
        self,
        collected: Collected,
        learned: Learned,
        weights_id: WeightsId,
        started: float,
        cpu: float,
        trained: Span,
        published: Span,
    ) -> None:
        """One line of figures, to the metrics file and to whoever listens."""
        first = learned.stats[0] if learned.stats else None
        scores = valid_scores(collected.rollouts)
        tokens = sum(r.generated for r in collected.rollouts)
        spent = cpu_seconds() - cpu
        saving = self.clock.now()
        self.recorder.flush()
        event = {
            "event": "step",
            "step": collected.step,
            "reward_mean": float(np.mean(scores)) if scores else None,
            "reward_std": float(np.std(scores)) if scores else None,
            "kl_rollout": first.kl_rollout if first else None,
            "max_logprob_gap": first.max_logprob_gap if first else None,
            "tokens": tokens,
            "tokens_per_cpu_s": tokens / spent if spent > 0 else None,
            "cpu_s": spent,
            "step_s": self.clock.now() - started,
            "phase_s": {
                "generate": collected.generated_at - started,
                "reward": max(0.0, collected.judged_at - collected.generated_at),
                "train": trained.t_end - trained.t_start,
                "sync": published.t_end - published.t_start,
                "save": self.clock.now() - saving,
            },
            "valid": len(scores) / len(collected.rollouts) if collected.rollouts else 0.0,
            "infra_faults": collected.infra_faults,
            "groups": self.run.groups_per_step,
            "groups_trained": len(learned_groups(learned.batches)),
            "loss": sum(s.loss for s in learned.stats),
            "grad_norm": learned.steps[0].grad_norm if learned.steps else None,
            "lr": learned.steps[-1].lr if learned.steps else None,
            "tokens_computed": sum(s.tokens_computed for s in learned.stats),
            "reply_tokens_mean": tokens / max(len(collected.rollouts), 1),
            "rss_mib": resident_mib(),
            "weights_id": weights_id,
        }
        self.metrics.write(event)
        self.on_event(event)

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


def valid_scores(rollouts: Sequence[Rollout]) -> list[float]:
    """Scores of valid rollouts; the others have none."""
    return [r.outcome.score for r in rollouts if r.outcome is not None and r.outcome.valid]


def learned_groups(batches: Sequence[Batch]) -> set[str]:
    """Ids of the groups that have a sample in the loss."""
    return {s.group_id for b in batches for s in b.samples}


def _advantages(batches: Sequence[Batch]) -> dict[str, float]:
    found = {}
    for sample in (s for b in batches for s in b.samples):
        trained = sample.advantages_S[sample.mask_S]
        if len(trained):
            found[sample.rollout_id] = float(trained[0])
    return found

"""Learning from a step's groups: optimizer batches, each one forward-backward and one update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from croze.loop.figures import Learned
from croze.models.device import ComputeThread
from croze.train.protocol import Algorithm, Trainer, TrainStats
from croze.types import Batch, Group, Sample

Look = Callable[[Batch, TrainStats], None]
"""Sees a batch between its backward pass and its update; called on the compute thread."""


class Learning:
    """What a step does with its groups. The live loop and a replay go through it alike."""

    def __init__(
        self, trainer: Trainer, algorithm: Algorithm, thread: ComputeThread, look: Look | None = None
    ) -> None:
        self.trainer, self.algorithm, self.thread, self.look = trainer, algorithm, thread, look

    async def learn(self, groups: Sequence[Group], step: int) -> Learned:
        """All updates of ``step``; a batch that measured nothing makes none."""
        batches = [await self._anchored(b) for b in self.algorithm.minibatches(groups, step)]
        stats, steps = [], []
        for batch in batches:
            if batch.stats.get("tokens", 0) > 0:
                stats.append(await self.thread.run(self.trainer.forward_backward, batch))
                if self.look is not None:
                    await self.thread.run(self.look, batch, stats[-1])
                steps.append(await self.thread.run(self.trainer.step, step))
        return Learned(stats=tuple(stats), steps=tuple(steps), batches=tuple(batches))

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

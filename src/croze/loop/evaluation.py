"""How good the served weights are on held-out tasks: pass@k with an interval."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from croze.loop.collect import Judges
from croze.loop.passk import summarize
from croze.rollout.groups import Attempt, Generator
from croze.types import Outcome, Task

PASS = 1.0
"""A rollout passes with at least this score."""


class Evaluation:
    """Samples every held-out task ``samples`` times and judges the replies; nothing of it is trained."""

    def __init__(
        self, tasks: Sequence[Task], generator: Generator, judge: Judges, *, samples: int = 1
    ) -> None:
        self.tasks, self.generator, self.judge, self.samples = tasks, generator, judge, samples

    async def measure(self, step: int) -> dict[str, Any]:
        """reward_mean over valid rollouts; pass_at_1 with its 95 % interval low..high; for K samples a task also
        pass_at_K with low_at_K..high_at_K.

        A rollout passes with a score of 1 or more. None where nothing valid was left to measure.
        """
        judged = await asyncio.gather(*(self._task(i, task, step) for i, task in enumerate(self.tasks)))
        valid = [[o for o in outcomes if o.valid] for outcomes in judged]
        scores = [o.score for outcomes in valid for o in outcomes]
        result: dict[str, Any] = {
            "tasks": len(self.tasks),
            "samples": self.samples,
            "invalid": sum(map(len, judged)) - len(scores),
            "reward_mean": sum(scores) / len(scores) if scores else None,
            "k": self.samples,
        }
        for k in sorted({1, self.samples}):
            counts = [(len(o), sum(x.score >= PASS for x in o)) for o in valid if len(o) >= k]
            found = summarize(counts, k) if counts else None
            result[f"pass_at_{k}"] = found.estimate if found else None
            suffix = "" if k == 1 else f"_at_{k}"
            result[f"low{suffix}"] = found.low if found else None
            result[f"high{suffix}"] = found.high if found else None
        return result

    async def _task(self, index: int, task: Task, step: int) -> list[Outcome]:
        attempts = [
            Attempt(f"eval{step}.{index}.{i}", f"eval{step}.{index}", i, 0, index << 16 | i)
            for i in range(self.samples)
        ]
        rollouts = [r async for r in self.generator.run(task, attempts, step)]
        if self.judge.batched:
            return await self.judge.judge(rollouts)
        judged = await asyncio.gather(*(self.judge.judge([r]) for r in rollouts))
        return [outcome for outcomes in judged for outcome in outcomes]

"""Siblings of one task generated together: one prompt, one request, each rollout handed on as it ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from croze.clock import Clock
from croze.config import Sampling
from croze.errors import TasksError
from croze.inference.protocol import Engine, Request, SamplingParams
from croze.models.protocol import Tokenizer
from croze.rollout.session import Session, reply_text
from croze.types import Rollout, Task


@dataclass(frozen=True, slots=True)
class Attempt:
    """One sibling to be generated. ``key`` selects its random stream."""

    rollout_id: str
    group_id: str
    member: int
    attempt: int
    key: int


def render(task: Task, tokenizer: Tokenizer, context: int) -> list[int]:
    """A task's prompt as tokens; raises TasksError when it leaves no room for a reply in ``context`` tokens."""
    ids = tokenizer.render(task.prompt)
    if not ids:
        raise TasksError("the prompt is empty", where=f"task {task.id}", fix="give every task a prompt")
    if len(ids) >= context:
        raise TasksError(
            f"the prompt has {len(ids)} tokens, the model's context {context}",
            where=f"task {task.id}",
            fix="shorten the prompt, leave such tasks out, or choose a model with a longer context",
        )
    return ids


class Generator:
    """Single-turn rollouts on an engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        sampling: Sampling,
        *,
        seed: int,
        context: int,
        clock: Clock,
    ) -> None:
        self.engine, self.tokenizer, self.sampling, self.clock = engine, tokenizer, sampling, clock
        self.context = context
        self.params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
            stop_ids=tokenizer.eos_ids,
            seed=seed,
        )

    async def run(
        self, task: Task, attempts: Sequence[Attempt], step: int, prompt: list[int] | None = None
    ) -> AsyncGenerator[Rollout, None]:
        """Rollouts of ``attempts``, each as soon as it has ended. ``prompt``: the task's, rendered before."""
        prompt = render(task, self.tokenizer, self.context) if prompt is None else prompt
        sessions = [Session(prompt) for _ in attempts]
        start = self.clock.now()
        request = Request(
            id=attempts[0].rollout_id,
            prompt_P=np.array(prompt, np.int32),
            keys=tuple(a.key for a in attempts),
            params=self.params,
        )
        async with aclosing(self.engine.generate(request)) as chunks:
            async for chunk in chunks:
                session, a = sessions[chunk.sibling], attempts[chunk.sibling]
                session.take(chunk)
                if session.finish is not None:
                    yield session.rollout(
                        rollout_id=a.rollout_id,
                        group_id=a.group_id,
                        member=a.member,
                        attempt=a.attempt,
                        task=task,
                        step=step,
                        reply=reply_text(self.tokenizer, session.sampled, self.sampling.stop),
                        t_start=start + session.waited_s,
                        t_end=self.clock.now(),
                    )

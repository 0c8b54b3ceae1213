"""A rollout's token record. Every way to roll out generates through it; nothing is tokenised twice."""

from __future__ import annotations

import numpy as np

from croze.errors import EngineFault
from croze.inference.protocol import Chunk
from croze.models.protocol import Tokenizer
from croze.types import Finish, Rollout, Task, Turn, WeightsId, WeightsSpan


class Session:
    """Collects one attempt's tokens: what was given, what was sampled, under which weights."""

    def __init__(self, prompt_ids: list[int]) -> None:
        self.prompt_tokens = len(prompt_ids)
        self._ids = list(prompt_ids)
        self._logprobs = [float("nan")] * len(prompt_ids)
        self._mask = [False] * len(prompt_ids)
        self._turns = [Turn(producer="prompt", start=0, end=len(prompt_ids))]
        self._weights: list[tuple[int, int, WeightsId]] = []
        self.finish: Finish | None = None
        self.waited_s = 0.0
        """Seconds it was held back because the engine was full."""

    def take(self, chunk: Chunk) -> None:
        """Append what the engine sampled."""
        if self.finish is not None:
            raise EngineFault("tokens came after a sibling's end", where=f"request {chunk.request_id}")
        start, count = len(self._ids), len(chunk.ids_T)
        self.waited_s = max(self.waited_s, chunk.waited_s)
        self._ids += chunk.ids_T.tolist()
        self._logprobs += chunk.logprobs_T.tolist()
        self._mask += [True] * count
        if count:
            if self._weights and self._weights[-1][1:] == (start, chunk.weights_id):
                self._weights[-1] = (self._weights[-1][0], start + count, chunk.weights_id)
            else:
                self._weights.append((start, start + count, chunk.weights_id))
        if chunk.finish is not None:
            self.finish = chunk.finish
            begin = self._turns[-1].end
            self._turns.append(Turn(producer="model", start=begin, end=len(self._ids), finish=chunk.finish))

    @property
    def sampled(self) -> list[int]:
        """Ids of the model's last turn."""
        return self._ids[self._turns[-1].start :] if self._turns[-1].producer == "model" else []

    def rollout(
        self,
        *,
        rollout_id: str,
        group_id: str,
        member: int,
        attempt: int,
        task: Task,
        step: int,
        reply: str,
        t_start: float,
        t_end: float,
    ) -> Rollout:
        """The finished record."""
        assert self.finish is not None, "the session has not ended"
        return Rollout(
            id=rollout_id,
            group_id=group_id,
            member=member,
            attempt=attempt,
            task=task,
            step=step,
            prompt_tokens=self.prompt_tokens,
            ids_T=np.array(self._ids, np.int32),
            logprobs_T=np.array(self._logprobs, np.float32),
            mask_T=np.array(self._mask, bool),
            turns=tuple(self._turns),
            weights=tuple(WeightsSpan(start=a, end=b, weights_id=w) for a, b, w in self._weights),
            finish=self.finish,
            reply=reply,
            waited_s=self.waited_s,
            t_start=t_start,
            t_end=t_end,
        )


def reply_text(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...]) -> str:
    """The reply as rewards see it: without special tokens, cut before the first stop string."""
    text = tokenizer.decode(ids)
    cuts = [at for s in stop if (at := text.find(s)) >= 0]
    return text[: min(cuts)] if cuts else text

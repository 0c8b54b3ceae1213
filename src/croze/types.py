"""The data that flows: Run -> Rollout -> Outcome -> Group -> Sample -> Batch -> step -> WeightsId.

Every type is a frozen struct; arrays are numpy, never torch. Suffixes name dimensions: ``_T`` one token
record (prompt included), ``_S`` the tokens after a group's shared prompt, ``_P`` that prompt.
"""

from __future__ import annotations

from typing import Any, Literal, NewType

import msgspec
import numpy as np

WeightsId = NewType("WeightsId", str)
"""Content identity of a set of weights: equal ids mean equal tensors (invariant 3)."""

Fault = Literal["none", "policy", "infra", "unknown"]
"""Whose fault an attempt's end was: the model's own (policy) is scored, infra and unknown never are."""

Finish = Literal["stop", "length", "context", "aborted"]
"""Why generation ended: a stop token or string; max_tokens; the context's end; aborted."""

RolloutState = Literal["running", "finished", "trained", "filtered", "stale", "failed", "cancelled"]
"""The first two are in flight; the rest are final (invariant 2)."""

Producer = Literal["prompt", "model", "tool", "template"]

Prompt = str | list[dict[str, Any]]


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the task source. ``id`` is stable for a seed; ``columns`` reach rewards by name."""

    id: str
    prompt: Prompt
    columns: dict[str, Any] = msgspec.field(default_factory=dict)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What judging said. ``score`` counts only when ``valid``; an infra fault is never a score.

    ``parts`` are named components of the score, ``turns`` one such dict per turn where a reward gives them.
    """

    score: float = 0.0
    valid: bool = True
    fault: Fault = "none"
    parts: dict[str, float] = msgspec.field(default_factory=dict)
    turns: tuple[dict[str, float], ...] = ()
    message: str = ""

    def __post_init__(self) -> None:
        if self.valid and self.fault in ("infra", "unknown"):
            raise ValueError(f"an outcome with fault={self.fault!r} cannot be valid")


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A span ``[start, end)`` of a rollout's token record and who produced it."""

    producer: Producer
    start: int
    end: int
    finish: Finish | None = None


class WeightsSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens ``[start, end)`` of a record were produced under ``weights_id``."""

    start: int
    end: int
    weights_id: WeightsId


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at a task, as tokens. Text is derived from tokens, never the reverse.

    ids_T int32; logprobs_T float32 (natural log, NaN where not sampled); mask_T bool (trained tokens).
    ``logprobs_kind`` marks whether temperature was applied ("processed") or not ("raw"). Clock seconds:
    ``t_start`` when the engine had room for it, which it waited for ``waited_s``; ``t_end`` at its last token.
    """

    id: str
    group_id: str
    member: int
    attempt: int
    task: Task
    step: int
    prompt_tokens: int
    ids_T: np.ndarray
    logprobs_T: np.ndarray
    mask_T: np.ndarray
    turns: tuple[Turn, ...]
    weights: tuple[WeightsSpan, ...]
    finish: Finish
    reply: str
    logprobs_kind: Literal["raw", "processed"] = "processed"
    outcome: Outcome | None = None
    waited_s: float = 0.0
    t_start: float = 0.0
    t_end: float = 0.0

    @property
    def generated(self) -> int:
        """Tokens the model sampled."""
        return int(self.mask_T.sum())

    def judged(self, outcome: Outcome) -> Rollout:
        return msgspec.structs.replace(self, outcome=outcome)


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Siblings: attempts at one task in one step. Keyed by id, never by stride."""

    id: str
    task: Task
    step: int
    rollouts: tuple[Rollout, ...]

    @property
    def valid(self) -> tuple[Rollout, ...]:
        return tuple(r for r in self.rollouts if r.outcome is not None and r.outcome.valid)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A trainable token sequence with all that the loss needs, one value per suffix token.

    prompt_P int32, shared by the group; ids_S int32; mask_S bool (True: trained); logprobs_S float32 (the
    sampler's, 0 where not sampled); advantages_S float32; weights_S float32 (the loss normaliser, fixed over
    the optimizer batch; 0 where masked); anchor_S / reference_S float32 log-probs or None.
    """

    rollout_id: str
    group_id: str
    prompt_P: np.ndarray
    ids_S: np.ndarray
    mask_S: np.ndarray
    logprobs_S: np.ndarray
    advantages_S: np.ndarray
    weights_S: np.ndarray
    anchor_S: np.ndarray | None = None
    reference_S: np.ndarray | None = None

    @property
    def tokens(self) -> int:
        return len(self.prompt_P) + len(self.ids_S)


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one optimizer step. ``stats`` are the algorithm's own figures about them."""

    step: int
    samples: tuple[Sample, ...]
    stats: dict[str, float] = msgspec.field(default_factory=dict)

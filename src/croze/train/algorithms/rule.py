"""What one algorithm decides: advantages, how log-ratios are pooled, the objective. The rest is shared.

A rule is put together from such parts; those of the built-in algorithms are here and in ``croze.train.advantages``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from croze.train.advantages import Advantages


class Tokens(Protocol):
    """Which sequence each token belongs to, and whether it is trained; see ``LossInputs``."""

    @property
    def mask_N(self) -> torch.Tensor: ...

    @property
    def sequence_N(self) -> torch.Tensor: ...

    @property
    def sequences(self) -> int: ...


class Objective(Protocol):
    """The per-token objective."""

    def __call__(
        self, ratio_N: torch.Tensor, logprobs_N: torch.Tensor, advantages_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The per-token objective to maximise, and (bool) where the clip binds."""
        ...


class Rule(Protocol):
    """An algorithm in the sense of its paper. Implementations are frozen and hold only their own parts.

    Made by a factory in the entry point group ``croze.train.algorithms``, which is called with the ``Algo`` options.
    """

    @property
    def name(self) -> str: ...

    @property
    def options(self) -> tuple[str, ...]:
        """Which of ``advantage_std`` and ``group_baseline`` it reads; others are refused when they are set."""
        ...

    @property
    def advantages(self) -> Advantages: ...

    @property
    def objective(self) -> Objective: ...

    def pooled(self, log_ratio_N: torch.Tensor, tokens: Tokens, /) -> torch.Tensor:
        """The log-ratio that applies at each token, float64: ``per_token`` or ``per_sequence``. Masked: 0."""
        ...


def per_token(log_ratio_N: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Each token's own log-ratio."""
    return log_ratio_N


def per_sequence(log_ratio_N: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """The mean over its sequence's trained tokens, at each of them; a sequence lies whole in one micro-batch."""
    zeros_Q = log_ratio_N.new_zeros(tokens.sequences)
    sums_Q = zeros_Q.index_add(0, tokens.sequence_N, log_ratio_N)
    lengths_Q = zeros_Q.index_add(0, tokens.sequence_N, (tokens.mask_N > 0).to(log_ratio_N.dtype))
    means_Q = sums_Q / lengths_Q.clamp(min=1.0)
    return means_Q.index_select(0, tokens.sequence_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clipped:
    """``min(r A, clip(r, 1 - low, 1 + high) A)`` (PPO, arXiv:1707.06347)."""

    low: float
    high: float

    def __call__(
        self, ratio_N: torch.Tensor, logprobs_N: torch.Tensor, advantages_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        plain_N = ratio_N * advantages_N
        clipped_N = ratio_N.clamp(1.0 - self.low, 1.0 + self.high) * advantages_N
        return torch.minimum(plain_N, clipped_N), clipped_N < plain_N


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedWeight:
    """``stop_gradient(clip(r, 1 - low, 1 + high)) A log pi``: the weight is clipped, never the token
    (MiniMax-M1, arXiv:2506.13585)."""

    low: float
    high: float

    def __call__(
        self, ratio_N: torch.Tensor, logprobs_N: torch.Tensor, advantages_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ratio_N = ratio_N.detach()
        weight_N = ratio_N.clamp(1.0 - self.low, 1.0 + self.high)
        return weight_N * advantages_N * logprobs_N, weight_N != ratio_N

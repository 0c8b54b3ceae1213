"""What one algorithm decides: advantages, how log-ratios are pooled, the objective. The rest is shared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Protocol

import numpy as np
import torch


class Tokens(Protocol):
    """Which sequence each token belongs to, and whether it is trained; see ``LossInputs``."""

    @property
    def mask_N(self) -> torch.Tensor: ...

    @property
    def sequence_N(self) -> torch.Tensor: ...

    @property
    def sequences(self) -> int: ...


class Rule(Protocol):
    """An algorithm in the sense of its paper. Implementations are frozen and hold only their own options."""

    name: ClassVar[str]

    @property
    def min_valid(self) -> int:
        """Fewest valid siblings a group needs; smaller groups are dropped and counted."""
        ...

    def advantages(self, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Group id -> scores [G] of its valid rollouts, to advantages of the same shape (float64)."""
        ...

    def pooled(self, log_ratio_N: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """The log-ratio that applies at each token, float64: its own, or its sequence's. Masked: 0."""
        ...

    def objective(
        self, ratio_N: torch.Tensor, logprobs_N: torch.Tensor, advantages_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The per-token objective to maximise, and (bool) where the clip binds."""
        ...


def clipped_objective(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``min(r A, clip(r, 1 - low, 1 + high) A)``, and where the clip binds (PPO, arXiv:1707.06347)."""
    plain_N = ratio_N * advantages_N
    clipped_N = ratio_N.clamp(1.0 - low, 1.0 + high) * advantages_N
    return torch.minimum(plain_N, clipped_N), clipped_N < plain_N

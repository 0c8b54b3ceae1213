"""RLOO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from croze.train.advantages import leave_one_out
from croze.train.algorithms.rule import Tokens, clipped_objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Rloo:
    """REINFORCE leave-one-out (Ahmadian et al. 2024, arXiv:2402.14740).

        A_i  = r_i - mean of r_j over the valid siblings j != i
        J_it = min(rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i)

    At the anchor rho = 1, so the gradient of the first update is the paper's ``A_i grad log pi(o_it)``; the
    clip bounds later updates of the same batch. The paper sums over a sequence: ``normalizer=constant``, up
    to a factor that is the same for every token.
    """

    name: ClassVar[str] = "rloo"
    clip_low: float
    clip_high: float

    @property
    def min_valid(self) -> int:
        return 2

    def advantages(self, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {group: leave_one_out(scores_G) for group, scores_G in scores.items()}

    def pooled(self, log_ratio_N: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return log_ratio_N

    def objective(
        self, ratio_N: torch.Tensor, logprobs_N: torch.Tensor, advantages_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return clipped_objective(ratio_N, advantages_N, self.clip_low, self.clip_high)

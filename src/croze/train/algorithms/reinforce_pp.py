"""REINFORCE++ and its variant with a group baseline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from croze.train.advantages import batch_normalised
from croze.train.algorithms.rule import Tokens, clipped_objective


@dataclass(frozen=True, slots=True, kw_only=True)
class ReinforcePlusPlus:
    """REINFORCE++ (Hu et al. 2025, arXiv:2501.03262): advantages normalised over the whole batch.

        A_i  = (r_i - mean(r)) / std(r)                        over all valid rollouts of the batch
        A_i  = (r_i - mean of i's group) / std of these        with group_baseline (REINFORCE++-baseline)
        J_it = min(rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i)

    The batch is all rollouts of the step, before it is cut into optimizer batches. Its statistics count
    rollouts, where the paper's code counts tokens (long replies would set the scale). The paper folds a k1 KL
    into the reward; here ``algo.kl`` is a k3 term of the loss. A group of one is enough, unless
    group_baseline.
    """

    name: ClassVar[str] = "reinforce++"
    clip_low: float
    clip_high: float
    group_baseline: bool = False

    @property
    def min_valid(self) -> int:
        return 2 if self.group_baseline else 1

    def advantages(self, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return batch_normalised(scores, group_baseline=self.group_baseline)

    def pooled(self, log_ratio_N: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return log_ratio_N

    def objective(
        self, ratio_N: torch.Tensor, logprobs_N: torch.Tensor, advantages_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return clipped_objective(ratio_N, advantages_N, self.clip_low, self.clip_high)

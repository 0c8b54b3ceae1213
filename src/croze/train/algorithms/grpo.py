"""GRPO, with Dr. GRPO and DAPO as choices of its options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from croze.train.advantages import group_relative
from croze.train.algorithms.rule import Tokens, clipped_objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Grpo:
    """Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300).

        A_i  = (r_i - mean(r)) / std(r)                  over a group's valid siblings i
        J_it = min(rho_it A_i, clip(rho_it, 1 - clip_low, 1 + clip_high) A_i)
        rho_it = pi(o_it) / pi_anchor(o_it)

    - GRPO as published: ``normalizer=sequence clip_high=0.2 kl=0.04``.
    - Dr. GRPO (arXiv:2503.20783): ``advantage_std=false normalizer=constant clip_high=0.2``.
    - DAPO (arXiv:2503.14476): the defaults: ``normalizer=tokens``, ``clip_high=0.28`` above ``clip_low=0.2``,
      no KL.
    """

    name: ClassVar[str] = "grpo"
    clip_low: float
    clip_high: float
    advantage_std: bool = True

    @property
    def min_valid(self) -> int:
        return 2

    def advantages(self, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {group: group_relative(scores_G, std=self.advantage_std) for group, scores_G in scores.items()}

    def pooled(self, log_ratio_N: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        return log_ratio_N

    def objective(
        self, ratio_N: torch.Tensor, logprobs_N: torch.Tensor, advantages_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return clipped_objective(ratio_N, advantages_N, self.clip_low, self.clip_high)

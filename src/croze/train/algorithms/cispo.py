"""CISPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from croze.train.advantages import group_relative
from croze.train.algorithms.rule import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo:
    """Clipped importance sampling policy optimisation (MiniMax-M1, arXiv:2506.13585).

        A_i  = (r_i - mean(r)) / std(r)
        J_it = stop_gradient(clip(rho_it, 1 - clip_low, 1 + clip_high)) A_i log pi(o_it)

    The weight is clipped, never the token: all tokens keep a gradient. The paper leaves the lower side open:
    ``clip_low=1`` (a ratio is never below 0); it normalises by all tokens: ``normalizer=tokens``.
    """

    name: ClassVar[str] = "cispo"
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
        ratio_N = ratio_N.detach()
        weight_N = ratio_N.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        return weight_N * advantages_N * logprobs_N, weight_N != ratio_N

"""GSPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from croze.train.advantages import group_relative
from croze.train.algorithms.rule import Tokens, clipped_objective


@dataclass(frozen=True, slots=True, kw_only=True)
class Gspo:
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071).

        A_i = (r_i - mean(r)) / std(r)
        s_i = exp( 1/|o_i| sum_t log(pi(o_it) / pi_anchor(o_it)) )      |o_i|: the trained tokens of i
        J_i = min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    Every trained token carries its sequence's J_i, so that with ``normalizer=sequence`` their weighted sum is
    the paper's mean of J_i. The paper clips at ``clip_low=3e-4 clip_high=4e-4``: a mean of log-ratios is far
    smaller than one token's. A sequence lies whole in one micro-batch (``LossInputs``), so the mean is always
    complete.
    """

    name: ClassVar[str] = "gspo"
    clip_low: float
    clip_high: float
    advantage_std: bool = True

    @property
    def min_valid(self) -> int:
        return 2

    def advantages(self, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {group: group_relative(scores_G, std=self.advantage_std) for group, scores_G in scores.items()}

    def pooled(self, log_ratio_N: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        zeros_Q = log_ratio_N.new_zeros(tokens.sequences)
        sums_Q = zeros_Q.index_add(0, tokens.sequence_N, log_ratio_N)
        lengths_Q = zeros_Q.index_add(0, tokens.sequence_N, (tokens.mask_N > 0).to(log_ratio_N.dtype))
        means_Q = sums_Q / lengths_Q.clamp(min=1.0)
        return means_Q.index_select(0, tokens.sequence_N)

    def objective(
        self, ratio_N: torch.Tensor, logprobs_N: torch.Tensor, advantages_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return clipped_objective(ratio_N, advantages_N, self.clip_low, self.clip_high)

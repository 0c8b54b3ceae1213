"""REINFORCE++ and its variant with a group baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from croze.config import Algo
from croze.train.advantages import BatchNormalised
from croze.train.algorithms.rule import Clipped, per_token


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
    options: ClassVar[tuple[str, ...]] = ("group_baseline",)
    advantages: BatchNormalised
    objective: Clipped
    pooled = staticmethod(per_token)

    @classmethod
    def of(cls, algo: Algo) -> ReinforcePlusPlus:
        return cls(
            advantages=BatchNormalised(group_baseline=algo.group_baseline),
            objective=Clipped(low=algo.clip_low, high=algo.clip_high),
        )

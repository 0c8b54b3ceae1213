"""RLOO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from croze.config import Algo
from croze.train.advantages import LeaveOneOut
from croze.train.algorithms.rule import Clipped, per_token


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
    options: ClassVar[tuple[str, ...]] = ()
    advantages: LeaveOneOut
    objective: Clipped
    pooled = staticmethod(per_token)

    @classmethod
    def of(cls, algo: Algo) -> Rloo:
        return cls(
            advantages=LeaveOneOut(),
            objective=Clipped(low=algo.clip_low, high=algo.clip_high),
        )

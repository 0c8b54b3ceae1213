"""GSPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from croze.config import Algo
from croze.train.advantages import GroupRelative
from croze.train.algorithms.rule import Clipped, per_sequence


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
    options: ClassVar[tuple[str, ...]] = ("advantage_std",)
    advantages: GroupRelative
    objective: Clipped
    pooled = staticmethod(per_sequence)

    @classmethod
    def of(cls, algo: Algo) -> Gspo:
        return cls(
            advantages=GroupRelative(std=algo.advantage_std),
            objective=Clipped(low=algo.clip_low, high=algo.clip_high),
        )

"""GRPO, with Dr. GRPO and DAPO as choices of its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from croze.config import Algo
from croze.train.advantages import GroupRelative
from croze.train.algorithms.rule import Clipped, per_token


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
    options: ClassVar[tuple[str, ...]] = ("advantage_std",)
    advantages: GroupRelative
    objective: Clipped
    pooled = staticmethod(per_token)

    @classmethod
    def of(cls, algo: Algo) -> Grpo:
        return cls(
            advantages=GroupRelative(std=algo.advantage_std),
            objective=Clipped(low=algo.clip_low, high=algo.clip_high),
        )

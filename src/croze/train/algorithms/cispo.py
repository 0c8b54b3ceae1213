"""CISPO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from croze.config import Algo
from croze.train.advantages import GroupRelative
from croze.train.algorithms.rule import ClippedWeight, per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class Cispo:
    """Clipped importance sampling policy optimisation (MiniMax-M1, arXiv:2506.13585).

        A_i  = (r_i - mean(r)) / std(r)
        J_it = stop_gradient(clip(rho_it, 1 - clip_low, 1 + clip_high)) A_i log pi(o_it)

    The weight is clipped, never the token: all tokens keep a gradient. The paper leaves the lower side open:
    ``clip_low=1`` (a ratio is never below 0); it normalises by all tokens: ``normalizer=tokens``.
    """

    name: ClassVar[str] = "cispo"
    options: ClassVar[tuple[str, ...]] = ("advantage_std",)
    advantages: GroupRelative
    objective: ClippedWeight
    pooled = staticmethod(per_token)

    @classmethod
    def of(cls, algo: Algo) -> Cispo:
        return cls(
            advantages=GroupRelative(std=algo.advantage_std),
            objective=ClippedWeight(low=algo.clip_low, high=algo.clip_high),
        )

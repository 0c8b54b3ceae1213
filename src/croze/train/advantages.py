"""Advantages: how much better an attempt did than its peers, one float64 value per rollout.

Sums are exact (``math.fsum``), so the values do not depend on the order of the rollouts. Scores that differ
by less than ``FLAT`` of their magnitude count as equal: dividing float noise by its own deviation would train
on noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

FLAT = 1e-9


class Advantages(Protocol):
    """What an algorithm compares an attempt with."""

    @property
    def min_valid(self) -> int:
        """Fewest valid siblings a group needs; smaller groups are dropped and counted."""
        ...

    def __call__(self, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Group id -> scores [G] of its valid rollouts, to advantages of the same shape (float64)."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRelative:
    """Each group by itself; see ``group_relative``."""

    std: bool

    @property
    def min_valid(self) -> int:
        return 2

    def __call__(self, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {group: group_relative(scores_G, std=self.std) for group, scores_G in scores.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveOneOut:
    """Each group by itself; see ``leave_one_out``."""

    @property
    def min_valid(self) -> int:
        return 2

    def __call__(self, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {group: leave_one_out(scores_G) for group, scores_G in scores.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNormalised:
    """All groups together; see ``batch_normalised``. A group of one is enough, unless it is its own baseline."""

    group_baseline: bool

    @property
    def min_valid(self) -> int:
        return 2 if self.group_baseline else 1

    def __call__(self, scores: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return batch_normalised(scores, group_baseline=self.group_baseline)


def group_relative(scores_G: np.ndarray, *, std: bool) -> np.ndarray:
    """``r_i - mean(r)``, with ``std`` divided by the group's sample standard deviation (n - 1).

    GRPO (arXiv:2402.03300, section 4.1) divides; Dr. GRPO (arXiv:2503.20783) does not. No epsilon is added,
    as in the formula: a group of equal scores has advantage 0. scores_G [G], G >= 2; returns [G].
    """
    centred_G = _centred(scores_G)
    return _standardised(centred_G) if std else centred_G


def leave_one_out(scores_G: np.ndarray) -> np.ndarray:
    """``r_i - mean of the others`` (RLOO, arXiv:2402.14740). scores_G [G], G >= 2; returns [G]."""
    siblings = len(scores_G)
    return _centred(scores_G) * (siblings / (siblings - 1))


def batch_normalised(scores: Mapping[str, np.ndarray], *, group_baseline: bool) -> dict[str, np.ndarray]:
    """``(r - mean) / std`` over every rollout of the batch (REINFORCE++, arXiv:2501.03262).

    With ``group_baseline`` each group's own mean is subtracted instead of the batch's (the mean of such
    residuals is 0), and only the deviation is the batch's. ``scores`` maps group id -> [G]; the result has
    the same shape.
    """
    if not scores:
        return {}
    if group_baseline:
        centred = [_centred(scores_G) for scores_G in scores.values()]
        flat_R = np.concatenate(centred)
    else:
        flat_R = _centred(np.concatenate(list(scores.values())))
    ends = np.cumsum([len(scores_G) for scores_G in scores.values()])[:-1]
    return dict(zip(scores, np.split(_standardised(flat_R), ends), strict=True))


def _centred(scores_G: np.ndarray) -> np.ndarray:
    scores_G = np.asarray(scores_G, dtype=np.float64)
    if float(np.ptp(scores_G)) <= FLAT * float(np.abs(scores_G).max()):
        return np.zeros_like(scores_G)
    return scores_G - math.fsum(scores_G) / len(scores_G)


def _standardised(centred_R: np.ndarray) -> np.ndarray:
    """Divide values whose mean is 0 by their sample standard deviation; all zeros stay zeros."""
    largest = float(np.abs(centred_R).max())
    if largest == 0.0:
        return centred_R
    unit_R = centred_R / largest  # squares of very small or large scores would leave the float range
    return unit_R / math.sqrt(math.fsum(unit_R**2) / (len(unit_R) - 1))

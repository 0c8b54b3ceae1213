"""How many pieces of work shared a stave while each of them ran."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Interval = tuple[float, float]
"""Start and end in seconds, the end not before the start."""


def mean_concurrency(pieces: Sequence[Interval], beside: Sequence[Interval] = ()) -> list[float]:
    """For each piece, the mean over its time of how many of ``pieces`` and ``beside`` ran, itself included.

    A piece that took no time counts those that ran at its moment.
    """
    if not pieces:
        return []
    whole = np.array([*pieces, *beside], np.float64)
    whole -= whole.min()  # sums of small times lose less
    starts, ends = np.sort(whole[:, 0]), np.sort(whole[:, 1])
    start_P, end_P = whole[: len(pieces)].T
    took = end_P - start_P
    spent = _work_until(end_P, starts, ends) - _work_until(start_P, starts, ends)
    at_once = np.searchsorted(starts, start_P, "right") - np.searchsorted(ends, start_P, "left")
    mean = np.divide(spent, took, out=at_once.astype(np.float64), where=took > 0)
    return np.clip(mean, 1.0, len(whole)).tolist()


def _work_until(at: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Seconds that all intervals (borders sorted) have run together until each of the times ``at``."""
    return _since(at, starts) - _since(at, ends)


def _since(at: np.ndarray, borders: np.ndarray) -> np.ndarray:
    passed = np.searchsorted(borders, at, "right")
    return at * passed - np.concatenate([[0.0], np.cumsum(borders)])[passed]

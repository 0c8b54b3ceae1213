"""pass@k with an interval, from samples that are clustered by task."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec


class PassK(msgspec.Struct, frozen=True, kw_only=True):
    """An estimate of pass@k in [0, 1] with a confidence interval over tasks."""

    k: int
    estimate: float
    low: float
    high: float
    tasks: int
    samples: int


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Chance that at least one of k samples of a task passes: 1 - C(n - c, k) / C(n, k).

    Unbiased for n >= k samples of which c passed: Chen et al. 2021, "Evaluating Large Language Models Trained
    on Code", eq. 1; in whole numbers, so the result is correctly rounded.
    """
    if not 0 <= passed <= samples or not 1 <= k <= samples:
        raise ValueError(
            f"pass@{k} needs 0 <= passed <= samples and 1 <= k <= samples, got {passed} of {samples}"
        )
    ways = math.comb(samples, k)
    return (ways - math.comb(samples - passed, k)) / ways


def summarize(counts: Sequence[tuple[int, int]], k: int = 1, confidence: float = 0.95) -> PassK:
    """Mean pass@k over tasks, each given as (samples, passed), with a Wilson interval for clustered samples.

    The variance of the mean is taken between tasks, so that alike samples of one task do not count as
    independent. The interval is Wilson's (1927) for as many independent trials as have this variance (the
    effective sample size of Korn and Graubard 1998), at Student's t since tasks may be few. At most all
    samples count as trials; at a rate of 0 or 1, where no variance is seen, only the tasks do.
    """
    from scipy.special import ndtri, stdtrit  # quantiles; scipy.stats would take 46 MiB more

    if not counts:
        raise ValueError("pass@k of no tasks")
    values = [pass_at_k(samples, passed, k) for samples, passed in counts]
    tasks, samples = len(values), sum(n for n, _ in counts)
    mean = math.fsum(values) / tasks
    trials = _effective_trials(values, mean, samples)
    spread = tasks > 1 and 0.0 < mean < 1.0
    tail = 0.5 + confidence / 2
    z = float(stdtrit(tasks - 1, tail) if spread else ndtri(tail))
    low, high = wilson(mean, trials, z)
    return PassK(k=k, estimate=mean, low=low, high=high, tasks=tasks, samples=samples)


def wilson(rate: float, trials: float, z: float) -> tuple[float, float]:
    """The Wilson score interval of a rate seen in ``trials`` independent trials, at ``z`` standard errors."""
    scale = 1.0 + z * z / trials
    center = (rate + z * z / (2 * trials)) / scale
    half = z * math.sqrt(rate * (1 - rate) / trials + z * z / (4 * trials * trials)) / scale
    return max(0.0, center - half), min(1.0, center + half)


def _effective_trials(values: Sequence[float], mean: float, samples: int) -> float:
    tasks = len(values)
    spread = math.fsum((v - mean) ** 2 for v in values)
    if tasks == 1 or mean in (0.0, 1.0):
        return float(tasks)
    if spread == 0.0:
        return float(samples)
    return min(float(samples), mean * (1 - mean) * tasks * (tasks - 1) / spread)

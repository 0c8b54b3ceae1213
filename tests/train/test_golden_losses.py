"""Every algorithm and option against a float64 reference after the papers: plain loops, no tensors.

The reference differentiates by central differences; what a paper puts under stop-gradient is held fixed.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np
import pytest
from algorithm_cases import Case, evaluate, make_group, random_case

from croze.config import Algo, Sampling
from croze.train.algorithms import build

MAX_TOKENS = 16

RECIPES = {
    "grpo": Algo(normalizer="sequence", clip_high=0.2, kl=0.04),
    "dr_grpo": Algo(advantage_std=False, normalizer="constant", clip_high=0.2),
    "dapo": Algo(),
    "grpo_entropy": Algo(normalizer="sequence", entropy=0.01),
    "grpo_recomputed": Algo(anchor="recomputed"),
    "grpo_truncated": Algo(anchor="recomputed", importance="truncate", importance_cap=1.1),
    "grpo_masked": Algo(anchor="recomputed", importance="mask", importance_cap=1.1, kl=0.1),
    "rloo": Algo(name="rloo", normalizer="constant"),
    "rloo_kl_entropy": Algo(name="rloo", normalizer="sequence", kl=0.05, entropy=0.02),
    "reinforce++": Algo(name="reinforce++"),
    "reinforce++_sequence_kl": Algo(name="reinforce++", normalizer="sequence", kl=0.01),
    "reinforce++_baseline": Algo(name="reinforce++", group_baseline=True),
    "gspo": Algo(name="gspo", normalizer="sequence", clip_low=0.05, clip_high=0.07),
    "gspo_tokens_dr": Algo(name="gspo", advantage_std=False, clip_low=0.05, clip_high=0.07, kl=0.02),
    "gspo_truncated": Algo(
        name="gspo", normalizer="sequence", anchor="recomputed", importance="truncate", importance_cap=1.02
    ),
    "cispo": Algo(name="cispo", clip_low=1.0, clip_high=0.2),
    "cispo_low": Algo(name="cispo", clip_low=0.1, clip_high=0.1, kl=0.02),
    "cispo_masked": Algo(name="cispo", anchor="recomputed", importance="mask", importance_cap=1.1),
}


@dataclass
class Attempt:
    """One valid rollout as the papers see it: a reward, and per response token its log-probs, as floats."""

    id: str
    reward: float
    places: list[int]
    now: list[float]
    old: list[float]
    sampler: list[float]
    reference: list[float]
    entropy: list[float]


def read(case: Case, algo: Algo) -> list[list[Attempt]]:
    groups = []
    for group in case.groups:
        attempts = []
        for r in group.rollouts:
            if r.outcome is None or not r.outcome.valid:
                continue
            places = [t for t in range(len(r.ids_T) - r.prompt_tokens) if r.mask_T[r.prompt_tokens + t]]

            def pick(array: np.ndarray, places: list[int] = places) -> list[float]:
                return [float(array[t]) for t in places]

            sampler = pick(r.logprobs_T[r.prompt_tokens :])
            old = sampler if algo.anchor == "rollout" else pick(case.anchor[r.id])
            now, ref, entropy = pick(case.current[r.id]), pick(case.reference[r.id]), pick(case.entropy[r.id])
            attempts.append(Attempt(r.id, r.outcome.score, places, now, old, sampler, ref, entropy))
        fewest = 1 if algo.name == "reinforce++" and not algo.group_baseline else 2
        if len(attempts) >= fewest:
            groups.append(attempts)
    return groups


def advantages(groups: list[list[Attempt]], algo: Algo) -> dict[str, float]:
    result: dict[str, float] = {}
    if algo.name == "reinforce++":
        shaped = {
            a.id: a.reward - (statistics.fmean(b.reward for b in g) if algo.group_baseline else 0.0)
            for g in groups
            for a in g
        }
        mean, deviation = statistics.fmean(shaped.values()), statistics.stdev(shaped.values())
        return {i: (value - mean) / deviation for i, value in shaped.items()}
    for g in groups:
        for a in g:
            if algo.name == "rloo":
                others = [b.reward for b in g if b is not a]
                result[a.id] = a.reward - sum(others) / len(others)
            else:
                rewards = [b.reward for b in g]
                result[a.id] = a.reward - statistics.fmean(rewards)
                if algo.advantage_std:
                    deviation = statistics.stdev(rewards)
                    result[a.id] = result[a.id] / deviation if deviation > 0 else 0.0
    return result


def corrections(a: Attempt, algo: Algo) -> list[float]:
    """Importance weights of the recomputed policy against the sampler, constants of the loss."""
    if algo.importance == "none":
        return [1.0] * len(a.now)
    logs = [old - sampler for old, sampler in zip(a.old, a.sampler, strict=True)]
    if algo.name == "gspo":
        logs = [sum(logs) / len(logs)] * len(logs)
    weights = [math.exp(x) for x in logs]
    if algo.importance == "truncate":
        return [min(w, algo.importance_cap) for w in weights]
    return [w if w <= algo.importance_cap else 0.0 for w in weights]


def objective(a: Attempt, advantage: float, algo: Algo) -> list[float]:
    """J_it of one rollout; ``a.now`` is the variable."""
    low, high = 1 - algo.clip_low, 1 + algo.clip_high
    ratios = [math.exp(now - old) for now, old in zip(a.now, a.old, strict=True)]
    if algo.name == "gspo":
        likelihood = math.prod(ratios) ** (1 / len(ratios))
        return [min(likelihood * advantage, sorted((low, likelihood, high))[1] * advantage)] * len(ratios)
    return [min(r * advantage, sorted((low, r, high))[1] * advantage) for r in ratios]


def cispo_objective(a: Attempt, fixed: Attempt, advantage: float, algo: Algo) -> list[float]:
    """CISPO's J_it; the clipped weight is taken at ``fixed``, which a derivative does not move."""
    low, high = 1 - algo.clip_low, 1 + algo.clip_high
    weights = [
        sorted((low, math.exp(now - old), high))[1] for now, old in zip(fixed.now, fixed.old, strict=True)
    ]
    return [w * advantage * now for w, now in zip(weights, a.now, strict=True)]


def share(a: Attempt, fixed: Attempt, advantage: float, algo: Algo, rollouts: int, tokens: int) -> float:
    """What one rollout adds to the loss."""
    gains = (
        cispo_objective(a, fixed, advantage, algo) if algo.name == "cispo" else objective(a, advantage, algo)
    )
    total = 0.0
    for t, (gain, correction) in enumerate(zip(gains, corrections(a, algo), strict=True)):
        kl = math.exp(a.reference[t] - a.now[t]) - (a.reference[t] - a.now[t]) - 1
        total += correction * gain - algo.kl * kl + algo.entropy * a.entropy[t]
    divisor = {"tokens": tokens, "sequence": rollouts * len(a.now), "constant": rollouts * MAX_TOKENS}
    return -total / divisor[algo.normalizer]


def reference_loss(case: Case, algo: Algo) -> tuple[float, dict[str, np.ndarray]]:
    groups = read(case, algo)
    by_id = advantages(groups, algo)
    attempts = [a for g in groups for a in g]
    tokens = sum(len(a.now) for a in attempts)
    loss, gradients, h = 0.0, {}, 1e-6
    for a in attempts:
        loss += share(a, a, by_id[a.id], algo, len(attempts), tokens)
        gradient = np.zeros(len(case.current[a.id]))
        for i, place in enumerate(a.places):
            sides = []
            for sign in (1, -1):
                moved = Attempt(**{**vars(a), "now": [x + sign * h * (i == j) for j, x in enumerate(a.now)]})
                sides.append(share(moved, a, by_id[a.id], algo, len(attempts), tokens))
            gradient[place] = (sides[0] - sides[1]) / (2 * h)
        gradients[a.id] = gradient
    return loss, gradients


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("recipe", RECIPES)
def test_loss_and_gradient_equal_the_papers_formula(recipe: str, seed: int) -> None:
    algo = RECIPES[recipe]
    case = random_case(seed)
    algorithm = build(algo, Sampling(max_tokens=MAX_TOKENS))
    (batch,) = algorithm.minibatches(case.groups, step=1)
    ours = evaluate(algorithm, batch, case)
    loss, gradients = reference_loss(case, algo)
    largest = max(float(np.abs(g).max()) for g in gradients.values())
    assert largest > 1e-4, "a case without a gradient shows nothing"
    assert ours.loss == pytest.approx(loss, rel=1e-6, abs=1e-7)
    for rollout_id, gradient in gradients.items():
        got = ours.gradients.get(rollout_id, np.zeros_like(gradient))  # a skipped group has no sample
        np.testing.assert_allclose(got, gradient, rtol=1e-5, atol=1e-6 * largest, err_msg=rollout_id)
    assert set(ours.gradients) <= set(gradients)


@pytest.mark.parametrize("recipe", ["grpo_entropy", "rloo_kl_entropy"])
def test_entropy_gradient_is_minus_its_weight_over_the_denominator(recipe: str) -> None:
    algo = RECIPES[recipe]
    case = random_case(0)
    algorithm = build(algo, Sampling(max_tokens=MAX_TOKENS))
    (batch,) = algorithm.minibatches(case.groups, step=1)
    ours = evaluate(algorithm, batch, case)
    attempts = [a for g in read(case, algo) for a in g]
    for a in attempts:
        wanted = np.zeros(len(case.entropy[a.id]))
        wanted[a.places] = -algo.entropy / (len(attempts) * len(a.now))
        np.testing.assert_allclose(ours.entropy_gradients[a.id], wanted, rtol=1e-6)


def test_the_cases_clip_and_cut_on_every_side() -> None:
    """The golden cases mean little unless the clip and the cap bind somewhere."""
    for recipe in ("dapo", "gspo", "cispo", "cispo_low", "grpo_truncated", "grpo_masked", "gspo_truncated"):
        algo = RECIPES[recipe]
        algorithm = build(algo, Sampling(max_tokens=MAX_TOKENS))
        figures = [
            evaluate(algorithm, batch, case).figures
            for case in map(random_case, range(4))
            for batch in algorithm.minibatches(case.groups, step=1)
        ]
        tokens = sum(f["tokens"] for f in figures)
        assert 0 < sum(f["clipped_tokens"] for f in figures) < tokens, recipe
        if algo.importance != "none":
            assert 0 < sum(f["importance_cut_tokens"] for f in figures) < tokens, recipe


def test_values_worked_out_by_hand() -> None:
    """Rewards 1 and 0, two tokens each, log-prob -1, on policy: every ratio is 1."""
    group = make_group("g", [1.0, 0.0])
    ones = {"g/0": np.full(2, -1.0, np.float32), "g/1": np.full(2, -1.0, np.float32)}
    case = Case(groups=[group], current=ones, anchor=ones, reference=ones, entropy=ones)
    root = 1 / math.sqrt(2)
    by_hand = {
        "dapo": (0.0, -root / 4, root / 4),
        "dr_grpo": (0.0, -0.5 / 32, 0.5 / 32),
        "rloo": (0.0, -1.0 / 32, 1.0 / 32),
        "reinforce++": (0.0, -root / 4, root / 4),
        "gspo": (0.0, -root / 4, root / 4),
        "cispo": (0.0, -root / 4, root / 4),
    }
    for recipe, (loss, first, second) in by_hand.items():
        algorithm = build(RECIPES[recipe], Sampling(max_tokens=MAX_TOKENS))
        (batch,) = algorithm.minibatches([group], step=1)
        ours = evaluate(algorithm, batch, case)
        assert ours.loss == pytest.approx(loss, abs=1e-12), recipe
        np.testing.assert_allclose(ours.gradients["g/0"], [first] * 2, rtol=1e-6, err_msg=recipe)
        np.testing.assert_allclose(ours.gradients["g/1"], [second] * 2, rtol=1e-6, err_msg=recipe)

"""Groups to optimizer batches: who counts, with which advantage, against which denominator."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from croze.errors import InvariantViolated
from croze.train.algorithms.rule import Rule
from croze.train.normalizers import Normalizer, token_weights
from croze.types import Batch, Group, Rollout, Sample

LARGEST_SCORE = float(np.finfo(np.float32).max) / 4
"""Advantages are float32, and differ from scores by a factor of up to 4."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """The valid rollouts of one group in a fixed order; scores and (once known) advantages: float64 [G]."""

    group_id: str
    rollouts: tuple[Rollout, ...]
    invalid: int
    scores_G: np.ndarray
    advantages_G: np.ndarray

    @property
    def moves(self) -> bool:
        """Whether any advantage is other than 0 (as the float32 that the loss sees)."""
        return bool(self.advantages_G.astype(np.float32).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The groups of one optimizer batch: with advantages, with none but 0, and too small to have any."""

    moving: tuple[Attempts, ...]
    still: tuple[Attempts, ...]
    dropped: tuple[Attempts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assembler:
    """Turns a step's groups into batches; pure. ``skip``: leave zero-advantage groups out of the computation.

    ``rollout_anchor``: the ratio's anchor is the sampler. ``processed``: the sampler's log-probs must be
    those of the distribution it sampled from, for its temperature is not 1.
    """

    rule: Rule
    normalizer: Normalizer
    max_tokens: int
    minibatches: int
    skip: bool
    rollout_anchor: bool
    processed: bool

    def batches(self, groups: Sequence[Group], step: int) -> list[Batch]:
        """At least one batch, at most ``minibatches``, the same whatever the order of arrival.

        Groups are cut apart by id and never split. ``stats`` are sums over the batch's own groups
        (``reward_*`` and ``advantage_*`` apart): ``stats["tokens"]`` is what the normaliser counted. Where
        that is 0 nothing was measured and no optimizer step is due; tokens without samples are a step with a
        gradient of 0.

        Raises ``InvariantViolated`` for a rollout that comes twice, in a foreign group, unscored, or
        ill-formed.
        """
        attempts = self._collect(groups)
        kept = [a for a in attempts if len(a.rollouts) >= self.rule.advantages.min_valid]
        dropped = [a for a in attempts if len(a.rollouts) < self.rule.advantages.min_valid]
        advantages = self.rule.advantages({a.group_id: a.scores_G for a in kept})
        kept = [dataclasses.replace(a, advantages_G=advantages[a.group_id]) for a in kept]
        moving, still = [a for a in kept if a.moves], [a for a in kept if not a.moves]
        return [self._batch(part, step) for part in deal(moving, still, dropped, self.minibatches)]

    def _collect(self, groups: Sequence[Group]) -> list[Attempts]:
        by_group: dict[str, list[Rollout]] = defaultdict(list)
        seen: set[str] = set()
        for group in groups:
            by_group[group.id].extend(group.rollouts)
            for rollout in group.rollouts:
                if rollout.group_id != group.id:
                    raise _broken(
                        rollout, f"belongs to group {rollout.group_id!r} but came with group {group.id!r}"
                    )
                if rollout.id in seen:
                    raise _broken(rollout, "came twice; a rollout is trained at most once")
                seen.add(rollout.id)
        return [self._attempts(group_id, by_group[group_id]) for group_id in sorted(by_group)]

    def _attempts(self, group_id: str, rollouts: list[Rollout]) -> Attempts:
        valid = [r for r in rollouts if r.outcome is not None and r.outcome.valid]
        valid.sort(key=lambda r: (r.member, r.attempt, r.id))
        for rollout in valid:
            _check_rollout(rollout, processed=self.processed)
        scores_G = np.array([r.outcome.score for r in valid if r.outcome is not None], dtype=np.float64)
        return Attempts(
            group_id=group_id,
            rollouts=tuple(valid),
            invalid=len(rollouts) - len(valid),
            scores_G=scores_G,
            advantages_G=np.zeros_like(scores_G),
        )

    def _batch(self, part: Part, step: int) -> Batch:
        kept = (*part.moving, *part.still)
        counted = [(r, float(a)) for g in kept for r, a in zip(g.rollouts, g.advantages_G, strict=True)]
        trained_R = np.array([r.generated for r, _ in counted], dtype=np.int64)
        weights_R = token_weights(self.normalizer, trained_R, self.max_tokens)
        computed = sum(len(g.rollouts) for g in (part.moving if self.skip else kept))
        samples = tuple(
            self._sample(rollout, advantage, float(weight))
            for (rollout, advantage), weight in zip(counted[:computed], weights_R, strict=False)
            if rollout.generated > 0
        )
        stats = _stats(part) | {
            "groups_skipped": float(len(part.still)) if self.skip else 0.0,
            "samples": float(len(samples)),
            "tokens": float(trained_R.sum()),
            "tokens_skipped": float(trained_R[computed:].sum()),
        }
        return Batch(step=step, samples=samples, stats=stats)

    def _sample(self, rollout: Rollout, advantage: float, weight: float) -> Sample:
        cut = rollout.prompt_tokens
        mask_S = rollout.mask_T[cut:]
        logprobs_S = rollout.logprobs_T[cut:]
        logprobs_S = np.where(np.isnan(logprobs_S), np.float32(0.0), logprobs_S)
        return Sample(
            rollout_id=rollout.id,
            group_id=rollout.group_id,
            prompt_P=rollout.ids_T[:cut],
            ids_S=rollout.ids_T[cut:],
            mask_S=mask_S,
            logprobs_S=logprobs_S,
            advantages_S=np.where(mask_S, np.float32(advantage), np.float32(0.0)),
            weights_S=np.where(mask_S, np.float32(weight), np.float32(0.0)),
            anchor_S=logprobs_S if self.rollout_anchor else None,
        )


def deal(moving: list[Attempts], still: list[Attempts], dropped: list[Attempts], parts: int) -> list[Part]:
    """Deal groups like cards, moving ones first, so that every part gets its share of signal.

    No part is without a kept group unless there is none at all.
    """
    kept = moving + still
    count = max(1, min(parts, len(kept)))
    hands = [(kept[part::count], len(moving[part::count])) for part in range(count)]
    return [
        Part(moving=tuple(hand[:ahead]), still=tuple(hand[ahead:]), dropped=tuple(dropped[part::count]))
        for part, (hand, ahead) in enumerate(hands)
    ]


def _check_rollout(rollout: Rollout, *, processed: bool) -> None:
    """Hold a valid rollout to what the loss assumes of it."""
    length, cut = len(rollout.ids_T), rollout.prompt_tokens
    if not len(rollout.mask_T) == len(rollout.logprobs_T) == length or not 0 < cut <= length:
        raise _broken(rollout, f"has arrays of unequal lengths, or {cut} prompt tokens of {length}")
    if rollout.mask_T[:cut].any():
        raise _broken(rollout, "would train on its prompt")
    if not np.isfinite(rollout.logprobs_T[rollout.mask_T]).all():
        raise _broken(rollout, "has a trained token without a finite log-prob")
    if processed and rollout.logprobs_kind == "raw":
        raise _broken(
            rollout, "has log-probs before temperature, so the ratio would compare two distributions"
        )
    score = rollout.outcome.score if rollout.outcome is not None else math.nan
    if not abs(score) <= LARGEST_SCORE:
        raise _broken(rollout, f"is valid with score {score}")


def _broken(rollout: Rollout, what: str) -> InvariantViolated:
    return InvariantViolated(
        f"rollout {rollout.id!r} {what}", where=f"group {rollout.group_id!r}, step {rollout.step}"
    )


def _stats(part: Part) -> dict[str, float]:
    everyone = (*part.moving, *part.still, *part.dropped)
    stats = {
        "groups": float(len(everyone)),
        "groups_dropped": float(len(part.dropped)),
        "rollouts_valid": float(sum(len(a.rollouts) for a in everyone)),
        "rollouts_invalid": float(sum(a.invalid for a in everyone)),
    }
    scores_R = np.concatenate([a.scores_G for a in everyone] or [np.zeros(0)])
    if len(scores_R):
        stats |= {"reward_mean": float(scores_R.mean()), "reward_std": float(scores_R.std())}
    advantages_R = np.concatenate([a.advantages_G for a in (*part.moving, *part.still)] or [np.zeros(0)])
    if len(advantages_R):
        stats["advantage_mean"] = float(advantages_R.mean())
        stats["advantage_std"] = float(advantages_R.std())
        stats["advantage_max"] = float(np.abs(advantages_R).max())
    return stats

"""The figures of a step: what ``train --json`` prints and ``metrics.jsonl`` keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from croze.loop.collect import Collected
from croze.train.protocol import StepStats, TrainStats
from croze.types import Batch, Rollout, WeightsId


class Learned(msgspec.Struct, frozen=True, kw_only=True):
    """What a step's optimizer batches did; the first one came before any update, so its gap is on-policy."""

    batches: tuple[Batch, ...]
    stats: tuple[TrainStats, ...]
    steps: tuple[StepStats, ...]

    @property
    def groups(self) -> frozenset[str]:
        """Ids of the groups that had a sample in the loss."""
        return frozenset(s.group_id for b in self.batches for s in b.samples)

    @property
    def trained(self) -> frozenset[str]:
        """Ids of the rollouts that had a token in the loss."""
        return frozenset(s.rollout_id for b in self.batches for s in b.samples if s.mask_S.any())

    @property
    def gaps(self) -> dict[str, float]:
        """The largest |trainer - sampler| log-prob of each rollout (nats), where the trainer computed its own before
        the step's first update: in the first optimizer batch, or in all of them for a recomputed anchor."""
        gaps = dict(self.stats[0].gaps) if self.stats else {}
        for sample in (s for b in self.batches for s in b.samples):
            if sample.anchor_S is not None and sample.mask_S.any():
                found = np.abs(sample.anchor_S - sample.logprobs_S)[sample.mask_S]
                gaps[sample.rollout_id] = float(np.maximum(found.max(), gaps.get(sample.rollout_id, 0.0)))
        return gaps

    @property
    def advantages(self) -> dict[str, float]:
        """The advantage of each trained rollout (that of its first trained token)."""
        trained = ((s.rollout_id, s.advantages_S[s.mask_S]) for b in self.batches for s in b.samples)
        return {rollout: float(values[0]) for rollout, values in trained if len(values)}


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Clock seconds at the borders of a step's phases, and CPU seconds spent by all processes since its start."""

    started: float
    trained: tuple[float, float]
    published: tuple[float, float]
    saved: tuple[float, float]
    cpu_s: float
    peak_mib: float


def step_event(
    collected: Collected, learned: Learned, weights_id: WeightsId, timing: Timing
) -> dict[str, Any]:
    """One flat record of a step. None stands for what was not measured, never 0."""
    scores = valid_scores(collected.rollouts)
    tokens = sum(r.generated for r in collected.rollouts)
    return {
        "event": "step",
        "step": collected.step,
        "reward_mean": float(np.mean(scores)) if scores else None,
        "reward_std": float(np.std(scores)) if scores else None,
        **training_figures(learned),
        "tokens": tokens,
        "tokens_per_cpu_s": tokens / timing.cpu_s if timing.cpu_s > 0 else None,
        "cpu_s": timing.cpu_s,
        "step_s": timing.saved[1] - timing.started,
        "phase_s": {
            "generate": collected.generated_at - timing.started,
            "reward": max(0.0, collected.judged_at - collected.generated_at),
            "train": _span(timing.trained),
            "sync": _span(timing.published),
            "save": _span(timing.saved),
        },
        "valid": len(scores) / len(collected.rollouts) if collected.rollouts else 0.0,
        "infra_faults": collected.infra_faults,
        "groups_trained": len(learned.groups),
        "reply_tokens_mean": tokens / len(collected.rollouts) if collected.rollouts else None,
        "truncated": _share([r.finish == "length" for r in collected.rollouts]),
        "peak_mib": timing.peak_mib,
        "weights_id": weights_id,
    }


def training_figures(learned: Learned) -> dict[str, Any]:
    """The optimizer's side. Gap and KL are the first batch's: later ones come after an update."""
    measured = learned.stats[0] if learned.stats and learned.stats[0].tokens_trained else None
    totals: dict[str, float] = {}
    for stats in learned.stats:
        for name, value in stats.figures.items():
            totals[name] = totals.get(name, 0.0) + value
    tokens = totals.pop("tokens", 0.0)
    return {
        "kl_rollout": measured.kl_rollout if measured else None,
        "max_logprob_gap": measured.max_logprob_gap if measured else None,
        "loss": sum(s.loss for s in learned.stats) if measured else None,
        "grad_norm": learned.steps[0].grad_norm if learned.steps else None,
        "lr": learned.steps[-1].lr if learned.steps else None,
        "updates_skipped": sum(s.skipped for s in learned.steps),
        "save_wait_s": sum(s.waited_s for s in learned.steps),
        "tokens_computed": sum(s.tokens_computed for s in learned.stats),
        # what an algorithm sums over trained tokens is shown per token: ratio, reference_kl, entropy, clipped
        "per_token": {_short(name): value / tokens for name, value in totals.items()} if tokens else {},
    }


def _short(name: str) -> str:
    return name.removesuffix("_sum").removesuffix("_tokens")


def _span(borders: tuple[float, float]) -> float:
    return borders[1] - borders[0]


def _share(of: Sequence[bool]) -> float | None:
    return sum(of) / len(of) if of else None


def valid_scores(rollouts: Sequence[Rollout]) -> list[float]:
    """Scores of valid rollouts; the others have none."""
    return [r.outcome.score for r in rollouts if r.outcome is not None and r.outcome.valid]

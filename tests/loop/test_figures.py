"""The gap of each rollout: the trainer's own log-probs against the sampler's, before the step's first update."""

import msgspec
import numpy as np
import pytest
import torch

import small_models as small
from croze.config import Optim
from croze.loop.figures import Learned
from croze.train.protocol import TrainStats
from croze.types import Batch, Sample


def samples_as_sampled(rig: small.Rig) -> list[Sample]:
    """Samples whose sampler's log-probs are the trainer's own, so that every gap is known."""
    samples = small.random_samples(307, [(7, (5, 9, 3)), (12, (4, 6))])
    samples[3] = small.masked(samples[3], [False] * 4)
    found = rig.trainer.logprobs(samples)
    return [msgspec.structs.replace(s, logprobs_S=f) for s, f in zip(samples, found, strict=True)]


def moved(sample: Sample, by: float) -> Sample:
    """With one trained token's log-prob moved, and one untrained token's much further."""
    logprobs = sample.logprobs_S.copy()
    logprobs[np.flatnonzero(sample.mask_S)[-1]] += by
    logprobs[~sample.mask_S] -= 7.0
    return msgspec.structs.replace(sample, logprobs_S=logprobs)


@pytest.mark.parametrize("budget", [1, 30, 10**6])
def test_the_trainer_tells_each_rollouts_own_gap(budget: int) -> None:
    rig = small.make_rig(
        small.architecture(),
        published=torch.float32,
        optim=Optim(tokens_per_microbatch=budget),
        measured=False,
    )
    samples = samples_as_sampled(rig)
    branch = msgspec.structs.replace(moved(samples[4], -0.5), rollout_id=samples[0].rollout_id)
    batch = [moved(samples[0], 0.25), samples[1], moved(samples[2], -2.0), samples[3], branch]
    stats = rig.trainer.forward_backward(Batch(step=1, samples=tuple(batch)))
    wanted = {samples[0].rollout_id: 0.5, samples[1].rollout_id: 0.0, samples[2].rollout_id: 2.0}
    assert stats.gaps == pytest.approx(wanted, abs=1e-5), "largest over branches; none without trained tokens"
    assert stats.max_logprob_gap == max(stats.gaps.values())


def test_a_gap_that_is_no_number_is_not_hidden() -> None:
    rig = small.make_rig(small.architecture(), published=torch.float32, measured=False)
    samples = samples_as_sampled(rig)
    stats = rig.trainer.forward_backward(Batch(step=1, samples=(moved(samples[0], float("nan")), samples[1])))
    assert np.isnan(stats.gaps[samples[0].rollout_id]) and stats.gaps[samples[1].rollout_id] < 1e-5
    assert np.isnan(stats.max_logprob_gap)


def stats_of(**gaps: float) -> TrainStats:
    return TrainStats(
        loss=0.0,
        figures={},
        tokens_computed=1,
        tokens_trained=1,
        max_logprob_gap=0.0,
        kl_rollout=0.0,
        gaps=gaps,
    )


def sample(
    rollout_id: str, anchor: list[float] | None = None, mask: tuple[bool, ...] = (True, True)
) -> Sample:
    zeros = np.zeros(2, np.float32)
    return Sample(
        rollout_id=rollout_id,
        group_id="g",
        prompt_P=np.zeros(1, np.int32),
        ids_S=np.zeros(2, np.int32),
        mask_S=np.array(mask),
        logprobs_S=zeros,
        advantages_S=zeros,
        weights_S=zeros,
        anchor_S=None if anchor is None else np.array(anchor, np.float32),
    )


def test_what_came_after_an_update_is_no_gap_of_the_sampler() -> None:
    batches = (Batch(step=1, samples=(sample("a"),)), Batch(step=1, samples=(sample("b"),)))
    learned = Learned(batches=batches, stats=(stats_of(a=0.5), stats_of(b=9.0)), steps=())
    assert learned.gaps == {"a": 0.5} and learned.trained == {"a", "b"}


def test_a_recomputed_anchor_measures_every_rollout() -> None:
    first = Batch(step=1, samples=(sample("a", [0.5, -0.25]),))
    second = Batch(
        step=1,
        samples=(
            sample("b", [0.0, -3.0]),
            sample("c", [1.0, 8.0], (True, False)),
            sample("d", [1, 1], (False,) * 2),
        ),
    )
    learned = Learned(batches=(first, second), stats=(stats_of(a=0.5), stats_of(b=9.0)), steps=())
    assert learned.gaps == {"a": 0.5, "b": 3.0, "c": 1.0} and learned.trained == {"a", "b", "c"}
    assert Learned(batches=(), stats=(), steps=()).gaps == {}

"""What a trainer is: blind to the algorithm, which is one class that turns groups into weights and a loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np

from croze.types import Batch, Group, Sample, WeightsId

if TYPE_CHECKING:
    import torch


class LossInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What a loss sees of a micro-batch, flat over its suffix tokens N (fp32, on the trainer's device).

    sequence_N int64: which of ``sequences`` samples a token belongs to (a sample is never split).
    mask_N: 1.0 trained, 0.0 not. weights_N: the normaliser, 0 where masked. reference_N may be None.
    """

    logprobs_N: torch.Tensor
    rollout_N: torch.Tensor
    anchor_N: torch.Tensor
    advantages_N: torch.Tensor
    weights_N: torch.Tensor
    mask_N: torch.Tensor
    sequence_N: torch.Tensor
    sequences: int
    reference_N: torch.Tensor | None = None
    entropy_N: torch.Tensor | None = None


class Algorithm(Protocol):
    """Groups -> samples with advantages and normalisers -> a loss."""

    @property
    def name(self) -> str: ...

    @property
    def needs_entropy(self) -> bool: ...

    @property
    def needs_reference(self) -> bool: ...

    @property
    def recompute_anchor(self) -> bool:
        """Whether the trainer fills ``anchor_S`` with its own log-probs before the step's first update."""
        ...

    def minibatches(self, groups: Sequence[Group], step: int) -> list[Batch]:
        """Split a step's groups into optimizer batches, normalisers fixed over each whole batch."""
        ...

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        """The micro-batch's share of the loss (summing shares gives the batch's loss) and figures to sum."""
        ...


class TrainStats(msgspec.Struct, frozen=True, kw_only=True):
    """One ``forward_backward``: the loss, summed figures of the algorithm, tokens computed, and the largest
    |trainer - sampler| log-prob of this batch's trained tokens (exactly 0 where the machine allows it)."""

    loss: float
    figures: dict[str, float]
    tokens_computed: int
    tokens_trained: int
    max_logprob_gap: float
    kl_rollout: float


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step: the gradient's global norm before clipping, and the rate used.

    ``skipped``: the gradient was not finite, so nothing was changed.
    """

    grad_norm: float
    lr: float
    skipped: bool = False


class Trainer(Protocol):
    """Training engine. ``forward_backward`` accumulates; ``step`` applies and clears."""

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Current log-probs, float32 [S] per sample; no gradient."""
        ...

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The same under the reference's weights; only where the algorithm needs a reference."""
        ...

    def forward_backward(self, batch: Batch) -> TrainStats: ...

    def step(self, step: int) -> StepStats:
        """Apply the accumulated gradients at the rate of loop step ``step`` (from 1), and clear them."""
        ...

    def publish(self, weights_id: WeightsId) -> None:
        """What ``export`` gives now has this id; forward passes use it from here on."""
        ...

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's canonical tensors that training changes (Hugging Face or peft names), in the published
        dtype; never gathered."""
        ...

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Canonical tensors that training never changes (the base under an adapter)."""
        ...

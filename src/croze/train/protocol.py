"""What a trainer is: blind to the algorithm, which is one class that turns groups into weights and a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec
import numpy as np

from croze.config import Optim
from croze.types import Batch, Group, Sample, WeightsId

if TYPE_CHECKING:
    import torch

    from croze.models.protocol import ModelFiles
    from croze.models.weights import ModelWeights


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
    |trainer - sampler| log-prob of this batch's trained tokens (exactly 0 where the machine allows it).
    ``gaps``: the same (nats) over each rollout's trained tokens, by its id."""

    loss: float
    figures: dict[str, float]
    tokens_computed: int
    tokens_trained: int
    max_logprob_gap: float
    kl_rollout: float
    gaps: dict[str, float] = msgspec.field(default_factory=dict)


class StepStats(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step: the gradient's global norm before clipping, and the rate used.

    ``skipped``: the gradient was not finite, so nothing was changed. ``waited_s``: seconds it stood still for a
    snapshot that was still being written.
    """

    grad_norm: float
    lr: float
    skipped: bool = False
    waited_s: float = 0.0


class Snapshot(Protocol):
    """The complete training state after some step, held still until it is written or closed.

    Meant to be written on another thread while the next step generates and runs forward and backward; only its
    optimizer step waits. A context manager that closes.
    """

    def write(self, folder: Path) -> tuple[Path, ...]:
        """Write the state into ``folder`` (made if need be) and onto the disk; returns the files. Once only.

        Raises CheckpointFault when the disk is full or fails, UsageError where a state is already; what was
        begun is left for the caller to remove. The state is let go in any case.
        """
        ...

    def close(self) -> None:
        """Let the state go, unless it is being written: the writer lets it go then. May be called twice."""
        ...

    def __enter__(self) -> Snapshot: ...

    def __exit__(self, *error: object) -> None: ...


class Trainer(Protocol):
    """Training engine. ``forward_backward`` accumulates; ``step`` applies and clears."""

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Current log-probs, float32 [S] per sample; no gradient."""
        ...

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """The same under the reference's weights; only where the algorithm needs a reference."""
        ...

    def forward_backward(self, batch: Batch) -> TrainStats:
        """Add the batch's gradients; its samples go to the algorithm's loss in their order, none split."""
        ...

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

    def snapshot(self) -> Snapshot:
        """Hold the state as the last ``step`` left it: all that later steps depend on beside what the trainer is
        built from, gradients not yet applied left out. Waits for a step or snapshot under way; raises
        WaitExpired when that does not end."""
        ...

    def save(self, folder: Path) -> tuple[Path, ...]:
        """``snapshot`` and ``write`` at once; see there."""
        ...

    def load(self, folder: Path) -> None:
        """Go on from a saved state, bit for bit; whatever was accumulated is dropped. For a trainer built from the
        same model and options; its weights are not published yet.

        Raises CheckpointFault for missing or damaged files, CheckpointMismatch for another training's, and in both
        cases nothing has changed.
        """
        ...


@runtime_checkable
class ShowsGradients(Protocol):
    """What a trainer may offer beside: its gradients, to be looked at; fp32, by whatever names it gives them. It takes
    a batch's samples to the loss in their order."""

    def accumulated(self) -> Mapping[str, torch.Tensor]:
        """What the next ``step`` will apply; live, not to be written to."""
        ...

    def gradient(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The gradients of ``batch`` by itself, before the next ``step``; what is accumulated stays as it is."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParts:
    """What a trainer is built from: the argument of every factory in the entry point group ``croze.train``.

    ``weights`` (empty, but with architecture, numerics and the adapter asked for) may be filled by the trainer and
    is then shared with an engine in this process; a trainer that leaves them alone has the engine fill them from
    ``export``. ``published`` is the dtype of ``export``.
    """

    files: ModelFiles
    weights: ModelWeights
    algorithm: Algorithm
    optim: Optim
    steps: int
    published: torch.dtype
    temperature: float
    seed: int

"""Which samples made a gradient: each one's share of it, and its tokens as the loss saw them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from croze.errors import InvariantViolated
from croze.train.algorithms import PolicyGradient
from croze.train.protocol import LossInputs, ShowsGradients, Trainer, TrainStats
from croze.types import Batch, Group, Sample

ELEMENTS = 1 << 22
"""Elements of a gradient multiplied in float64 at a time."""
CANCELLED = 1e-4
"""A batch's gradient that is a smaller part than this of its samples' norms together is what rounding left of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFigures:
    """A sample's trained tokens as the loss saw them; arrays [n], ``positions_n`` in its suffix.

    ``slope_n``: the gradient of the loss with respect to the token's log-prob.
    """

    positions_n: np.ndarray
    logprobs_n: np.ndarray
    ratio_n: np.ndarray
    clipped_n: np.ndarray
    loss_n: np.ndarray
    slope_n: np.ndarray

    @property
    def pull(self) -> float:
        """How strongly the loss pulls at the log-probs: what a sample's gradient is likely to weigh."""
        return float(np.abs(self.slope_n).sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A sample's part in the gradient g of its optimizer batch (``batch`` from 1).

    ``share`` is g_i . g / |g|^2: gradients add, so the shares of a batch do, to 1. ``cosine`` is between g_i and g,
    ``norm`` is |g_i|. None where it was not measured; the first two also where samples cancel and g is nothing.
    """

    sample: Sample
    batch: int
    figures: TokenFigures
    share: float | None = None
    cosine: float | None = None
    norm: float | None = None


class Watched:
    """An ``Algorithm`` that remembers what its loss was given while ``watching``."""

    def __init__(self, algorithm: PolicyGradient) -> None:
        self.inner = algorithm
        self.watching = False
        self._seen: list[LossInputs] = []

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def needs_entropy(self) -> bool:
        return self.inner.needs_entropy

    @property
    def needs_reference(self) -> bool:
        return self.inner.needs_reference

    @property
    def recompute_anchor(self) -> bool:
        return self.inner.recompute_anchor

    def minibatches(self, groups: Sequence[Group], step: int) -> list[Batch]:
        return self.inner.minibatches(groups, step)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        if self.watching:
            self._seen.append(msgspec.structs.replace(inputs, logprobs_N=inputs.logprobs_N.detach()))
        return self.inner.loss(inputs)

    def take(self, samples: Sequence[Sample]) -> list[TokenFigures]:
        """The tokens of ``samples``, whose losses were all that was computed since the last call."""
        seen, self._seen = self._seen, []
        arrays = [array for inputs in seen for array in self._by_sequence(inputs)]
        wheres = [np.flatnonzero(s.mask_S) for s in samples]
        if [len(a[0]) for a in arrays] != [len(w) for w in wheres]:
            raise InvariantViolated(
                "the losses were not computed over the batch's samples in their order", where="optim.trainer"
            )
        return [
            TokenFigures(
                positions_n=where,
                logprobs_n=logprobs,
                ratio_n=ratio,
                clipped_n=clipped.astype(bool),
                loss_n=loss,
                slope_n=slope,
            )
            for where, (logprobs, ratio, clipped, loss, slope) in zip(wheres, arrays, strict=True)
        ]

    def _by_sequence(self, inputs: LossInputs) -> list[np.ndarray]:
        """Per sample, its trained tokens' log-probs, ratios, clips, losses and slopes [5, n]."""
        logprobs_N = inputs.logprobs_N.clone().requires_grad_()
        with torch.enable_grad():
            terms = self.inner.terms(msgspec.structs.replace(inputs, logprobs_N=logprobs_N))
            (slope_N,) = torch.autograd.grad(terms.loss_N.sum(), logprobs_N)
        columns = (logprobs_N, terms.ratio_N, terms.clipped_N, terms.loss_N, slope_N)
        table = torch.stack([c.detach().double() for c in columns]).cpu().numpy()
        order, trained = inputs.sequence_N.cpu().numpy(), (inputs.mask_N > 0).cpu().numpy()
        return [table[:, trained & (order == i)] for i in range(inputs.sequences)]


class Looking:
    """Looks at every optimizer batch between its backward pass and its update; ``shares`` is what it saw.

    ``most``: samples of a batch whose gradients are computed one by one, those that the loss pulls at most; ``chosen``,
    a rollout's id, is always among them. The gradient that the update will apply stays bit for bit as it is.
    """

    def __init__(self, trainer: Trainer, watched: Watched, *, most: int, chosen: str | None = None) -> None:
        self.trainer, self.watched, self.most, self.chosen = trainer, watched, most, chosen
        self.shares: list[Share] = []
        self._batches = 0

    def __call__(self, batch: Batch, _: TrainStats) -> None:
        self._batches += 1
        figures = self.watched.take(batch.samples)
        measured = self._measured(batch, figures)
        for at, (sample, tokens) in enumerate(zip(batch.samples, figures, strict=True)):
            share, cosine, norm = measured.get(at, (None, None, None))
            self.shares.append(
                Share(
                    sample=sample,
                    batch=self._batches,
                    figures=tokens,
                    share=share,
                    cosine=cosine,
                    norm=norm,
                )
            )

    def _measured(
        self, batch: Batch, figures: Sequence[TokenFigures]
    ) -> dict[int, tuple[float | None, float | None, float]]:
        """Share, cosine and norm of samples by their place in the batch."""
        if not isinstance(self.trainer, ShowsGradients):
            return {}
        ranked = sorted(
            range(len(figures)),
            key=lambda i: (batch.samples[i].rollout_id != self.chosen, -figures[i].pull),
        )
        chosen = sum(s.rollout_id == self.chosen for s in batch.samples)
        whole, found = self.trainer.accumulated(), {}
        self.watched.watching = False
        for at in ranked[: max(self.most, chosen)]:
            alone = self.trainer.gradient(msgspec.structs.replace(batch, samples=(batch.samples[at],)))
            found[at] = dot(alone, whole), math.sqrt(dot(alone, alone))
        self.watched.watching = True
        size = math.sqrt(dot(whole, whole))
        if size <= CANCELLED * math.fsum(norm for _, norm in found.values()):
            return {at: (None, None, norm) for at, (_, norm) in found.items()}
        return {
            at: (along / size / size, along / (norm * size) if norm else None, norm)
            for at, (along, norm) in found.items()
        }


def dot(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> float:
    """The inner product of two gradients, summed in float64; what one lacks is 0."""
    total = 0.0
    for name in left.keys() & right.keys():
        a, b = left[name].reshape(-1), right[name].reshape(-1)
        for start in range(0, len(a), ELEMENTS):
            total += float(a[start : start + ELEMENTS].double() @ b[start : start + ELEMENTS].double())
    return total

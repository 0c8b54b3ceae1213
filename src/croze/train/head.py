"""Response-only log-probs in chunks, with a hand-written gradient: logits of a batch never exist at once."""

from __future__ import annotations

import torch

from croze.models.transformer import Forward, log_of, probabilities
from croze.models.weights import ModelWeights
from croze.train.parameters import Parameters

CHUNK = 128
"""Rows of logits computed at a time."""
KEEP_BYTES = 192 << 20
"""Probabilities kept between the two passes; beyond this they are computed again."""


class Head:
    """log p of each target under the head, then the gradient of any function of them.

    log p_t = log softmax(W y / T)_t;  d log p_t / d logits = (onehot_t - p) / T;
    entropy H = -sum p log p;          d H / d logits = -p (log p + H) / T.
    """

    def __init__(
        self, weights: ModelWeights, hidden_MH: torch.Tensor, targets_M: torch.Tensor, temperature: float
    ) -> None:
        self.weights, self.hidden_MH, self.targets_M, self.temperature = (
            weights,
            hidden_MH,
            targets_M,
            temperature,
        )
        rows, vocab = targets_M.shape[0], weights.arch.vocab
        self._kept: list[torch.Tensor] | None = [] if rows * vocab * 4 <= KEEP_BYTES else None

    @property
    def kept(self) -> bool:
        """Whether ``backward`` can do without the head's forward weights."""
        return self._kept is not None

    def _probabilities(self, start: int) -> torch.Tensor:
        logits = Forward().linear(self.hidden_MH[start : start + CHUNK], self.weights.head)
        return probabilities(logits, self.temperature)

    def log_probs(
        self, *, entropy: bool = False, keep: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """fp32 [M] log-probs, and entropies (nats) if asked for."""
        found, entropies = [], []
        for start in range(0, len(self.targets_M), CHUNK):
            p = self._probabilities(start)
            found.append(log_of(p.gather(1, self.targets_M[start : start + CHUNK, None]))[:, 0])
            if entropy:
                entropies.append(-(p * log_of(p)).sum(-1))
            if keep and self._kept is not None:
                self._kept.append(p)
        empty = self.hidden_MH.new_zeros(0, dtype=torch.float32)
        return torch.cat([empty, *found]), torch.cat(entropies) if entropies else None

    def backward(
        self, grad_logprobs_M: torch.Tensor, grad_entropy_M: torch.Tensor | None, parameters: Parameters
    ) -> torch.Tensor:
        """Adds the head's weight gradient; returns the gradient of the hidden rows [M, H]."""
        key, grads = self.weights.layout.head, []
        plain = parameters.plain(key)
        for index, start in enumerate(range(0, len(self.targets_M), CHUNK)):
            p = self._kept[index] if self._kept else self._probabilities(start)
            dl = grad_logprobs_M[start : start + CHUNK, None]
            extra = None
            if grad_entropy_M is not None:
                logs = log_of(p)
                h = -(p * logs).sum(-1, keepdim=True)
                extra = p * (logs + h) * grad_entropy_M[start : start + CHUNK, None]
            p.mul_(-dl)
            p.scatter_add_(1, self.targets_M[start : start + CHUNK, None], dl)
            if extra is not None:
                p.sub_(extra)
            if self.temperature != 1.0:
                p.div_(self.temperature)
            p = p.to(plain.dtype)
            grads.append(p @ plain)
            if parameters.trains(key):
                parameters.add_product(key, p.t(), self.hidden_MH[start : start + CHUNK])
        self._kept = None
        return torch.cat(grads)

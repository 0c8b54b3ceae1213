"""Teacher-forced log-probs of groups: the shared prompt once, siblings after it, the sampler's op order.

The canonical attention of a token is fixed per sample, never by batch: keys are the prompt's region, padded
to whole regions, then the suffix's; weights are one softmax over both; the two regions' sums are added suffix
first. The sampler computes the same (``croze.inference``), so log-probs are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from croze.models import kernels
from croze.models.architecture import Architecture
from croze.models.numerics import Recipe
from croze.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """Samples of one bucket: rows of the flat batch and padded lengths. starts/lengths per sample; R = longest."""

    starts: list[int]
    lengths: list[int]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def total(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One prompt at rows [start, start + prompt) and its siblings, bucketed by length, right behind it."""

    start: int
    prompt: int
    buckets: list[Siblings]


class Packing:
    """A micro-batch laid out flat.

    ``ids_N`` / ``positions_N``: every token computed. ``rows_M``: which of them predict a trained token;
    ``targets_M``: those tokens; ``sequence_M``: which sample they belong to; ``where``: per sample the positions
    in its suffix of its trained tokens. Order of M: samples in the order given.
    """

    def __init__(self, samples: Sequence[Sample], *, share: bool, device: str) -> None:
        blocks: dict[object, list[int]] = {}
        for i, sample in enumerate(samples):
            key = (sample.group_id, sample.prompt_P.tobytes()) if share else i
            blocks.setdefault(key, []).append(i)
        ids: list[np.ndarray] = []
        positions: list[np.ndarray] = []
        self.blocks: list[Block] = []
        self.where = [np.flatnonzero(s.mask_S) for s in samples]
        rows: list[np.ndarray] = [np.empty(0, np.int64)] * len(samples)
        at = 0
        for members in blocks.values():
            prompt = samples[members[0]].prompt_P
            start, at = at, at + len(prompt)
            ids.append(prompt)
            positions.append(np.arange(len(prompt)))
            # the last trained token needs no forward of its own, nor does anything behind it
            needed = {i: int(self.where[i][-1]) if len(self.where[i]) else 0 for i in members}
            buckets: list[Siblings] = []
            for bucket in by_length(needed):
                starts, lengths = [], []
                for i in bucket:
                    ids.append(samples[i].ids_S[: needed[i]])
                    positions.append(np.arange(len(prompt), len(prompt) + needed[i]))
                    starts.append(at)
                    lengths.append(needed[i])
                    rows[i] = np.where(self.where[i] == 0, start + len(prompt) - 1, at + self.where[i] - 1)
                    at += needed[i]
                buckets.append(Siblings(starts=starts, lengths=lengths))
            for i in members:
                if needed[i] == 0:
                    rows[i] = np.full(len(self.where[i]), start + len(prompt) - 1)
            self.blocks.append(Block(start=start, prompt=len(prompt), buckets=buckets))
        self.tokens = at
        self.ids_N = _tensor(np.concatenate(ids), device)
        self.positions_N = _tensor(np.concatenate(positions), device)
        self.rows_M = _tensor(np.concatenate(rows), device)
        trained = [s.ids_S[w] for s, w in zip(samples, self.where, strict=True)]
        self.targets_M = _tensor(np.concatenate(trained), device)
        self.sequence_M = _tensor(np.repeat(np.arange(len(samples)), [len(w) for w in self.where]), device)


def _tensor(array: np.ndarray, device: str) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.int64)).to(device)


def by_length(needed: dict[int, int]) -> list[list[int]]:
    """Buckets of samples whose lengths are within a factor of two (padding stays under half); empty ones left out."""
    buckets: list[list[int]] = []
    for i in sorted((i for i in needed if needed[i] > 0), key=lambda i: -needed[i]):
        if buckets and 2 * needed[i] >= needed[buckets[-1][0]]:
            buckets[-1].append(i)
        else:
            buckets.append([i])
    return buckets


class GroupAttention:
    """Attention of a packed micro-batch; call it as ``Attend``."""

    def __init__(self, packing: Packing, arch: Architecture, recipe: Recipe) -> None:
        self.arch, self.recipe = arch, recipe
        self.blocks = packing.blocks
        self.prompt_masks = [self._prompt_mask(b.prompt) for b in self.blocks]
        self.suffix_masks = [[self._suffix_mask(b.prompt, s.longest) for s in b.buckets] for b in self.blocks]

    def _prompt_mask(self, prompt: int) -> torch.Tensor:
        keys, rows = torch.arange(self.recipe.pad(prompt)), torch.arange(prompt)
        return self._additive(keys[None] > rows[:, None])[None, :, None]

    def _suffix_mask(self, prompt: int, longest: int) -> torch.Tensor:
        prefix = (torch.arange(self.recipe.pad(prompt)) >= prompt)[None].expand(longest, -1)
        own = torch.arange(self.recipe.pad(longest))[None] > torch.arange(longest)[:, None]
        return self._additive(torch.cat([prefix, own], 1))[None, None, :, None]

    def _additive(self, hidden: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.recipe.dtype)
        return mask.masked_fill_(hidden, kernels.MASKED).to(self.recipe.device)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D] -> [N, heads * D]."""
        parts = []
        for block, prompt_mask, masks in zip(self.blocks, self.prompt_masks, self.suffix_masks, strict=True):
            end = block.start + block.prompt
            prompt_k = self._region(k[block.start : end])
            prompt_v = self._region(v[block.start : end])
            parts.append(self._prompt(q[block.start : end], prompt_k, prompt_v, prompt_mask))
            for siblings, mask in zip(block.buckets, masks, strict=True):
                parts.append(self._suffixes(siblings, q, k, v, prompt_k, prompt_v, mask))
        return torch.cat(parts)

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        """[P, kv, D] -> [kv, padded P, D]."""
        count = x.shape[0]
        return F.pad(x.transpose(0, 1), (0, 0, 0, self.recipe.pad(count) - count))

    def _prompt(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kv, d, p = self.arch.kv_heads, self.arch.head_dim, q.shape[0]
        rep = self.arch.siblings_per_kv_head
        q = q.view(p, kv, rep, d).transpose(0, 1).reshape(kv, p * rep, d)
        scores = kernels.bmm(q, k.transpose(1, 2), self.recipe).view(kv, p, rep, -1) + mask
        weights = torch.softmax(scores, -1).view(kv, p * rep, -1)
        out = kernels.weigh(weights, v, self.recipe)
        return out.view(kv, p, rep, d).transpose(0, 1).reshape(p, kv * rep * d)

    def _suffixes(
        self,
        siblings: Siblings,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        prompt_k: torch.Tensor,
        prompt_v: torch.Tensor,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        kv, d, rep = self.arch.kv_heads, self.arch.head_dim, self.arch.siblings_per_kv_head
        n, r, recipe = len(siblings.lengths), siblings.longest, self.recipe
        t, pp = recipe.pad(r), prompt_k.shape[1]
        k, v = (F.pad(self._square(x, siblings).transpose(1, 2), (0, 0, 0, t - r)) for x in (k, v))
        q = self._square(q, siblings).view(n, r, kv, rep, d).permute(0, 2, 1, 3, 4)
        own = kernels.bmm(q.reshape(n * kv, r * rep, d), k.reshape(n * kv, t, d).transpose(1, 2), recipe)
        shared = kernels.bmm(q.transpose(0, 1).reshape(kv, n * r * rep, d), prompt_k.transpose(1, 2), recipe)
        shared = shared.view(kv, n, r, rep, pp).transpose(0, 1)
        weights = torch.softmax(torch.cat([shared, own.view(n, kv, r, rep, t)], -1) + mask, -1)
        out = kernels.weigh(weights[..., pp:].reshape(n * kv, r * rep, t), v.reshape(n * kv, t, d), recipe)
        prefix = weights[..., :pp].transpose(0, 1).reshape(kv, n * r * rep, pp)
        prefix = kernels.weigh(prefix, prompt_v, recipe).view(kv, n, r, rep, d).transpose(0, 1)
        out = (out.view(n, kv, r, rep, d) + prefix).permute(0, 2, 1, 3, 4).reshape(n, r, kv * rep * d)
        if min(siblings.lengths) == r:
            return out.view(n * r, -1)
        return torch.cat([row[:length] for row, length in zip(out, siblings.lengths, strict=True)])

    def _square(self, x: torch.Tensor, siblings: Siblings) -> torch.Tensor:
        """The bucket's rows [total, H, D] as [n, R, H, D], padded with zeros."""
        first = siblings.starts[0]
        flat = x[first : first + siblings.total]
        n, r = len(siblings.lengths), siblings.longest
        if min(siblings.lengths) == r:
            return flat.view(n, r, *x.shape[1:])
        return torch.nn.utils.rnn.pad_sequence(list(torch.split(flat, siblings.lengths)), batch_first=True)

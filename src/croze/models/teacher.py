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

LEAST_TRUNK = 16
"""Prompts share their beginning when at least this many tokens are the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Siblings:
    """Samples of one bucket, one behind the other from row ``start``; ``lengths`` in tokens."""

    start: int
    lengths: list[int]

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def total(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One prompt of ``prompt`` tokens, those behind its trunk at rows [start, start + own), and its siblings
    right behind them, bucketed by length."""

    start: int
    own: int
    prompt: int
    buckets: list[Siblings]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trunk:
    """Tokens with which several prompts begin (a system prompt, examples), at rows [start, start + length), and
    the prompts that go on from there. ``length`` 0: one prompt that shares nothing."""

    start: int
    length: int
    blocks: list[Block]


class Packing:
    """A micro-batch laid out flat: what samples share is computed once, whole prompts and their beginnings.

    ``ids_N`` / ``positions_N``: every token computed. ``rows_M``: which of them predict a trained token;
    ``targets_M``: those tokens; ``sequence_M``: which sample they belong to; ``where``: per sample the positions
    in its suffix of its trained tokens. Order of M: samples in the order given. ``share`` False computes every
    sample's prompt for itself.
    """

    def __init__(self, samples: Sequence[Sample], *, share: bool, device: str) -> None:
        self.where = [np.flatnonzero(s.mask_S) for s in samples]
        self._samples = samples
        self._ids: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._rows = [np.empty(0, np.int64)] * len(samples)
        self.tokens = 0
        self.trunks = [self._trunk(t, length) for t, length in self._plan(share)]
        self.ids_N = _tensor(self._ids, device)
        self.positions_N = _tensor(self._positions, device)
        self.rows_M = _tensor(self._rows, device)
        self.targets_M = _tensor([s.ids_S[w] for s, w in zip(samples, self.where, strict=True)], device)
        self.sequence_M = _tensor([np.full(len(w), i) for i, w in enumerate(self.where)], device)

    def _plan(self, share: bool) -> list[tuple[list[list[int]], int]]:
        """Samples by prompt, prompts by common beginning: [(prompts as lists of samples, tokens in common)]."""
        blocks: dict[object, list[int]] = {}
        for i, sample in enumerate(self._samples):
            key = (sample.group_id, sample.prompt_P.tobytes()) if share else i
            blocks.setdefault(key, []).append(i)
        trunks: dict[object, list[list[int]]] = {}
        for number, members in enumerate(blocks.values()):
            prompt = self._samples[members[0]].prompt_P
            alone = not share or len(prompt) <= LEAST_TRUNK
            trunks.setdefault(number if alone else prompt[:LEAST_TRUNK].tobytes(), []).append(members)
        return [(t, self._common([self._samples[m[0]].prompt_P for m in t])) for t in trunks.values()]

    def _common(self, prompts: list[np.ndarray]) -> int:
        """How many tokens all prompts begin with, at least one of each left for itself."""
        if len(prompts) == 1:
            return 0
        shortest = min(len(p) for p in prompts) - 1
        same = np.all([p[:shortest] == prompts[0][:shortest] for p in prompts], axis=0)
        return int(np.argmin(same)) if not same.all() else shortest

    def _add(self, ids: np.ndarray, first: int) -> int:
        """Append tokens at positions ``first``...; the row of the first of them."""
        start = self.tokens
        self._ids.append(ids)
        self._positions.append(np.arange(first, first + len(ids)))
        self.tokens += len(ids)
        return start

    def _trunk(self, prompts: list[list[int]], length: int) -> Trunk:
        start = self._add(self._samples[prompts[0][0]].prompt_P[:length], 0)
        return Trunk(start=start, length=length, blocks=[self._block(members, length) for members in prompts])

    def _block(self, members: list[int], trunk: int) -> Block:
        prompt = self._samples[members[0]].prompt_P
        start, own = self._add(prompt[trunk:], trunk), len(prompt) - trunk
        # the last trained token needs no forward of its own, nor does anything behind it
        needed = {i: int(self.where[i][-1]) if len(self.where[i]) else 0 for i in members}
        for i in members:
            self._rows[i] = np.full(len(self.where[i]), start + own - 1)
        buckets = []
        for bucket in by_length(needed):
            first = self.tokens
            for i in bucket:
                at = self._add(self._samples[i].ids_S[: needed[i]], len(prompt))
                behind = self.where[i] > 0
                self._rows[i][behind] = at + self.where[i][behind] - 1
            buckets.append(Siblings(start=first, lengths=[needed[i] for i in bucket]))
        return Block(start=start, own=own, prompt=len(prompt), buckets=buckets)


def _tensor(arrays: list[np.ndarray], device: str) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(np.int64)).to(device)


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
        self.trunks = packing.trunks
        self._masks = {
            id(part): self._prompt_mask(first, count)
            for trunk in self.trunks
            for part, first, count in [
                (trunk, 0, trunk.length),
                *((b, trunk.length, b.own) for b in trunk.blocks),
            ]
        }
        self._suffix_masks = {
            id(s): self._suffix_mask(b.prompt, s.longest)
            for trunk in self.trunks
            for b in trunk.blocks
            for s in b.buckets
        }

    def _prompt_mask(self, first: int, count: int) -> torch.Tensor:
        keys, rows = torch.arange(self.recipe.pad(first + count)), first + torch.arange(count)
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
        for trunk in self.trunks:
            common = slice(trunk.start, trunk.start + trunk.length)
            if trunk.length:
                region_k, region_v = self._region(k[common]), self._region(v[common])
                parts.append(self._prompt(q[common], region_k, region_v, self._masks[id(trunk)]))
            for block in trunk.blocks:
                own = slice(block.start, block.start + block.own)
                prompt_k = self._region(torch.cat([k[common], k[own]]) if trunk.length else k[own])
                prompt_v = self._region(torch.cat([v[common], v[own]]) if trunk.length else v[own])
                parts.append(self._prompt(q[own], prompt_k, prompt_v, self._masks[id(block)]))
                parts += [self._suffixes(s, q, k, v, prompt_k, prompt_v) for s in block.buckets]
        return torch.cat(parts)

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        """[P, kv, D] -> [kv, padded P, D]."""
        count = x.shape[0]
        return F.pad(x.transpose(0, 1), (0, 0, 0, self.recipe.pad(count) - count))

    def _prompt(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        kv, d, p = self.arch.kv_heads, self.arch.head_dim, q.shape[0]
        rep = self.arch.queries_per_kv_head
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
    ) -> torch.Tensor:
        mask = self._suffix_masks[id(siblings)]
        kv, d, rep = self.arch.kv_heads, self.arch.head_dim, self.arch.queries_per_kv_head
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
        flat = x[siblings.start : siblings.start + siblings.total]
        n, r = len(siblings.lengths), siblings.longest
        if min(siblings.lengths) == r:
            return flat.view(n, r, *x.shape[1:])
        return torch.nn.utils.rnn.pad_sequence(list(torch.split(flat, siblings.lengths)), batch_first=True)

"""A micro-batch laid out flat, what its samples share computed once: trunks, prompts behind them, siblings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

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


def square(x: torch.Tensor, siblings: Siblings) -> torch.Tensor:
    """The bucket's rows of x [N, H, D] as [n, longest, H, D], padded with zeros."""
    flat = x[siblings.start : siblings.start + siblings.total]
    n, r = len(siblings.lengths), siblings.longest
    if min(siblings.lengths) == r:
        return flat.view(n, r, *x.shape[1:])
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(flat, siblings.lengths)), batch_first=True)


def ragged(x: torch.Tensor, siblings: Siblings) -> torch.Tensor:
    """x [n, longest, W] without its padding: [total, W]."""
    if min(siblings.lengths) == siblings.longest:
        return x.flatten(0, 1)
    return torch.cat([row[:length] for row, length in zip(x, siblings.lengths, strict=True)])

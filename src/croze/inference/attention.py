"""Attention of one engine step: decoding rows in one go, prefill chunks one by one, in the trainer's op order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from croze.inference.cache import KVCache
from croze.models import kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """Slots 0..n-1 each decode one token. positions: where in its suffix each token stands; prompts: its
    prompt's row in the pool; prompt_lens: that prompt's tokens."""

    positions: list[int]
    prompts: list[int]
    prompt_lens: list[int]

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A chunk of ``count`` tokens from ``start``: of prompt ``prompt`` (slot None), or of slot ``slot``'s suffix.
    ``donor``: a prompt whose first ``start`` tokens are the same and computed; their KV is copied."""

    prompt: int
    prompt_len: int
    slot: int | None
    start: int
    count: int
    donor: int | None = None


class StepAttention:
    """Masks and indices of one step, made once; called per layer as ``Attend``. Writes the new keys and values."""

    def __init__(self, cache: KVCache, decoding: Decoding, segments: Sequence[Segment]) -> None:
        self.cache, self.decoding, self.segments = cache, decoding, segments
        self.arch, self.recipe = cache.arch, cache.recipe
        if len(decoding):
            self._plan_decoding(decoding)
        self._masks = [self._segment_mask(s) for s in segments]

    def _plan_decoding(self, decoding: Decoding) -> None:
        kv, device = self.arch.kv_heads, self.recipe.device
        positions = torch.tensor(decoding.positions)
        count = len(decoding)
        self._own_keys = self.recipe.pad(int(positions.max()) + 1)
        self._prompt_keys = self.recipe.pad(max(decoding.prompt_lens))
        slots_heads = torch.arange(count)[:, None] * kv + torch.arange(kv)[None]
        self._write = (slots_heads * self.cache.suffix_len + positions[:, None]).view(-1).to(device)
        lens = torch.tensor(decoding.prompt_lens)
        hidden = torch.cat(
            [
                torch.arange(self._prompt_keys)[None] >= lens[:, None],
                torch.arange(self._own_keys)[None] > positions[:, None],
            ],
            1,
        )
        bias = torch.zeros(hidden.shape, dtype=self.recipe.dtype).masked_fill_(hidden, kernels.MASKED)
        self._bias = bias[:, None, None].to(device)
        self._plan_groups(decoding.prompts)

    def _plan_groups(self, prompts: list[int]) -> None:
        """Rows by prompt, as a rectangle [prompts, widest]; ``_gather`` None when rows already lie so."""
        members: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            members.setdefault(prompt, []).append(row)
        self._groups = max(members) + 1
        self._widest = max(map(len, members.values()))
        order = [r for g in range(self._groups) for r in members.get(g, ())]
        self._gather = self._scatter = None
        if order != list(range(self._groups * self._widest)):
            gather, scatter = [], [0] * len(prompts)
            for g in range(self._groups):
                rows = members.get(g, [])
                for j, row in enumerate(rows):
                    scatter[row] = g * self._widest + j
                gather += rows + [0] * (self._widest - len(rows))
            self._gather = torch.tensor(gather, device=self.recipe.device)
            self._scatter = torch.tensor(scatter, device=self.recipe.device)

    def _segment_mask(self, s: Segment) -> torch.Tensor:
        keys = self.recipe.pad(s.start + s.count)
        hidden = torch.arange(keys)[None] > (s.start + torch.arange(s.count))[:, None]
        if s.slot is not None:
            prefix = (torch.arange(self.recipe.pad(s.prompt_len)) >= s.prompt_len)[None].expand(s.count, -1)
            hidden = torch.cat([prefix, hidden], 1)
        mask = torch.zeros(hidden.shape, dtype=self.recipe.dtype).masked_fill_(hidden, kernels.MASKED)
        return mask[None, :, None].to(self.recipe.device)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D]: decoding rows, then segments -> [N, heads * D]."""
        at = len(self.decoding)
        parts = [self._decode(layer, q[:at], k[:at], v[:at])] if at else []
        for segment, mask in zip(self.segments, self._masks, strict=True):
            rows = slice(at, at + segment.count)
            run = self._prompt_chunk if segment.slot is None else self._suffix_chunk
            parts.append(run(layer, segment, q[rows], k[rows], v[rows], mask))
            at += segment.count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        arch, recipe, cache = self.arch, self.recipe, self.cache
        kv, rep, d, n = arch.kv_heads, arch.queries_per_kv_head, arch.head_dim, q.shape[0]
        own_k, own_v = cache.suffix_k[layer], cache.suffix_v[layer]
        own_k.view(-1, d).index_copy_(0, self._write, k.reshape(n * kv, d))
        own_v.view(-1, d).index_copy_(0, self._write, v.reshape(n * kv, d))
        own_k = own_k[:n].view(n * kv, -1, d)[:, : self._own_keys]
        own_v = own_v[:n].view(n * kv, -1, d)[:, : self._own_keys]
        q = q.reshape(n, kv, rep, d)
        own = kernels.bmm(q.view(n * kv, rep, d), own_k.transpose(1, 2), recipe).view(n, kv, rep, -1)
        prompt_k = cache.prompt_k[layer][: self._groups].view(self._groups * kv, -1, d)[
            :, : self._prompt_keys
        ]
        prompt_v = cache.prompt_v[layer][: self._groups].view(self._groups * kv, -1, d)[
            :, : self._prompt_keys
        ]
        shared = self._from_groups(kernels.bmm(self._to_groups(q), prompt_k.transpose(1, 2), recipe))
        weights = torch.softmax(torch.cat([shared, own], -1).add_(self._bias), -1)
        prefix = self._to_groups(weights[..., : self._prompt_keys])
        suffix = weights[..., self._prompt_keys :].reshape(n * kv, rep, -1)
        out = kernels.weigh(suffix, own_v, recipe).view(n, kv, rep, d)
        return (out + self._from_groups(kernels.weigh(prefix, prompt_v, recipe))).view(n, kv * rep * d)

    def _to_groups(self, x: torch.Tensor) -> torch.Tensor:
        """[n, kv, rep, X] -> [groups * kv, widest * rep, X]."""
        _, kv, rep, last = x.shape
        if self._gather is not None:
            x = x[self._gather]
        x = x.reshape(self._groups, self._widest, kv, rep, last).transpose(1, 2)
        return x.reshape(self._groups * kv, self._widest * rep, last)

    def _from_groups(self, x: torch.Tensor) -> torch.Tensor:
        """[groups * kv, widest * rep, X] -> [n, kv, rep, X]."""
        kv, rep, last = self.arch.kv_heads, self.arch.queries_per_kv_head, x.shape[-1]
        x = x.view(self._groups, kv, self._widest, rep, last).transpose(1, 2)
        x = x.reshape(self._groups * self._widest, kv, rep, last)
        return x if self._scatter is None else x[self._scatter]

    def _prompt_chunk(
        self, layer: int, s: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self.cache.prompt_k[layer][s.prompt], self.cache.prompt_v[layer][s.prompt]
        if s.donor is not None:
            keys[:, : s.start] = self.cache.prompt_k[layer][s.donor, :, : s.start]
            values[:, : s.start] = self.cache.prompt_v[layer][s.donor, :, : s.start]
        keys[:, s.start : s.start + s.count] = k.transpose(0, 1)
        values[:, s.start : s.start + s.count] = v.transpose(0, 1)
        total = self.recipe.pad(s.start + s.count)
        q, c = self._by_kv_head(q), s.count
        scores = kernels.bmm(q, keys[:, :total].transpose(1, 2), self.recipe)
        scores = scores.view(self.arch.kv_heads, c, -1, total) + mask
        weights = torch.softmax(scores, -1).view(self.arch.kv_heads, -1, total)
        return self._by_row(kernels.weigh(weights, values[:, :total], self.recipe), c)

    def _suffix_chunk(
        self, layer: int, s: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self.cache.suffix_k[layer][s.slot], self.cache.suffix_v[layer][s.slot]
        keys[:, s.start : s.start + s.count] = k.transpose(0, 1)
        values[:, s.start : s.start + s.count] = v.transpose(0, 1)
        total, prefix = self.recipe.pad(s.start + s.count), self.recipe.pad(s.prompt_len)
        prompt_k = self.cache.prompt_k[layer][s.prompt][:, :prefix]
        prompt_v = self.cache.prompt_v[layer][s.prompt][:, :prefix]
        q, c, kv = self._by_kv_head(q), s.count, self.arch.kv_heads
        scores = torch.cat(
            [
                kernels.bmm(q, prompt_k.transpose(1, 2), self.recipe),
                kernels.bmm(q, keys[:, :total].transpose(1, 2), self.recipe),
            ],
            -1,
        )
        weights = torch.softmax(scores.view(kv, c, -1, prefix + total) + mask, -1).view(
            kv, -1, prefix + total
        )
        own = kernels.weigh(weights[..., prefix:], values[:, :total], self.recipe)
        return self._by_row(own + kernels.weigh(weights[..., :prefix], prompt_v, self.recipe), c)

    def _by_kv_head(self, q: torch.Tensor) -> torch.Tensor:
        """[c, heads, D] -> [kv, c * rep, D]."""
        kv, d = self.arch.kv_heads, self.arch.head_dim
        return q.reshape(q.shape[0], kv, -1, d).transpose(0, 1).reshape(kv, -1, d)

    def _by_row(self, out: torch.Tensor, count: int) -> torch.Tensor:
        """[kv, c * rep, D] -> [c, heads * D]."""
        kv, d = self.arch.kv_heads, self.arch.head_dim
        return out.view(kv, count, -1, d).transpose(0, 1).reshape(count, -1)

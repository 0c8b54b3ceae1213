"""Attention of one engine step: decoding rows in one go, prefill chunks one by one, in the trainer's op order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from croze.inference.cache import KVCache, Segment
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


class StepAttention:
    """Masks and indices of one step, made once; called per layer as ``Attend``. Writes the new keys and values."""

    def __init__(self, cache: KVCache, decoding: Decoding, segments: Sequence[Segment]) -> None:
        self.cache, self.decoding, self.segments = cache, decoding, segments
        self.arch, self.recipe = cache.arch, cache.recipe
        windows = self.arch.distinct_windows
        if len(decoding):
            self._plan_decoding(decoding)
            self._bias = {w: self._decoding_mask(decoding, w) for w in windows}
        self._masks = {w: [self._segment_mask(s, w) for s in segments] for w in windows}

    def _plan_decoding(self, decoding: Decoding) -> None:
        self._own_keys = self.recipe.pad(max(decoding.positions) + 1)
        self._prompt_keys = self.recipe.pad(max(decoding.prompt_lens))
        self._places = self.cache.places(torch.tensor(decoding.positions))
        self._plan_groups(decoding.prompts)

    def _decoding_mask(self, decoding: Decoding, window: int) -> torch.Tensor:
        rows, lens = torch.tensor(decoding.positions), torch.tensor(decoding.prompt_lens)
        keys, own = torch.arange(self._prompt_keys), torch.arange(self._own_keys)
        prefix = kernels.hidden(lens + rows, keys, window) | (keys >= lens[:, None])
        suffix = kernels.hidden(rows, own, window)
        return kernels.mask(torch.cat([prefix, suffix], 1), self.recipe)[:, None, None]

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

    def _segment_mask(self, s: Segment, window: int) -> torch.Tensor:
        rows, keys = s.start + torch.arange(s.count), torch.arange(self.recipe.pad(s.start + s.count))
        hidden = kernels.hidden(rows, keys, window)
        if s.slot is not None:
            keys = torch.arange(self.recipe.pad(s.prompt_len))
            prefix = kernels.hidden(s.prompt_len + rows, keys, window) | (keys >= s.prompt_len)
            hidden = torch.cat([prefix, hidden], 1)
        return kernels.mask(hidden, self.recipe)[None, :, None]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D]: decoding rows, then segments -> [N, heads * D]."""
        at, masks = len(self.decoding), self._masks[self.arch.window(layer)]
        parts = [self._decode(layer, q[:at], k[:at], v[:at])] if at else []
        for segment, mask in zip(self.segments, masks, strict=True):
            rows = slice(at, at + segment.count)
            run = self._prompt_chunk if segment.slot is None else self._suffix_chunk
            parts.append(run(layer, segment, q[rows], k[rows], v[rows], mask))
            at += segment.count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        arch, recipe, cache = self.arch, self.recipe, self.cache
        kv, rep, d, n = arch.kv_heads, arch.queries_per_kv_head, arch.head_dim, q.shape[0]
        cache.write_decoded(layer, self._places, k, v)
        own_k = cache.suffix_k[layer][:n].view(n * kv, -1, d)[:, : self._own_keys]
        own_v = cache.suffix_v[layer][:n].view(n * kv, -1, d)[:, : self._own_keys]
        q = q.reshape(n, kv, rep, d)
        own = kernels.bmm(q.view(n * kv, rep, d), own_k.transpose(1, 2), recipe).view(n, kv, rep, -1)
        prompt_k = cache.prompt_k[layer][: self._groups].view(self._groups * kv, -1, d)[
            :, : self._prompt_keys
        ]
        prompt_v = cache.prompt_v[layer][: self._groups].view(self._groups * kv, -1, d)[
            :, : self._prompt_keys
        ]
        shared = self._from_groups(kernels.bmm(self._to_groups(q), prompt_k.transpose(1, 2), recipe))
        weights = kernels.softmax(torch.cat([shared, own], -1).add_(self._bias[arch.window(layer)]), recipe)
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
        keys, values = self.cache.write_prompt(layer, s, k, v)
        total = self.recipe.pad(s.start + s.count)
        q, c = self._by_kv_head(q), s.count
        scores = kernels.bmm(q, keys[:, :total].transpose(1, 2), self.recipe)
        scores = scores.view(self.arch.kv_heads, c, -1, total) + mask
        weights = kernels.softmax(scores, self.recipe).view(self.arch.kv_heads, -1, total)
        return self._by_row(kernels.weigh(weights, values[:, :total], self.recipe), c)

    def _suffix_chunk(
        self, layer: int, s: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        keys, values = self.cache.write_suffix(layer, s, k, v)
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
        weights = kernels.softmax(scores.view(kv, c, -1, prefix + total) + mask, self.recipe)
        weights = weights.view(kv, -1, prefix + total)
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

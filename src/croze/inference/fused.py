"""Attention of one engine step by torch's fused kernels; see ``croze.models.fused``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from croze.inference.attention import Decoding
from croze.inference.cache import KVCache, Segment
from croze.models import kernels
from croze.models.fused import Causal

BLOCK_ROWS = 64
"""Most query rows that share one copy of their prompt: what a tensor core's tile holds anyway."""


class FusedStepAttention:
    """As ``StepAttention``. Decoding siblings attend in blocks: one copy of their prompt, then each one's own keys."""

    def __init__(self, cache: KVCache, decoding: Decoding, segments: Sequence[Segment]) -> None:
        assert cache.recipe.attention == "sdpa"
        self.cache, self.decoding, self.segments = cache, decoding, segments
        self.arch, self._attend = cache.arch, Causal(cache.arch)
        if len(decoding):
            self._plan_decoding(decoding)

    def _plan_decoding(self, decoding: Decoding) -> None:
        device, pad = self.cache.recipe.device, self.cache.recipe.pad
        positions, lens = torch.tensor(decoding.positions), torch.tensor(decoding.prompt_lens)
        self._places = self.cache.places(positions)
        self._prompt_keys, self._own_keys = pad(int(lens.max())), pad(int(positions.max()) + 1)
        blocks = self._blocks(decoding.prompts)
        self._count, self._width = len(blocks), max(map(len, blocks))
        # a short block is filled up with its first row, whose result is then not read
        rows = torch.tensor([(b + b[:1] * self._width)[: self._width] for b in blocks])
        taken = {row: i * self._width + j for i, b in enumerate(blocks) for j, row in enumerate(b)}
        self._prompts = torch.tensor([decoding.prompts[b[0]] for b in blocks], device=device)
        self._gather = rows.flatten().to(device)
        self._scatter = torch.tensor([taken[row] for row in range(len(decoding))], device=device)
        self._visible = {
            w: self._mask(positions[rows], lens[rows], w).to(device) for w in self.arch.distinct_windows
        }

    def _blocks(self, prompts: list[int]) -> list[list[int]]:
        """Rows that decode together: siblings of one prompt, not too many."""
        most = max(1, BLOCK_ROWS // self.arch.queries_per_kv_head)
        members: dict[int, list[int]] = {}
        for row, prompt in enumerate(prompts):
            members.setdefault(prompt, []).append(row)
        return [rows[i : i + most] for rows in members.values() for i in range(0, len(rows), most)]

    def _mask(self, positions: torch.Tensor, lens: torch.Tensor, window: int) -> torch.Tensor:
        """positions, lens [blocks, width] -> bool [blocks, 1, width * rep, keys], true where a row attends."""
        keys, own = torch.arange(self._prompt_keys), torch.arange(self._own_keys)
        blocks, width = positions.shape
        at, lens = positions.flatten(), lens.flatten()
        prefix = kernels.hidden(lens + at, keys, window) | (keys >= lens[:, None])
        suffix = kernels.hidden(at, own, window).view(blocks, width, 1, -1)
        others = ~torch.eye(width, dtype=torch.bool)[None, :, :, None]
        parts = [prefix.view(blocks, width, -1), (suffix | others).flatten(2)]
        return ~torch.cat(parts, 2).repeat_interleave(self.arch.queries_per_kv_head, 1)[:, None]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D]: decoding rows, then segments -> [N, heads * D]."""
        at = len(self.decoding)
        parts = [self._decode(layer, q[:at], k[:at], v[:at])] if at else []
        for segment in self.segments:
            rows = slice(at, at + segment.count)
            parts.append(self._chunk(layer, segment, q[rows], k[rows], v[rows]))
            at += segment.count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache, kv, rep, d = self.cache, self.arch.kv_heads, self.arch.queries_per_kv_head, q.shape[2]
        cache.write_decoded(layer, self._places, k, v)
        keys = self._behind(cache.prompt_k[layer], cache.suffix_k[layer])
        values = self._behind(cache.prompt_v[layer], cache.suffix_v[layer])
        q = q.index_select(0, self._gather).view(self._count, self._width, kv, rep, d).transpose(1, 2)
        mask = self._visible[self.arch.window(layer)]
        out = F.scaled_dot_product_attention(q.flatten(2, 3), keys, values, attn_mask=mask, scale=1.0)
        out = out.view(self._count, kv, self._width, rep, d).transpose(1, 2)
        return out.reshape(-1, kv * rep * d).index_select(0, self._scatter)

    def _behind(self, prompts: torch.Tensor, suffixes: torch.Tensor) -> torch.Tensor:
        """Of one layer's pools, each block's own keys behind its prompt's: [blocks, kv_heads, keys, D]."""
        shared = prompts[:, :, : self._prompt_keys].index_select(0, self._prompts)
        own = suffixes[:, :, : self._own_keys].index_select(0, self._gather)
        own = own.view(self._count, self._width, *own.shape[1:]).transpose(1, 2)
        return torch.cat([shared, own.flatten(2, 3)], 2)

    def _chunk(
        self, layer: int, s: Segment, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        stop, cache = s.start + s.count, self.cache
        if s.slot is None:
            keys, values = (x[:, :stop] for x in cache.write_prompt(layer, s, k, v))
        else:
            prompt = cache.prompt_k[layer][s.prompt], cache.prompt_v[layer][s.prompt]
            own = cache.write_suffix(layer, s, k, v)
            keys, values = (
                torch.cat([p[:, : s.prompt_len], x[:, :stop]], 1) for p, x in zip(prompt, own, strict=True)
            )
        return self._attend(q[None], keys[None], values[None], self.arch.window(layer))[0]

"""Attention by torch's fused kernels: faster where matrix products one by one are slow (CUDA), and never more
than close, since such a kernel sums in an order of its own that depends on the shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from croze.models import kernels
from croze.models.architecture import Architecture
from croze.models.numerics import Recipe
from croze.models.packing import Packing, Siblings, ragged, square


class Causal:
    """Attention of queries that stand at the last places of their keys; masks are kept from layer to layer."""

    def __init__(self, arch: Architecture) -> None:
        self._rep = arch.queries_per_kv_head
        self._masks: dict[tuple[int, int, int], torch.Tensor] = {}

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
        """q [n, c, heads, D] already scaled, k and v [n, kv_heads, T, D], T >= c -> [n, c, heads * D]."""
        n, c, heads, d = q.shape
        kv, keys, rep = k.shape[1], k.shape[2], self._rep
        if c == keys and not 0 < window < keys:
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, is_causal=True, scale=1.0, enable_gqa=rep > 1
            )
            return out.transpose(1, 2).reshape(n, c, heads * d)
        # the query heads of a key head as rows: kernels that take a mask know no grouped heads
        q = q.view(n, c, kv, rep, d).transpose(1, 2).reshape(n, kv, c * rep, d)
        mask = self._mask(c, keys, window, q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
        return out.view(n, kv, c, rep, d).transpose(1, 2).reshape(n, c, heads * d)

    def _mask(self, count: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
        """Which keys the queries attend to, bool [count * rep, keys]."""
        found = self._masks.get((count, keys, window))
        if found is None:
            places = torch.arange(keys, device=device)
            visible = ~kernels.hidden(places[keys - count :], places, window)
            found = self._masks[count, keys, window] = visible.repeat_interleave(self._rep, 0)
        return found


class FusedGroupAttention:
    """As ``GroupAttention``, by fused kernels; a prompt's keys and values are laid before each sibling's own."""

    def __init__(self, packing: Packing, arch: Architecture, recipe: Recipe) -> None:
        assert recipe.attention == "sdpa"
        self.arch, self.trunks, self._attend = arch, packing.trunks, Causal(arch)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D] -> [N, heads * D]."""
        parts, window = [], self.arch.window(layer)
        for trunk in self.trunks:
            common = slice(trunk.start, trunk.start + trunk.length)
            if trunk.length:
                parts.append(self._prompt(q[common], k[common], v[common], window))
            for block in trunk.blocks:
                own = slice(block.start, block.start + block.own)
                prompt_k = torch.cat([k[common], k[own]]) if trunk.length else k[own]
                prompt_v = torch.cat([v[common], v[own]]) if trunk.length else v[own]
                parts.append(self._prompt(q[own], prompt_k, prompt_v, window))
                for siblings in block.buckets:
                    keys, values = self._behind(prompt_k, k, siblings), self._behind(prompt_v, v, siblings)
                    parts.append(ragged(self._attend(square(q, siblings), keys, values, window), siblings))
        return torch.cat(parts)

    def _prompt(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
        return self._attend(q[None], k.transpose(0, 1)[None], v.transpose(0, 1)[None], window)[0]

    def _behind(self, prompt: torch.Tensor, x: torch.Tensor, siblings: Siblings) -> torch.Tensor:
        """Each sibling's rows of x behind the prompt's: [n, kv_heads, P + longest, D]."""
        own = square(x, siblings)
        return torch.cat([prompt.expand(len(own), *prompt.shape), own], 1).transpose(1, 2)

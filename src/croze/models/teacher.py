"""Teacher-forced log-probs of groups: the shared prompt once, siblings after it, the sampler's op order.

The canonical attention of a token is fixed per sample, never by batch: keys are the prompt's region, padded
to whole regions, then the suffix's; weights are one softmax over both; the two regions' sums are added suffix
first. The sampler computes the same (``croze.inference``), so log-probs are equal bit for bit.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from croze.models import kernels
from croze.models.architecture import Architecture
from croze.models.fused import FusedGroupAttention
from croze.models.numerics import Recipe
from croze.models.packing import Packing, Siblings, ragged, square
from croze.models.transformer import Attend


def group_attention(packing: Packing, arch: Architecture, recipe: Recipe) -> Attend:
    """Attention of a packed micro-batch in the recipe's form."""
    form = GroupAttention if recipe.attention == "exact" else FusedGroupAttention
    return form(packing, arch, recipe)


class GroupAttention:
    """Attention of a packed micro-batch; call it as ``Attend``."""

    def __init__(self, packing: Packing, arch: Architecture, recipe: Recipe) -> None:
        self.arch, self.recipe = arch, recipe
        self.trunks = packing.trunks
        self._masks = {window: self._every_mask(window) for window in arch.distinct_windows}

    def _every_mask(self, window: int) -> dict[int, torch.Tensor]:
        """By the id of the trunk, block or bucket whose rows it is for."""
        masks = {}
        for trunk in self.trunks:
            masks[id(trunk)] = self._prompt_mask(0, trunk.length, window)
            for block in trunk.blocks:
                masks[id(block)] = self._prompt_mask(trunk.length, block.own, window)
                for siblings in block.buckets:
                    masks[id(siblings)] = self._suffix_mask(block.prompt, siblings.longest, window)
        return masks

    def _prompt_mask(self, first: int, count: int, window: int) -> torch.Tensor:
        keys, rows = torch.arange(self.recipe.pad(first + count)), first + torch.arange(count)
        return kernels.mask(kernels.hidden(rows, keys, window), self.recipe)[None, :, None]

    def _suffix_mask(self, prompt: int, longest: int, window: int) -> torch.Tensor:
        keys, own, rows = (
            torch.arange(n) for n in (self.recipe.pad(prompt), self.recipe.pad(longest), longest)
        )
        prefix = kernels.hidden(prompt + rows, keys, window) | (keys >= prompt)
        suffix = kernels.hidden(rows, own, window)
        return kernels.mask(torch.cat([prefix, suffix], 1), self.recipe)[None, None, :, None]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [N, heads, D], k and v [N, kv_heads, D] -> [N, heads * D]."""
        parts, masks = [], self._masks[self.arch.window(layer)]
        for trunk in self.trunks:
            common = slice(trunk.start, trunk.start + trunk.length)
            if trunk.length:
                region_k, region_v = self._region(k[common]), self._region(v[common])
                parts.append(self._prompt(q[common], region_k, region_v, masks[id(trunk)]))
            for block in trunk.blocks:
                own = slice(block.start, block.start + block.own)
                prompt_k = self._region(torch.cat([k[common], k[own]]) if trunk.length else k[own])
                prompt_v = self._region(torch.cat([v[common], v[own]]) if trunk.length else v[own])
                parts.append(self._prompt(q[own], prompt_k, prompt_v, masks[id(block)]))
                parts += [self._suffixes(s, q, k, v, prompt_k, prompt_v, masks[id(s)]) for s in block.buckets]
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
        weights = kernels.softmax(scores, self.recipe).view(kv, p * rep, -1)
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
        kv, d, rep = self.arch.kv_heads, self.arch.head_dim, self.arch.queries_per_kv_head
        n, r, recipe = len(siblings.lengths), siblings.longest, self.recipe
        t, pp = recipe.pad(r), prompt_k.shape[1]
        k, v = (F.pad(square(x, siblings).transpose(1, 2), (0, 0, 0, t - r)) for x in (k, v))
        q = square(q, siblings).view(n, r, kv, rep, d).permute(0, 2, 1, 3, 4)
        own = kernels.bmm(q.reshape(n * kv, r * rep, d), k.reshape(n * kv, t, d).transpose(1, 2), recipe)
        shared = kernels.bmm(q.transpose(0, 1).reshape(kv, n * r * rep, d), prompt_k.transpose(1, 2), recipe)
        shared = shared.view(kv, n, r, rep, pp).transpose(0, 1)
        weights = kernels.softmax(torch.cat([shared, own.view(n, kv, r, rep, t)], -1) + mask, recipe)
        out = kernels.weigh(weights[..., pp:].reshape(n * kv, r * rep, t), v.reshape(n * kv, t, d), recipe)
        prefix = weights[..., :pp].transpose(0, 1).reshape(kv, n * r * rep, pp)
        prefix = kernels.weigh(prefix, prompt_v, recipe).view(kv, n, r, rep, d).transpose(0, 1)
        out = (out.view(n, kv, r, rep, d) + prefix).permute(0, 2, 1, 3, 4).reshape(n, r, kv * rep * d)
        return ragged(out, siblings)

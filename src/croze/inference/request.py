"""Whether a request makes sense: what is refused here cannot stop a step that others share."""

from __future__ import annotations

import math

import numpy as np

from croze.errors import UsageError
from croze.inference.protocol import Request, SamplingParams

STREAMS = 1 << 64
"""Stream keys and seeds are below this."""


def check_request(request: Request, vocab: int) -> None:
    """Raise UsageError unless the engine can run ``request`` on a model with ``vocab`` tokens."""
    where = f"request {request.id}"
    if len(request.prompt_P) == 0:
        raise UsageError("a request needs at least one prompt token", where=where)
    if not request.keys:
        raise UsageError("a request needs at least one sibling, so at least one key", where=where)
    if not all(0 <= key < STREAMS for key in (*request.keys, request.params.seed)):
        raise UsageError("keys and seed are unsigned 64-bit numbers", where=where)
    if request.suffixes and len(request.suffixes) != len(request.keys):
        raise UsageError(
            f"{len(request.suffixes)} suffixes for {len(request.keys)} siblings",
            where=where,
            fix="give one suffix a key, empty where there is none, or no suffixes at all",
        )
    check_tokens(where, vocab, request.prompt_P, *request.suffixes)
    _check_sampling(request.params, where)


def check_tokens(where: str, vocab: int, *arrays: np.ndarray) -> None:
    """Raise UsageError for an array with a token id outside [0, vocab)."""
    for ids in arrays:
        if len(ids) and not (ids.min() >= 0 and ids.max() < vocab):
            odd = ids[(ids < 0) | (ids >= vocab)][0]
            raise UsageError(
                f"token id {odd} is outside the model's vocabulary of {vocab}",
                where=where,
                fix="use the tokenizer that belongs to the model",
            )


def _check_sampling(params: SamplingParams, where: str) -> None:
    wants = {
        "temperature": ("finite and at least 0", 0.0 <= params.temperature < math.inf),
        "top_p": ("above 0 and at most 1", 0.0 < params.top_p <= 1.0),
        "top_k": ("at least 0 (0 keeps all)", params.top_k >= 0),
        "max_tokens": ("at least 1", params.max_tokens >= 1),
        "stop": ("free of empty strings", all(params.stop)),
    }
    for name, (wanted, holds) in wants.items():
        if not holds:
            raise UsageError(f"{name} must be {wanted}, got {getattr(params, name)!r}", where=where)

"""What an engine is: token ids in, a stream of (ids, log-probs, weights id) out, weights in two phases."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np

from croze.config import EngineOptions
from croze.types import Finish, WeightsId

if TYPE_CHECKING:
    from croze.models.device import ComputeThread
    from croze.models.protocol import ModelFiles, Tokenizer
    from croze.models.weights import ModelWeights


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's sampling. ``seed`` and the sibling's key select the Philox stream: one uniform per
    (key, position), so that tokens do not depend on what else is in the batch."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """``len(keys)`` siblings that continue one prompt. prompt_P int32 is prefilled once for all of them;
    suffixes[i] int32 (optional) are tokens sibling i already has after the prompt (earlier turns).
    ``keys`` are 64-bit stream ids."""

    id: str
    prompt_P: np.ndarray
    keys: tuple[int, ...]
    params: SamplingParams
    suffixes: tuple[np.ndarray, ...] = ()


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one sibling, all under one ``weights_id``; ``finish`` is set on its last chunk.
    ids_T int32, logprobs_T float32 (natural log, of the temperature-scaled distribution). ``waited_s``: seconds
    the sibling was held back before its first token because rows or KV memory were full; 0 where they were not."""

    request_id: str
    sibling: int
    ids_T: np.ndarray
    logprobs_T: np.ndarray
    weights_id: WeightsId
    finish: Finish | None = None
    waited_s: float = 0.0


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot: sequences decoding, requests queued, KV bytes used and their cap, tokens since start."""

    rows: int
    queued: int
    kv_bytes: int
    kv_limit_bytes: int
    prompt_tokens: int
    generated_tokens: int
    forwards: int


class Engine(Protocol):
    """A policy being served. All calls come from one event loop."""

    @property
    def weights_id(self) -> WeightsId: ...

    def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Chunks of all siblings as they come; closing the iterator aborts what is left."""
        ...

    async def abort(self, request_id: str) -> None:
        """End a request's siblings at the next token boundary with finish="aborted"."""
        ...

    async def score(self, prompt_P: np.ndarray, suffix_S: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        """Log-probs float32 [S] of each suffix token given all before it."""
        ...

    async def pause(self) -> None:
        """Stop at a token boundary; returns once no forward runs. Requests stay."""
        ...

    async def resume(self) -> None: ...

    async def prepare(self, weights_id: WeightsId, tensors: Iterable[tuple[str, Any]]) -> None:
        """Take new weights beside the served ones."""
        ...

    async def commit(self, weights_id: WeightsId) -> None:
        """Serve the prepared weights from the next token on."""
        ...

    def stats(self) -> EngineStats: ...

    async def health(self) -> float:
        """Seconds one real one-token decode took; raises EngineFault when it cannot."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """What an engine is built from: the argument of every factory in the entry point group ``croze.inference``.

    ``weights`` may be shared with a trainer of this process, whose forward passes read them; an engine that keeps
    its own takes the tensors that ``prepare`` brings. ``thread`` does the tensor work of this process.
    """

    files: ModelFiles
    options: EngineOptions
    tokenizer: Tokenizer
    weights: ModelWeights
    thread: ComputeThread

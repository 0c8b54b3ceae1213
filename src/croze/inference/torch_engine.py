"""``Engine`` over ``EngineCore``: an event loop outside, one compute thread inside."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import numpy as np

from croze.errors import CrozeError, EngineFault, UsageError
from croze.inference.core import EngineCore
from croze.inference.protocol import Chunk, EngineParts, EngineStats, Request, SamplingParams
from croze.models.device import ComputeThread
from croze.types import WeightsId

log = logging.getLogger("croze.inference")


class TorchEngine:
    """The built-in engine. Requests join and leave between steps; all methods are called from one event loop."""

    def __init__(self, core: EngineCore, thread: ComputeThread) -> None:
        self._core, self._thread = core, thread
        self._queues: dict[str, asyncio.Queue[Chunk | CrozeError]] = {}
        self._driver: asyncio.Task[None] | None = None
        self._running = asyncio.Event()
        self._running.set()
        self._closed = False
        self._prepared: tuple[WeightsId, list[tuple[str, Any]] | None] | None = None

    @property
    def weights_id(self) -> WeightsId:
        return self._core.weights_id

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        if self._closed:
            raise EngineFault("the engine is closed", where=f"request {request.id}")
        if request.id in self._queues:
            raise UsageError(f"request {request.id!r} is already running", where="engine")
        queue: asyncio.Queue[Chunk | CrozeError] = asyncio.Queue()
        self._queues[request.id] = queue
        alive = len(request.keys)
        try:
            await self._thread.run(self._core.submit, request)
            self._wake()
            while alive:
                item = await queue.get()
                if isinstance(item, CrozeError):
                    raise item
                alive -= item.finish is not None
                yield item
        finally:
            del self._queues[request.id]
            if alive:
                await self._thread.run(self._core.abort, request.id)

    async def abort(self, request_id: str) -> None:
        self._deliver(await self._thread.run(self._core.abort, request_id))

    def _wake(self) -> None:
        if not self._closed and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._drive(), name="engine")

    async def _drive(self) -> None:
        """Step while there is work. An error ends every request, and each waiter learns of it."""
        while self._core.busy:
            await self._running.wait()
            try:
                chunks = await self._thread.run(self._core.step)
            except Exception as error:  # supervision boundary: the engine's waiters must not hang
                if not isinstance(error, CrozeError):  # that one says all there is to say
                    log.exception("the engine's step failed")
                await self._thread.run(self._core.reset)
                self._fail(error)
                return
            self._deliver(chunks)

    def _deliver(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            if queue := self._queues.get(chunk.request_id):
                queue.put_nowait(chunk)

    def _fail(self, cause: Exception) -> None:
        for queue in self._queues.values():
            # one exception object a waiter: the tracebacks of several tasks would pile up on a shared one
            if isinstance(cause, CrozeError):
                error = type(cause)(cause.message, where=cause.where, fix=cause.fix)
            else:
                error = EngineFault(f"{type(cause).__name__}: {cause}", where="engine step")
            error.__cause__ = cause
            queue.put_nowait(error)

    async def score(self, prompt_P: np.ndarray, suffix_S: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        return await self._thread.run(self._core.score, prompt_P, suffix_S, temperature)

    async def pause(self) -> None:
        self._running.clear()
        await self._thread.run(lambda: None)

    async def resume(self) -> None:
        self._running.set()

    async def prepare(self, weights_id: WeightsId, tensors: Iterable[tuple[str, Any]]) -> None:
        """Keep references until commit; nothing is copied where the weights are shared and already current."""
        if self._core.weights.weights_id == weights_id:
            self._prepared = (weights_id, None)
        else:
            self._prepared = (weights_id, [(name, tensor) for name, tensor in tensors])

    async def commit(self, weights_id: WeightsId) -> None:
        if self._prepared is None or self._prepared[0] != weights_id:
            raise EngineFault(f"weights {weights_id[:12]} were not prepared", where="engine commit")
        tensors, self._prepared = self._prepared[1], None
        await self._thread.run(self._core.load, weights_id, tensors)

    def stats(self) -> EngineStats:
        return self._core.stats()

    async def health(self) -> float:
        """Seconds one real one-token decode took; a paused engine cannot do one and raises EngineFault."""
        if not self._running.is_set():
            raise EngineFault("the engine is paused", where="engine health", fix="resume it")
        start = time.monotonic()
        probe = Request(
            id=f"health-{start}",
            prompt_P=np.zeros(1, np.int32),
            keys=(0,),
            params=SamplingParams(max_tokens=1),
        )
        async for _ in self.generate(probe):
            pass
        return time.monotonic() - start

    async def close(self) -> None:
        """Stop; whoever still waits for tokens gets an EngineFault."""
        self._closed = True
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.gather(self._driver, return_exceptions=True)
        self._fail(EngineFault("the engine was closed"))


def build(parts: EngineParts) -> TorchEngine:
    """The built-in engine; entry point ``torch`` of ``croze.inference``."""
    return TorchEngine(EngineCore(parts.weights, parts.options, parts.tokenizer), parts.thread)

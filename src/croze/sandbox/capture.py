"""Draining a program's output: all of it read, its head and tail kept, its size bounded."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from croze.sandbox.protocol import KEPT_BYTES

_CHUNK = 64 * 1024


class Capture:
    """Reads a pipe on the event loop until its end. ``overflow`` is called once, when ``limit`` is passed."""

    def __init__(self, *, limit: int, overflow: Callable[[], None], kept: int = KEPT_BYTES) -> None:
        self.read_fd, self.write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self.total = 0
        self._kept = kept
        self._limit = limit
        self._overflow: Callable[[], None] | None = overflow
        self._head = bytearray()
        self._tail = bytearray()
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._loop.add_reader(self.read_fd, self._readable)

    def _readable(self) -> None:
        try:
            chunk = os.read(self.read_fd, _CHUNK)
        except BlockingIOError:
            return
        if not chunk:
            self._end()
            return
        self._keep(chunk)
        if self.total > self._limit and self._overflow is not None:
            overflow, self._overflow = self._overflow, None
            overflow()

    def _keep(self, chunk: bytes) -> None:
        self.total += len(chunk)
        room = self._kept - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        if len(self._tail) > 2 * self._kept:
            del self._tail[: -self._kept]

    def _end(self) -> None:
        self._loop.remove_reader(self.read_fd)
        if not self._ended.done():
            self._ended.set_result(None)

    def started(self) -> None:
        """The program holds the write end now: let go of ours."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    async def end(self, wait_s: float) -> None:
        """Until the last writer is gone, at most ``wait_s`` seconds."""
        await asyncio.wait([self._ended], timeout=wait_s)

    def close(self) -> None:
        self.started()
        if self.read_fd >= 0:
            self._loop.remove_reader(self.read_fd)
            os.close(self.read_fd)
            self.read_fd = -1

    @property
    def kept(self) -> bytes:
        return bytes(self._head + self._tail[-self._kept :])

    @property
    def truncated(self) -> bool:
        return self.total > 2 * self._kept

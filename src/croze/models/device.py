"""One thread that does all tensor work of a process, so that an event loop never blocks on it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


def usable_cores() -> int:
    """Cores this process may run on, where the system says so; else all there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class ComputeThread:
    """Runs calls one after another on its own thread with ``threads`` torch threads (0: usable cores).

    Engine and trainer of one process share it: they never compute at once, and OpenMP keeps one pool.
    """

    def __init__(self, threads: int = 0) -> None:
        self.threads = threads or usable_cores()
        self._pool = ThreadPoolExecutor(
            1, "compute", initializer=torch.set_num_threads, initargs=(self.threads,)
        )

    async def run(self, call: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, call, *args)

    def run_now(self, call: Callable[..., T], *args: object) -> T:
        """The same, blocking; for set-up code outside an event loop."""
        return self._pool.submit(call, *args).result()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

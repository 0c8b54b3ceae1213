"""Waiting for child processes on the event loop, without a thread each."""

from __future__ import annotations

import asyncio
import os
import subprocess


async def ended(process: subprocess.Popen[bytes], wait_s: float) -> bool:
    """Until the process has ended and is reaped; False if it still runs after ``wait_s`` seconds."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    try:
        fd = os.pidfd_open(process.pid)
    except (AttributeError, OSError):
        fd = -1
    try:
        if fd >= 0 and process.poll() is None:
            gone = loop.create_future()
            loop.add_reader(fd, lambda: gone.done() or gone.set_result(None))
            await asyncio.wait([gone], timeout=wait_s)
        while process.poll() is None:
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(0.005)
        return True
    finally:
        if fd >= 0:
            loop.remove_reader(fd)
            os.close(fd)

"""Sandboxes for the tests: one driver a test, closed with everything that it made."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from croze.sandbox.bubblewrap import Bubblewrap, BubblewrapSandbox
from croze.sandbox.protocol import Limits

SMALL = Limits(cpu_s=5, wall_s=8, memory_mib=96, pids=24, disk_mib=16)


@pytest.fixture
def inside() -> Callable[..., Any]:
    """Run an async function on a fresh sandbox and return what it returns."""

    def run(work: Callable[[BubblewrapSandbox], Awaitable[Any]], limits: Limits = SMALL) -> Any:
        async def main() -> Any:
            driver = Bubblewrap()
            try:
                async with await driver.create(limits=limits) as sandbox:
                    return await work(sandbox)
            finally:
                await driver.close()

        return asyncio.run(main())

    return run

"""A sandbox that is made when it is first used: what a reward call is handed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from croze.sandbox.protocol import BOX, Driver, ExecResult, Limits, Sandbox, Tier


class LazySandbox(Sandbox):
    """Stands for a sandbox of ``driver``, and destroys it, and every sibling asked for, with itself."""

    def __init__(self, driver: Driver, limits: Limits) -> None:
        self.driver = driver.name
        self.tier: Tier = driver.tier
        self._make: Callable[[], Awaitable[Sandbox]] = lambda: driver.create(limits=limits)
        self._first = asyncio.Lock()
        self._made: Sandbox | None = None
        self._siblings: list[Sandbox] = []

    async def _real(self) -> Sandbox:
        async with self._first:
            if self._made is None:
                self._made = await self._make()
            return self._made

    async def exec(self, argv, *, stdin=b"", env=None, cwd=None, cpu_s=None, wall_s=None) -> ExecResult:
        real = await self._real()
        return await real.exec(argv, stdin=stdin, env=env, cwd=cwd, cpu_s=cpu_s, wall_s=wall_s)

    async def exec_python(
        self, code, *, stdin=b"", env=None, cwd=None, cpu_s=None, wall_s=None
    ) -> ExecResult:
        real = await self._real()
        return await real.exec_python(code, stdin=stdin, env=env, cwd=cwd, cpu_s=cpu_s, wall_s=wall_s)

    async def read(self, path: str) -> bytes:
        return await (await self._real()).read(path)

    async def write(self, path: str, data: bytes | str) -> None:
        await (await self._real()).write(path, data)

    async def list(self, path: str = BOX) -> Sequence[str]:
        return await (await self._real()).list(path)

    async def sibling(self) -> Sandbox:
        made = await self._make()
        self._siblings.append(made)
        return made

    async def destroy(self) -> None:
        made = [s for s in (self._made, *self._siblings) if s is not None]
        await asyncio.gather(*(s.destroy() for s in made))

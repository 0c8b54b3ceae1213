"""A wish to stop: made once from outside, met where the loop can leave off without losing a step."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """The wish was met; what was under way has been cancelled."""


class Stop:
    """``ask`` for it; work that is given to ``unless`` is cancelled then. Used from one event loop."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()

    def ask(self) -> None:
        self._asked.set()

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    async def unless(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result; raises Stopped, with the work ended, when asked to stop before there is one."""
        if self.asked:
            work.close()
            raise Stopped
        doing = asyncio.create_task(work)
        waiting = asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({doing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            if not doing.done():
                doing.cancel()
                await asyncio.wait({doing})
        if doing.cancelled():
            raise Stopped
        return doing.result()

"""Ctrl-C and SIGTERM: asked once, a run leaves off at the next good place; asked twice, at once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, TypeVar

from croze.errors import Interrupted
from croze.loop.stop import Stop

T = TypeVar("T")
OnEvent = Callable[[dict[str, Any]], None]
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_cancellable(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; a signal becomes Interrupted once what was open has been closed."""

    async def watched() -> T:
        task = asyncio.current_task()
        assert task is not None
        _on_signals(task.cancel)
        return await work

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        raise Interrupted("stopped from outside before the end") from None


def run_stoppable(work: Coroutine[Any, Any, T], stop: Stop, listen: OnEvent, run_dir: str) -> T:
    """Run to the end; the first signal asks ``stop``, the second ends the process, whose run can be resumed."""

    def asked() -> None:
        if stop.asked:
            _end_now(listen, run_dir)
        stop.ask()
        listen({"event": "stopping", "message": "saving what is trained; once more ends it at once"})

    async def watched() -> T:
        _on_signals(asked)
        return await work

    return asyncio.run(watched())


def while_heard(listen: OnEvent, unheard: Callable[[], None]) -> OnEvent:
    """``listen``, until the reader of what it writes has gone: then ``unheard`` is called, and nobody told any more.

    Ctrl-C in ``croze train FILE | tee log`` ends tee too, and what is trained is to be saved all the same.
    """
    gone = False

    def tell(event: dict[str, Any]) -> None:
        nonlocal gone
        try:
            if not gone:
                listen(event)
        except BrokenPipeError:
            gone = True
            unheard()

    return tell


def _end_now(listen: OnEvent, run_dir: str) -> NoReturn:
    """Without another look at what runs: the kernel ends what this process has started."""
    try:
        listen(
            {
                "event": "error",
                "kind": Interrupted.kind,
                "message": "stopped at once; what was not saved will be made again",
                "where": run_dir,
                "fix": f"croze resume {run_dir}",
            }
        )
    finally:
        os._exit(Interrupted.exit_code)


def _on_signals(call: Callable[[], object]) -> None:
    """Signals reach only a process's main thread; elsewhere whoever called us has them."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            asyncio.get_running_loop().add_signal_handler(number, call)

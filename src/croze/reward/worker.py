"""The reward worker (``python -m croze.reward.worker``): calls user code, and may be killed for it.

Asynchronous rewards run on its event loop, others in threads. It imports no torch. What user code prints goes
to its stdout and stderr; messages have a socket of their own. Which call's step holds the loop stands in a
shared word of memory, so that the judge can read it even when nothing here answers any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import mmap
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from croze import wire
from croze.errors import CrozeError, DeclarationError, RewardFault, told
from croze.reward import call as calling
from croze.reward.locate import first_line, load
from croze.reward.messages import Call, Ping, Pong, Ready, Refused, Result, Setup, ToWorker
from croze.sandbox.drivers import open_driver
from croze.sandbox.lazy import LazySandbox
from croze.sandbox.protocol import Driver, Limits
from croze.types import Outcome, Rollout

_PR_SET_PDEATHSIG = 1
_CLOSE_S = 2.0
_MESSAGE = 1000
_LOST_CHANNEL = 70


class Marked:
    """Awaits a coroutine and notes, in shared memory, whenever one of its steps runs."""

    def __init__(self, steps: Coroutine[Any, Any, Any], mark: mmap.mmap, number: int) -> None:
        self._steps = steps
        self._mark = mark
        self._number = number

    def __await__(self) -> Generator[Any, Any, Any]:
        value, error = None, None
        while True:
            self._mark[:8] = self._number.to_bytes(8, "little")
            try:
                waiting = self._steps.send(value) if error is None else self._steps.throw(error)
            except StopIteration as stop:
                return stop.value
            finally:
                self._mark[:8] = bytes(8)
            value, error = None, None
            try:
                value = yield waiting
            except BaseException as thrown:  # handed on, whatever it is
                error = thrown


class Channel:
    """The socket to the judge, as a descriptor that user code may close."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._file = self._identity()

    def _identity(self) -> tuple[int, int] | None:
        try:
            stat = os.fstat(self._fd)
        except OSError:
            return None
        return stat.st_dev, stat.st_ino

    def exit_if_lost(self) -> None:
        """End this process where the descriptor is closed, or by now another file's."""
        if self._identity() != self._file:
            with contextlib.suppress(OSError):
                os.write(2, b"the reward closed file descriptors that were not its own\n")
            os._exit(_LOST_CHANNEL)


class Worker:
    """One worker's life: set up, serve calls until the judge hangs up."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        mark: mmap.mmap,
        channel: Channel,
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._mark = mark
        self._channel = channel
        self._closing = False
        self._driver: Driver | None = None
        self._opening = asyncio.Lock()
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        setup = await self._receive()
        if not isinstance(setup, Setup):
            return
        if not await self._set_up(setup):
            return
        while (message := await self._receive()) is not None:
            if isinstance(message, Ping):
                self._send(Pong())
            elif isinstance(message, Call):
                task = asyncio.create_task(self._answer(message))
                self._running.add(task)
                task.add_done_callback(self._running.discard)

    async def _set_up(self, setup: Setup) -> bool:
        self._options, self._sandbox = setup.options, setup.sandbox
        if setup.again:
            logging.getLogger("croze.sandbox").setLevel(logging.ERROR)
        self._file = setup.reward.file
        self._memory_mib = _limit_memory(setup)
        self._pool = ThreadPoolExecutor(setup.options.concurrency, thread_name_prefix="reward")
        try:
            self._reward = load(setup.reward)
            self._spec = calling.inspect_reward(self._reward)
            if self._spec.needs_sandbox:
                await self._open()
        except CrozeError as error:
            self._send(Refused(kind=error.kind, message=error.message, where=error.where, fix=error.fix))
            return False
        except BaseException as error:  # user code at import: a supervision boundary
            message = f"the reward's file cannot be imported in the reward's own process: {self._told(error)}"
            fix = (
                "it is imported there once more, without the command line's words: see that it does the same"
            )
            self._send(Refused(kind=DeclarationError.kind, message=message, where=self._file, fix=fix))
            return False
        self._send(Ready())
        return True

    def _told(self, error: BaseException) -> str:
        """Type, text and place of an error: the innermost line of the user's own file, else the innermost.

        What croze says of a value that was returned belongs to the reward as a whole."""
        if isinstance(error, RewardFault):
            return f"{error.message} ({first_line(self._reward)})"
        if isinstance(error, SyntaxError) and error.filename:
            return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno})"[:_MESSAGE]
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if os.path.realpath(f.filename) == os.path.realpath(self._file)]
        place = f" ({(own or frames)[-1].filename}:{(own or frames)[-1].lineno})" if frames else ""
        if isinstance(error, MemoryError):
            place += f"; reward.memory_mib allows {self._memory_mib} MiB"
        return told(error, limit=_MESSAGE - len(place)) + place

    def _in_thread(self, words: dict[str, Any]) -> tuple[Any, BaseException | None]:
        """What the reward returned, or raised: no future takes a StopIteration or an end of another's loop."""
        try:
            return self._reward(**words), None
        except BaseException as error:  # user code: a supervision boundary
            return None, error
        finally:
            self._channel.exit_if_lost()  # the loop would wait for ever for an event that cannot come

    async def close(self) -> None:
        """End every call and its sandboxes."""
        self._closing = True
        for task in self._running:
            task.cancel()
        await asyncio.wait(self._running) if self._running else None
        if self._driver is not None:
            await self._driver.close()

    async def _receive(self) -> Any:
        data = await wire.read_frame(self._reader)
        return None if data is None else wire.decode(data, ToWorker)

    def _send(self, message: Any) -> None:
        self._writer.write(wire.frame(wire.encode(message)))

    async def _open(self) -> Driver:
        async with self._opening:
            if self._driver is None:
                self._driver = await open_driver(
                    self._sandbox.driver, allow_unsafe=self._sandbox.allow_unsafe
                )
            return self._driver

    async def _answer(self, call: Call) -> None:
        try:
            outcomes = await self._judge(call)
        except BaseException as error:  # user code: a supervision boundary
            if self._closing:
                raise
            outcome = Outcome(valid=False, fault="infra", message=self._told(error))
            outcomes = [outcome] * len(call.rollouts)
        self._send(Result(id=call.id, outcomes=outcomes))

    async def _judge(self, call: Call) -> list[Outcome]:
        sandbox = (
            LazySandbox(await self._open(), Limits.of(self._sandbox)) if self._spec.needs_sandbox else None
        )
        limit = self._options.timeout_s
        try:
            async with asyncio.timeout(limit if self._spec.is_async else None) as deadline:
                return await self._invoke(call, sandbox)
        except TimeoutError:
            if not deadline.expired():
                raise
            message = f"{self._spec.name} took longer than reward.timeout_s={limit:g}"
            return [Outcome(valid=False, fault="unknown", message=message)] * len(call.rollouts)
        finally:
            if sandbox is not None:
                await sandbox.destroy()

    async def _invoke(self, call: Call, sandbox: LazySandbox | None) -> list[Outcome]:
        spec, rollouts = self._spec, call.rollouts
        if spec.batched:
            words = calling.batched_arguments(spec, rollouts, sandbox)
        else:
            words = calling.arguments(spec, _single(rollouts), sandbox)
        if spec.is_async:
            value = await Marked(self._reward(**words), self._mark, call.id)
        else:
            loop = asyncio.get_running_loop()
            value, error = await loop.run_in_executor(self._pool, lambda: self._in_thread(words))
            if isinstance(error, StopIteration):  # which a coroutine must not raise
                error = RuntimeError(told(error)).with_traceback(error.__traceback__)
            if error is not None:
                raise error
        if spec.batched:
            return calling.outcomes_of(value, spec.name, len(rollouts))
        return [calling.outcome_of(value, spec.name)]


def _single(rollouts: list[Rollout]) -> Rollout:
    (rollout,) = rollouts
    return rollout


def _limit_memory(setup: Setup) -> int:
    """Hold this process, and each below it, to memory of its own that it may write to; the limit in MiB.

    Not less than a sandbox needs. The kernel refuses more, which Python raises where it is asked for.
    """
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 21
    limit = max(setup.options.memory_mib or half, setup.sandbox.memory_mib)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (limit << 20 if hard < 0 else min(limit << 20, hard), hard))
    return limit


def _die_with(parent: int) -> None:
    """Not to survive the judge; and of the two the kernel shall kill this one when memory runs out."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with open("/proc/self/oom_score_adj", "w") as f:
            f.write("500")
    if os.getppid() != parent:
        sys.exit(0)


async def _main(fd: int, mark: mmap.mmap) -> None:
    channel = Channel(fd)
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=fd))
    worker = Worker(reader, writer, mark, channel)
    await worker.serve()
    ending = [asyncio.ensure_future(end) for end in (worker.close(), writer.drain())]
    await asyncio.wait(ending, timeout=_CLOSE_S)


if __name__ == "__main__":
    _fd, _mark_fd, _parent = map(int, sys.argv[1:])
    _die_with(_parent)
    sys.argv = sys.argv[:1]
    os.environ["CROZE_ROLE"] = "reward"
    _code = 1
    try:
        asyncio.new_event_loop().run_until_complete(_main(_fd, mmap.mmap(_mark_fd, 4096)))
        _code = 0
    except (
        BaseException
    ):  # the loop's own descriptors closed under it, say: the end of a process, whatever it is
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(_code)  # a reward that never returns, in a thread or a task, must not keep the process

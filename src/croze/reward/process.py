"""The reward worker as the judge holds it: started, spoken to, heard, killed with everything it started."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from croze import wire
from croze.errors import (
    ConfigError,
    DeclarationError,
    PluginError,
    RewardFault,
    SandboxFault,
    SandboxLost,
    SandboxUnavailable,
)
from croze.reward.messages import FromWorker, Ready, Refused, Setup
from croze.sandbox import cgroup
from croze.sandbox.children import ended

_START_S = 120.0
"""Importing the reward's file may import much."""
_END_S = 3.0
_DEAF_S = 1.0
"""A worker without its socket exits at once; code that holds it up only makes its neighbours wait."""
_TAIL = 4096

_REFUSALS = {
    error.kind: error
    for error in (
        ConfigError,
        DeclarationError,
        PluginError,
        SandboxFault,
        SandboxLost,
        SandboxUnavailable,
    )
}
"""Why a worker may say that it cannot work; all else is a RewardFault."""

_MARK = "CROZE_REWARD_WORKER"
"""Names a worker in the environment of all that it starts, so that they are found though they have left it."""

Output = Callable[[bytes], None]


class WorkerProcess:
    """One worker. ``output`` gets what its code prints; ``tail`` keeps the end of it."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._tail = bytearray()
        self._mark_fd = os.memfd_create("croze-mark") if sys.platform == "linux" else _anonymous_file()
        os.truncate(self._mark_fd, mmap.PAGESIZE)
        self._mark = mmap.mmap(self._mark_fd, mmap.PAGESIZE)
        self._process: subprocess.Popen[bytes] | None = None
        self._name = secrets.token_hex(16)
        self._out = -1

    async def start(self, setup: Setup) -> None:
        """Raises DeclarationError or RewardFault with what the worker said."""
        try:
            await self._launch()
            self.send(setup)
            await self._welcome(setup)
        except BaseException:
            await self.kill()
            raise

    async def _launch(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._reader, self._writer = await asyncio.open_connection(sock=ours)
            self._out, out_write = os.pipe()
            try:
                self._process = self._spawn(theirs.fileno(), out_write)
            finally:
                os.close(out_write)
        os.set_blocking(self._out, False)
        asyncio.get_running_loop().add_reader(self._out, self._printed)

    def _spawn(self, control: int, output: int) -> subprocess.Popen[bytes]:
        numbers = map(str, (control, self._mark_fd, os.getpid()))
        return subprocess.Popen(
            [sys.executable, "-m", "croze.reward.worker", *numbers],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=(control, self._mark_fd),
            start_new_session=True,
            env={**os.environ, _MARK: self._name, "PYTHONPATH": os.pathsep.join(_import_path())},
        )

    async def _welcome(self, setup: Setup) -> None:
        try:
            answer = await asyncio.wait_for(self.receive(), _START_S)
        except TimeoutError:
            raise RewardFault(
                f"the reward worker was not ready within {_START_S:g} s{self.last_words}",
                where="reward worker",
                fix="what takes long belongs into a function, not into what runs when the file is imported",
            ) from None
        if isinstance(answer, Refused):
            error = _REFUSALS.get(answer.kind, RewardFault)
            raise error(answer.message, where=answer.where, fix=answer.fix)
        if not isinstance(answer, Ready):
            raise RewardFault(
                f"the reward worker {await self.how_it_ended()}, while it imported the reward's file",
                where=setup.reward.file,
                fix="it is imported there once more: see that nothing in it ends the process",
            )

    def send(self, message: Any) -> None:
        self._writer.write(wire.frame(wire.encode(message)))

    async def receive(self) -> Any:
        """The next message, or None when the worker has gone."""
        data = await wire.read_frame(self._reader)
        return None if data is None else wire.decode(data, FromWorker)

    def _printed(self) -> None:
        try:
            data = os.read(self._out, 65536)
        except BlockingIOError:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._out)
            return
        self._tail += data
        del self._tail[:-_TAIL]
        self._output(data)

    @property
    def pid(self) -> int:
        """Its process id; 0 before it is started."""
        return 0 if self._process is None else self._process.pid

    @property
    def running(self) -> int:
        """The call whose step holds the worker's loop; 0 if none does."""
        return int.from_bytes(self._mark[:8], "little")

    @property
    def last_words(self) -> str:
        text = self._tail.decode("utf-8", "replace").strip()
        return f"; it last printed: {text[-500:]}" if text else ""

    async def how_it_ended(self) -> str:
        code = await self._exit_code(_DEAF_S)
        if code is None:
            return "closed its socket" + self.last_words
        if code == -signal.SIGKILL:
            return "was killed from outside (is the machine's memory used up?)" + self.last_words
        if code < 0:
            return f"died of {signal.Signals(-code).name}" + self.last_words
        return f"exited with code {code}" + self.last_words

    async def _exit_code(self, wait_s: float = _END_S) -> int | None:
        if self._process is None:
            return None
        await ended(self._process, wait_s)
        return self._process.returncode

    async def close(self) -> None:
        """Let it destroy its sandboxes, then see that it is gone."""
        self._writer.close()
        await self._exit_code()
        await self.kill()

    async def kill(self) -> None:
        """End the worker and every process under it, and what those left behind."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._exit_code()
            await self._end_all_below()
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
        self._let_go()
        if (groups := cgroup.find()) is not None:
            groups.sweep()

    async def _end_all_below(self) -> None:
        """Kill what the worker started; what starts others meanwhile is met again."""
        until = time.monotonic() + _END_S
        while (below := _marked(self._name)) and time.monotonic() < until:
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.002)

    def _let_go(self) -> None:
        if self._out >= 0:
            asyncio.get_running_loop().remove_reader(self._out)
            os.close(self._out)
            self._out = -1
        if self._mark_fd >= 0:
            os.close(self._mark_fd)
            self._mark_fd = -1


def _anonymous_file() -> int:
    import tempfile

    fd, path = tempfile.mkstemp(prefix="croze-mark-")
    os.unlink(path)
    return fd


def _import_path() -> list[str]:
    """So that the worker finds croze where this process found it, and keeps the user's own PYTHONPATH."""
    home = str(Path(__file__).resolve().parents[2])
    return [home, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]


def _marked(name: str) -> list[int]:
    """Every process that was started below the worker called ``name``, wherever it has gone since, and does not
    end already. Linux only; elsewhere the process group must do."""
    mark, found = f"{_MARK}={name}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # gone, or another user's
            continue
    return found

"""Starting one bwrap, from its command line to the guest's "ready", and ending it with all that is inside."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec

from croze.errors import SandboxFault, SandboxUnavailable
from croze.sandbox import jail
from croze.sandbox.cgroup import Cgroup
from croze.sandbox.children import ended
from croze.sandbox.protocol import Limits

_START_S = 20.0
_END_S = 10.0

_FIX = (
    "in a container allow user namespaces (docker run --security-opt seccomp=unconfined --security-opt"
    " systempaths=unconfined); on Ubuntu set kernel.apparmor_restrict_unprivileged_userns=0; or run model"
    " code unisolated with sandbox.allow_unsafe=true"
)


class Start:
    """One bwrap, its limits, its cgroup and its control socket."""

    def __init__(self, limits: Limits, group: Cgroup | None) -> None:
        self.limits = limits
        self.group = group
        self.control, self._inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.setblocking(False)
        self._errors = os.memfd_create("croze-stderr")
        self.process: subprocess.Popen[bytes] | None = None

    async def run(
        self,
        words: Callable[[jail.Descriptors], list[str]],
        *,
        guest: bytes,
        filter_: bytes | None,
        own_user: bool,
    ) -> None:
        """Raises SandboxUnavailable with what bwrap said."""
        with contextlib.ExitStack() as stack:

            def keep(fd: int) -> int:
                stack.callback(os.close, fd)
                return fd

            info_write = block_read = None
            if own_user:
                info_read, info_write = map(keep, os.pipe())
                block_read, block_write = map(keep, os.pipe())
            fds = jail.Descriptors(
                control=self._inner.fileno(),
                guest=keep(memory_file(guest)),
                filter=None if filter_ is None else keep(memory_file(filter_)),
                info=info_write,
                block=block_read,
            )
            groups = self.group.join_files if self.group else []
            self.process = subprocess.Popen(
                jail.joining(groups, words(fds)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=fds.all,
                env={},
            )
            self._inner.close()
            if own_user:
                await self._map_users(info_read, block_write)
        await self._ready()

    async def _map_users(self, info_read: int, block_write: int) -> None:
        """Root of the inside is ours; programs get a user that nothing else on this machine has."""
        pid = await _child_pid(info_read)
        if pid is None:
            raise self._unavailable()
        try:
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{pid}/{name}").write_text(f"0 0 1\n{jail.INNER_UID} {jail.INNER_UID + pid} 1\n")
        except OSError as error:
            raise SandboxUnavailable(f"cannot map users: {error}", where="sandbox", fix=_FIX) from error
        os.write(block_write, b"1")

    async def _ready(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            word = await asyncio.wait_for(loop.sock_recv(self.control, 16), _START_S)
        except TimeoutError:
            raise SandboxFault(f"a sandbox did not start within {_START_S:g} s", where="sandbox") from None
        except OSError:
            word = b""
        if word != b"R":
            raise self._unavailable()

    def _unavailable(self) -> SandboxUnavailable:
        said = os.pread(self._errors, 2000, 0).decode("utf-8", "replace").strip()
        return SandboxUnavailable(
            f"bubblewrap cannot isolate here: {said or 'no message'}", where="sandbox", fix=_FIX
        )

    def hang_up(self) -> None:
        """End the guest, and with process 1 all else; whoever waits for its word sees the end."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)

    async def abandon(self) -> None:
        """Leave nothing behind."""
        self.hang_up()
        self.control.close()
        self._inner.close()
        if self.process is not None and not await ended(self.process, 2.0):
            self.process.kill()
            await ended(self.process, _END_S)
        os.close(self._errors)
        if self.group is not None:
            await self.group.remove()


async def _child_pid(fd: int) -> int | None:
    """What ``--info-fd`` says, read to its end; None if bwrap died before."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()
    data = bytearray()

    def readable() -> None:
        chunk = os.read(fd, 4096)
        data.extend(chunk)
        if (not chunk or b"}" in chunk) and not done.done():
            done.set_result(None)

    loop.add_reader(fd, readable)
    try:
        await asyncio.wait([done], timeout=_START_S)
    finally:
        loop.remove_reader(fd)
    try:
        return msgspec.json.decode(bytes(data), type=dict[str, int]).get("child-pid")
    except msgspec.DecodeError:
        return None


def memory_file(data: bytes) -> int:
    fd = os.memfd_create("croze")
    os.truncate(fd, len(data))
    os.pwrite(fd, data, 0)
    return fd

"""Plain subprocesses: no isolation at all, tier "unsafe". Only with ``allow_unsafe=True``.

Programs run as this user, in a directory of their own, with rlimits and a deadline. They can read and change
whatever this user can. Inside them ``/box`` does not exist: use relative paths.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from croze.errors import SandboxLost, SandboxUnsupported
from croze.sandbox.capture import Capture
from croze.sandbox.children import ended
from croze.sandbox.jail import ENVIRONMENT
from croze.sandbox.protocol import BOX, ExecResult, Limits, Net, Sandbox, Status, Tier
from croze.types import Fault

_LIMITED = """
exec 3<&0 <"$1"
(read _ <&3; kill -9 -$$) >/dev/null 2>&1 &
for limit in "-c 0" "-S -t $2" "-f $3" "-v $4"; do ulimit $limit 2>/dev/null; done
shift 4
exec "$@" 3<&-
"""
"""Not every system has every limit; one a call is all that some shells take. What waits beside it at the pipe that is
the first stdin ends the program's group when this process dies; the program's own stdin is a file."""


class Unsafe:
    """Driver "unsafe"."""

    name = "unsafe"
    tier: Tier = "unsafe"
    missing: tuple[str, ...] = ("all isolation",)

    def __init__(self) -> None:
        self._live: set[UnsafeSandbox] = set()

    async def create(self, *, limits: Limits | None = None, net: Net = "none") -> UnsafeSandbox:
        """``net="none"`` is accepted and not enforced, as nothing is."""
        if net not in ("none", "loopback"):
            raise SandboxUnsupported(
                f"the unsafe driver has no net={net!r}", where="sandbox", fix="use net='none'"
            )
        sandbox = UnsafeSandbox(self, limits or Limits(), net)
        self._live.add(sandbox)
        return sandbox

    def forget(self, sandbox: UnsafeSandbox) -> None:
        self._live.discard(sandbox)

    async def close(self) -> None:
        for sandbox in list(self._live):
            await sandbox.destroy()


class UnsafeSandbox(Sandbox):
    """See ``Sandbox``; made by ``Unsafe.create``."""

    driver = Unsafe.name
    tier = Unsafe.tier

    def __init__(self, maker: Unsafe, limits: Limits, net: Net) -> None:
        self._maker = maker
        self._net: Net = net
        self.limits = limits
        self._folder = tempfile.mkdtemp(prefix="croze-unsafe-")
        self._box = os.path.join(self._folder, "box")
        os.mkdir(self._box)
        self._turn = asyncio.Lock()
        self._open = True

    def _path(self, path: str) -> Path:
        if path == BOX or path.startswith(BOX + "/"):
            path = "." + path[len(BOX) :]
        return Path(self._box) / path

    async def exec(self, argv, *, stdin=b"", env=None, cwd=None, cpu_s=None, wall_s=None) -> ExecResult:
        asked = asyncio.get_running_loop().time()
        async with self._turn:
            if not self._open:
                raise SandboxLost("this sandbox is gone", where="sandbox", fix="create a new one")
            queued_s = asyncio.get_running_loop().time() - asked
            environment = {**ENVIRONMENT, "HOME": self._box, "TMPDIR": self._box, **(env or {})}
            limits = (cpu_s or self.limits.cpu_s, wall_s or self.limits.wall_s)
            return await self._run(argv, stdin, environment, self._path(cwd or "."), limits, queued_s)

    async def exec_python(
        self, code, *, stdin=b"", env=None, cwd=None, cpu_s=None, wall_s=None
    ) -> ExecResult:
        program = Path(self._folder) / "program.py"
        program.write_bytes(code.encode("utf-8", "surrogatepass"))
        executable = getattr(sys, "_base_executable", None) or sys.executable
        argv = [executable, "-I", "-S", str(program)]
        return await self.exec(argv, stdin=stdin, env=env, cwd=cwd, cpu_s=cpu_s, wall_s=wall_s)

    async def _run(
        self, argv: Sequence[str], stdin: bytes, env: dict[str, str], cwd: Path, limits, queued_s: float
    ) -> ExecResult:
        loop = asyncio.get_running_loop()
        cpu_s, wall_s = limits
        stopped: list[Status] = []
        out = Capture(limit=self.limits.output_mib << 20, overflow=lambda: stop("output_limit"))
        err = Capture(limit=self.limits.output_mib << 20, overflow=lambda: stop("output_limit"))
        numbers = (math.ceil(cpu_s), self.limits.disk_mib << 11, self.limits.memory_mib << 10)
        source = Path(self._folder) / "stdin"
        source.write_bytes(stdin)
        lifeline, ours = os.pipe()
        process = None

        def stop(why: Status) -> None:
            if process is not None and not stopped:
                stopped.append(why)
                _kill_group(process.pid)

        began = loop.time()
        try:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _LIMITED, "croze", str(source), *map(str, numbers), *argv],
                stdin=lifeline,
                stdout=out.write_fd,
                stderr=err.write_fd,
                cwd=cwd,
                env=env,
                start_new_session=True,
            )
            out.started()
            err.started()
            if not await ended(process, wall_s):
                stop("timeout_wall")
                await ended(process, 10.0)
            wall_s = loop.time() - began
            _kill_group(process.pid)
            await out.end(1.0)
            await err.end(1.0)
            return self._result(process.returncode, stopped, out, err, wall_s, queued_s)
        finally:
            if process is not None:
                _kill_group(process.pid)
                process.poll()
            os.close(lifeline)
            os.close(ours)
            out.close()
            err.close()

    def _result(
        self,
        code: int | None,
        stopped: list[Status],
        out: Capture,
        err: Capture,
        wall_s: float,
        queued_s: float,
    ) -> ExecResult:
        if code is None:
            raise SandboxLost("a program outlived SIGKILL", where="sandbox")
        status: Status = "exited" if code >= 0 else "signaled"
        fault: Fault = "none"
        if stopped and (code < 0 or stopped[0] == "output_limit"):
            status, fault = stopped[0], "policy"
        elif code == -signal.SIGXCPU:
            status, fault = "timeout_cpu", "policy"
        return ExecResult(
            status=status,
            fault=fault,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
            stdout=out.kept,
            stderr=err.kept,
            stdout_total=out.total,
            stderr_total=err.total,
            truncated=out.truncated or err.truncated,
            wall_ms=wall_s * 1000,
            queue_ms=queued_s * 1000,
            tier=self.tier,
            driver=self.driver,
            node=platform.node(),
        )

    async def read(self, path: str) -> bytes:
        return self._path(path).read_bytes()

    async def write(self, path: str, data: bytes | str) -> None:
        target = self._path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data.encode() if isinstance(data, str) else data)

    async def list(self, path: str = BOX) -> Sequence[str]:
        return sorted(os.listdir(self._path(path)))

    async def sibling(self) -> Sandbox:
        return await self._maker.create(limits=self.limits, net=self._net)

    async def destroy(self) -> None:
        if self._open:
            self._open = False
            self._maker.forget(self)
            shutil.rmtree(self._folder, ignore_errors=True)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)

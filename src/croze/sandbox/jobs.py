"""What host and guest tell each other about one job, and what the host concludes. See ``guest.py``."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from croze.errors import SandboxLost
from croze.sandbox.cgroup import Counters
from croze.sandbox.protocol import Limits, Status
from croze.types import Fault

Kind = Literal["exec", "python", "read", "write", "list"]

_STARVED = 0.8
"""A lone thread that was ready to run, without a core, for this share of its wall time was stopped by the
host's load rather than by itself."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The guest's account of a job; checked, not trusted: the worst it can do is misjudge its own sandbox."""

    exit_code: int | None
    signal: int | None
    killed: bool
    cpu_ms: float
    max_rss_mib: float
    leftover: int
    starved_ms: float
    box_full: bool
    memory_error: bool

    @classmethod
    def parse(cls, data: bytes) -> Report:
        words = data.split()
        if len(words) != 9 or not all(w.lstrip(b"-").isdigit() and len(w) < 20 for w in words):
            raise SandboxLost(f"the sandbox's guest sent {data[:80]!r}", where="sandbox")
        code, signum, killed, cpu, rss, leftover, starved, full, note = map(int, words)
        return cls(
            exit_code=code if code >= 0 else None,
            signal=signum or None,
            killed=bool(killed),
            cpu_ms=float(cpu),
            max_rss_mib=rss / 1024,
            leftover=leftover,
            starved_ms=float(starved),
            box_full=bool(full),
            memory_error=note == 1,
        )


def encode(
    kind: Kind,
    *,
    argv: Sequence[str],
    body: bytes,
    env: Mapping[str, str],
    cwd: str,
    limits: Limits,
    address_space: int,
    extra_pids: int,
    extra_cpu_s: int,
) -> bytes:
    """A job as the guest reads it. Raises ValueError for NULs, which no argument can hold."""
    numbers = (
        math.ceil(limits.cpu_s) + extra_cpu_s,
        address_space,
        limits.disk_mib << 20,
        limits.pids + extra_pids,
        limits.fds,
        len(env),
    )
    for key in env:
        if not key or "=" in key:
            raise ValueError(f"{key!r} cannot name an environment variable")
    fields = [kind, cwd, *map(str, numbers), *(f"{k}={v}" for k, v in env.items()), *argv]
    raw = [os.fsencode(f) for f in fields]
    if any(b"\0" in f for f in raw):
        raise ValueError("an argument, path or environment variable holds a NUL")
    header = b"".join(f + b"\0" for f in raw)
    return len(header).to_bytes(4, "little") + header + body


def judge(
    report: Report, *, stopped: Status | None, seen: Counters, limits: Limits, cpu_ms: float, wall_ms: float
) -> tuple[Status, Fault]:
    """How a job ended and whose doing that was. ``stopped`` is why the host killed it, ``seen`` what the
    job's cgroup counted meanwhile. An exit code alone tells neither: a child may have run out of memory."""
    if seen.oom_kills or report.memory_error:
        return "oom", "policy"
    if stopped is not None and (stopped == "output_limit" or report.exit_code is None):
        starved = stopped == "timeout_wall" and report.starved_ms >= _STARVED * wall_ms
        return stopped, "unknown" if starved else "policy"
    if report.signal == signal.SIGXCPU or (report.signal == signal.SIGKILL and cpu_ms >= limits.cpu_s * 1000):
        return "timeout_cpu", "policy"
    failed = report.exit_code != 0
    if report.signal == signal.SIGXFSZ or (failed and report.box_full):
        return "disk", "policy"
    if failed and seen.pids_refused:
        return "pids", "policy"
    return ("signaled" if report.signal else "exited"), "none"

"""What this process and its descendants have used."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path


def cpu_seconds() -> float:
    """CPU seconds, user and system, of this process, of children that have ended, and of those that live."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime
    return total + sum(_live_cpu_seconds(pid) for pid in descendants(os.getpid()))


def descendants(pid: int) -> list[int]:
    """Process ids below ``pid``; empty where there is no /proc."""
    found: list[int] = []
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children = [int(word) for word in (thread / "children").read_text().split()]
            found += children
    except OSError:
        return found
    return found + [below for child in found for below in descendants(child)]


def _live_cpu_seconds(pid: int) -> float:
    try:
        # the command name may hold spaces: fields are counted behind its closing parenthesis
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def peak_mib() -> float:
    """Peak resident memory of this process in MiB."""
    try:
        # ru_maxrss would count what a large parent was before it started this process
        status = Path("/proc/self/status").read_text()
    except OSError:
        unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024

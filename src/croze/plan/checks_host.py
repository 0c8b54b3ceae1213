"""What croze finds on this machine, whatever is to be run: cores, memory, disk, shared memory, limits."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Any

from croze.models.source import user_cache
from croze.plan import machine
from croze.plan.checks import Report

GIB = 1 << 30
LEAST_MEMORY, SOME_MEMORY = GIB // 2, 2 * GIB
"""Below the first the built-in tiny model is all that fits beside torch; below the second, little more."""
LEAST_DISK, SOME_DISK = 64 << 20, 2 * GIB
LEAST_SHM = 64 << 20
_FEW: tuple[tuple[str, str, int, int], ...] = (
    ("RLIMIT_NOFILE", "open files", 1024, 1),
    ("RLIMIT_NPROC", "processes of this user", 512, 1),
    ("RLIMIT_AS", "MiB of address space", 16_384, 1 << 20),
    ("RLIMIT_FSIZE", "MiB of one file", 16_384, 1 << 20),
)
"""A limit, what it counts, the least that is worth no word, and its unit in what the system counts."""
_FLAGS = {"RLIMIT_NOFILE": "-n", "RLIMIT_NPROC": "-u", "RLIMIT_AS": "-v", "RLIMIT_FSIZE": "-f"}


def look_at_cores(_: Any, report: Report) -> None:
    """Cores that this process may use, by its affinity and by the quota of its cgroups."""
    judge_cores(machine.cores(), cpu_quota(), os.environ.get("OMP_NUM_THREADS", ""), report)


def judge_cores(cores: int, quota: float | None, threads: str, report: Report) -> None:
    """``quota``: cores' worth of time; ``threads``: OMP_NUM_THREADS."""
    told = f"{platform.machine()}, {cores} cores"
    if quota is not None and quota < cores - 0.01:
        report.warn(
            "cores.quota",
            f"{told}, but a cgroup lets this process use {quota:g} of them at a time",
            where="cpu quota",
            fix=f"set engine.threads={max(1, int(quota))}: threads beyond the quota stop each other",
        )
    else:
        report.ok(told)
    if threads.isdecimal() and int(threads) > cores:
        report.warn(
            "cores.threads",
            f"OMP_NUM_THREADS={threads}, and this process may use {cores} cores",
            where="OMP_NUM_THREADS",
            fix="unset OMP_NUM_THREADS",
        )


def look_at_memory(_: Any, report: Report) -> None:
    """What is free, by the kernel and by the cgroups around this process."""
    judge_memory(machine.memory_available(), _total_memory(), report)


def judge_memory(free: int, total: int, report: Report) -> None:
    """Both in bytes."""
    told = f"{free / GIB:.1f} GiB free of {total / GIB:.1f}"
    fix = "end other programs, or give the container more memory"
    if free < LEAST_MEMORY:
        report.fail("memory", told, where="memory", fix=fix)
    elif free < SOME_MEMORY:
        report.warn("memory.little", f"{told}: enough for tiny-calc, not for a model of 135M", fix=fix)
    else:
        report.ok(told)


def look_at_disk(folder: Path, report: Report) -> None:
    """Where runs, models and temporary files go: can they be written, and is there room."""
    places = (
        ("runs", folder / "runs", "set run.dir to a folder that you may write to"),
        ("models", user_cache(), "set CROZE_CACHE to a folder that you may write to"),
    )
    for what, place, fix in places:
        there = machine.existing(place)
        judge_place(what, there, shutil.disk_usage(there).free, fix, report)
    what, fix = "temporary files", "set TMPDIR to a folder that you may write to"
    try:
        place = Path(tempfile.gettempdir())
    except FileNotFoundError:
        report.fail("disk.temporary", f"there is no folder for {what}", where="TMPDIR", fix=fix)
    else:
        judge_place(what, place, shutil.disk_usage(place).free, fix, report)


def judge_place(what: str, place: Path, free: int, fix: str, report: Report) -> None:
    """A folder for ``what``, on a disk with ``free`` bytes."""
    told = f"{free / GIB:.1f} GiB free for {what}"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        report.warn("disk.readonly", f"{what} cannot be written there", where=str(place), fix=fix)
    elif free < LEAST_DISK:
        report.fail("disk", told, where=str(place), fix=f"free some space, or {fix}")
    elif free < SOME_DISK:
        report.warn("disk.little", told, where=str(place), fix=f"free some space, or {fix}")
    else:
        report.ok(told, where=str(place))


def look_at_shared_memory(_: Any, report: Report) -> None:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        report.ok("this system has no /dev/shm")
        return
    free = shutil.disk_usage(shm).free
    if not os.access(shm, os.W_OK | os.X_OK):
        report.warn("shm.readonly", "/dev/shm cannot be written", where="/dev/shm", fix="chmod 1777 /dev/shm")
    elif free < LEAST_SHM:
        report.warn(
            "shm.little",
            f"/dev/shm has {free >> 20} MiB free",
            where="/dev/shm",
            fix="give the container more shared memory (docker run --shm-size=1g)",
        )
    else:
        report.ok(f"{free / GIB:.1f} GiB free")


def look_at_limits(_: Any, report: Report) -> None:
    """What ``ulimit`` says. A soft limit can be raised by whoever has it."""
    told = []
    for name, what, enough, unit in _FEW:
        limit = getattr(resource, name, None)
        if limit is None:
            continue
        soft, hard = resource.getrlimit(limit)
        have = None if soft == resource.RLIM_INFINITY else soft // unit
        if have is not None and have < enough:
            free = hard == resource.RLIM_INFINITY or hard // unit >= enough
            in_shell = enough if unit == 1 else enough * (unit >> 10)  # ulimit counts KiB
            report.warn(
                "limits",
                f"{have} {what}, {enough} or more are wanted",
                where=f"ulimit {_FLAGS[name]}",
                fix=f"ulimit {_FLAGS[name]} {in_shell}" if free else "raise the hard limit (limits.conf)",
            )
        elif have is not None:
            told.append(f"{have} {what}")
    report.ok(f"a process may have {', '.join(told)}" if told else "none that matter")


def cpu_quota(proc: Path = Path("/proc"), root: Path = machine.ROOT) -> float | None:
    """Cores' worth of time that the cgroups around this process give it; None without a limit."""
    found = [
        quota for _, folder in machine.cgroups("cpu", proc, root) if (quota := _quota(folder)) is not None
    ]
    return min(found, default=None)


def _quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()  # version 2
    except (OSError, ValueError):
        try:
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdigit() or not period.isdigit() or int(period) == 0:
        return None
    return int(quota) / int(period)


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

"""What this machine has left for a run: memory, cores, disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from croze.run import Run

ROOT = Path("/sys/fs/cgroup")
_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
"""Limit and use in bytes, by version of cgroups."""


def memory_available(proc: Path = Path("/proc"), root: Path = ROOT) -> int:
    """Bytes that can be had without swapping: the kernel's estimate, or what a cgroup around us leaves, if less."""
    left = [
        room
        for version, folder in cgroups("memory", proc, root)
        if (room := _room(folder, version)) is not None
    ]
    return min([_kernel_estimate(proc), *left])


def cgroups(controller: str, proc: Path = Path("/proc"), root: Path = ROOT) -> Iterator[tuple[int, Path]]:
    """Version and folder of the cgroups around this process that may limit it, innermost first; none where
    there are no cgroups. A version 1 controller may be mounted under its own name or beside others'."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            version, homes = 2, [root]
        elif controller in controllers.split(","):
            version, homes = 1, list(dict.fromkeys([root / controller, root / controllers]))
        else:
            continue
        for home in homes:
            inner = home / path.lstrip("/")
            yield from ((version, p) for p in (inner, *inner.parents) if p == home or home in p.parents)


def cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def device(run: Run) -> str:
    """Where the run's models compute."""
    if run.engine.device != "auto":
        return run.engine.device
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def free_bytes(folder: Path) -> int:
    """Free space of the disk on which ``folder`` lies, or will lie when it is made."""
    return shutil.disk_usage(existing(folder)).free


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    folder = folder.absolute()
    return next(p for p in (folder, *folder.parents) if p.exists())


def _kernel_estimate(proc: Path) -> int:
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:  # not Linux: half of what is there
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    table = dict(line.split(":", 1) for line in lines if ":" in line)
    return int(table["MemAvailable"].split()[0]) * 1024


def _room(folder: Path, version: int) -> int | None:
    """What a cgroup leaves; file pages that it could drop count as free. None without a limit."""
    limit, used = (_number(folder / name) for name in _FILES[version])
    if limit is None or used is None or limit >= 1 << 60:
        return None
    return max(0, limit - used + _droppable(folder))


def _droppable(folder: Path) -> int:
    try:
        rows = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(dict(row for row in rows if len(row) == 2).get("inactive_file", 0))
    except OSError:
        return 0


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None

"""Memory and process limits through cgroups, v1 or v2, where this process may make them; else None.

A group's name, ``croze-PIDNS-PID-START-N``, says who owns it, so that ``sweep`` can tell what a killed owner
left behind.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path

import msgspec

from croze.sandbox.watch import Watch

_WANTED = ("memory", "pids", "cpuacct")
_numbers = itertools.count(1)


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """What a group has seen since it was made; None where the kernel does not say."""

    oom_kills: int = 0
    pids_refused: int = 0
    cpu_ms: float | None = None
    peak_mib: float | None = None


class Cgroups:
    """Where groups can be made: controller -> the directory to make them in."""

    def __init__(self, *, version: int, homes: dict[str, Path]) -> None:
        self.version = version
        self.homes = homes

    def create(self, *, memory_bytes: int, pids: int) -> Cgroup:
        """A new group with limits set. Raises OSError where the kernel refuses."""
        name = f"{_owner_prefix(os.getpid())}-{next(_numbers)}"
        group = Cgroup(self.version, {c: home / name for c, home in self.homes.items()})
        try:
            for directory in group.directories:
                directory.mkdir(exist_ok=True)
            group.limit(memory_bytes=memory_bytes, pids=pids)
        except OSError:
            group.try_remove()
            raise
        return group

    def watch(self) -> Watch:
        """What removes this process's groups should it be killed."""
        return Watch(_owner_prefix(os.getpid()) + "-", self.homes.values())

    def sweep(self) -> int:
        """Remove the groups of owners that are gone; how many there were."""
        swept = 0
        for home in set(self.homes.values()):
            for directory in home.glob("croze-*"):
                if not _owner_lives(directory.name):
                    _kill_all(directory)
                    swept += _try_rmdir(directory)
        return swept


class Cgroup:
    """One sandbox's group."""

    def __init__(self, version: int, dirs: dict[str, Path]) -> None:
        self._version = version
        self._dirs = dirs
        self.directories = list(dict.fromkeys(dirs.values()))

    @property
    def join_files(self) -> list[str]:
        """Files into which a process writes its pid to join."""
        return [str(d / "cgroup.procs") for d in self.directories]

    def limit(self, *, memory_bytes: int, pids: int) -> None:
        if memory := self._dirs.get("memory"):
            if self._version == 1:
                (memory / "memory.limit_in_bytes").write_text(str(memory_bytes))
                _try_write(memory / "memory.memsw.limit_in_bytes", str(memory_bytes))
            else:
                (memory / "memory.max").write_text(str(memory_bytes))
                _try_write(memory / "memory.swap.max", "0")
        if home := self._dirs.get("pids"):
            (home / "pids.max").write_text(str(pids))

    def counters(self) -> Counters:
        memory, pids = self._dirs.get("memory"), self._dirs.get("pids")
        oom_kills, peak = 0, None
        if memory:
            events, high = ("memory.oom_control", "memory.max_usage_in_bytes")
            if self._version == 2:
                events, high = ("memory.events", "memory.peak")
            oom_kills = int(_table(memory / events).get("oom_kill", 0))
            peak = _number(memory / high)
        return Counters(
            oom_kills=oom_kills,
            pids_refused=int(_table(pids / "pids.events").get("max", 0)) if pids else 0,
            cpu_ms=self.cpu_ms(),
            peak_mib=None if peak is None else peak / 2**20,
        )

    def cpu_ms(self) -> float | None:
        """CPU time of every process that was ever in the group, the reaped and the escaped alike."""
        if self._version == 2:
            usec = _table(self.directories[0] / "cpu.stat").get("usage_usec")
            return None if usec is None else usec / 1e3
        if home := self._dirs.get("cpuacct"):
            ns = _number(home / "cpuacct.usage")
            return None if ns is None else ns / 1e6
        return None

    def try_remove(self) -> bool:
        left = [d for d in self.directories if not _try_rmdir(d)]
        return not left

    async def remove(self) -> None:
        """Kill what is left and remove the group; the kernel may need a moment to let go of the dead."""
        for wait_ms in (0, 1, 2, 5, 10, 20, 50, 100, 200, 400):
            await asyncio.sleep(wait_ms / 1e3)
            if self.try_remove():
                return
            for directory in self.directories:
                _kill_all(directory)


def find() -> Cgroups | None:
    """The groups this process may make, or None. v1 controllers win: a hybrid machine has them there."""
    mounts = _mounts()
    paths = _own_paths()
    homes = {c: mounts[c] / paths[c] for c in _WANTED if c in mounts and c in paths}
    homes = {c: home for c, home in homes.items() if _can_make(home)}
    if "memory" in homes or "pids" in homes:
        return Cgroups(version=1, homes=homes)
    if "" in mounts and "" in paths:
        home = mounts[""] / paths[""]
        enabled = _enable_v2(home)
        if enabled and _can_make(home):
            return Cgroups(version=2, homes=dict.fromkeys(enabled, home))
    return None


def _enable_v2(home: Path) -> list[str]:
    """Controllers that children of ``home`` get. A group that holds processes may not delegate (EBUSY)."""
    for controller in ("memory", "pids"):
        _try_write(home / "cgroup.subtree_control", f"+{controller}")
    have = _text(home / "cgroup.subtree_control").split()
    return [c for c in ("memory", "pids") if c in have]


def _mounts() -> dict[str, Path]:
    """Controller ("" for v2) -> mount point, less the part of the tree that the mount already starts at."""
    mounts: dict[str, Path] = {}
    for line in _text(Path("/proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split()[:3]
        point = Path(fields[4])
        if kind == "cgroup2":
            mounts.setdefault("", point)
        elif kind == "cgroup":
            for controller in options.split(","):
                mounts.setdefault(controller, point)
    return mounts


def _own_paths() -> dict[str, str]:
    """Controller ("" for v2) -> this process's group, relative to the mount."""
    roots: dict[str, str] = {}
    for line in _text(Path("/proc/self/mountinfo")).splitlines():
        if " - cgroup" in line:
            fields = line.split()
            roots[fields[4]] = fields[3]
    mounts = _mounts()
    paths: dict[str, str] = {}
    for line in _text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            root = roots.get(str(mounts.get(controller, "")), "/")
            inside = path[len(root) :] if root != "/" and path.startswith(root) else path
            paths[controller] = inside.lstrip("/")
    return paths


def _can_make(home: Path) -> bool:
    probe = home / f"{_owner_prefix(os.getpid())}-probe"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError:
        return False
    return True


def _owner_prefix(pid: int) -> str:
    return f"croze-{os.stat('/proc/self/ns/pid').st_ino}-{pid}-{_start_time(pid)}"


def _owner_lives(name: str) -> bool:
    """Whether a group's owner may still live; groups of other pid namespaces are left alone."""
    parts = name.split("-")
    if len(parts) != 5 or not parts[2].isdigit() or parts[1] != str(os.stat("/proc/self/ns/pid").st_ino):
        return True
    return _start_time(int(parts[2])) == parts[3]


def _start_time(pid: int) -> str:
    """Ticks after boot at which a process started, "" where it is gone: pids come again, this does not."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def _kill_all(directory: Path) -> None:
    for word in _text(directory / "cgroup.procs").split():
        try:
            os.kill(int(word), signal.SIGKILL)
        except ProcessLookupError:
            continue


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _table(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _try_write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError:
        return


def _try_rmdir(directory: Path) -> bool:
    try:
        directory.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True

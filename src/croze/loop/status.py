"""What a run folder says of its run, from outside: looked at while it is written, half written, or being removed.

Nothing is made, changed or locked for longer than it takes to ask. Checkpoints are not verified, and the ledger is
not opened: SQLite would make files beside it.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

from croze.errors import UsageError
from croze.loop.checkpoints import Checkpoints
from croze.loop.folder import CONFIG, LOCK, Holder, holder, read_config

State = Literal["running", "finished", "interrupted", "dead", "broken"]
"""dead: its process ended without a word. Whoever is interrupted or dead can be resumed."""

METRICS = "metrics.jsonl"
_SIGNS = (LOCK, "ledger.sqlite", METRICS)
"""What only a run folder has; a config.json is in model folders too."""
_CONFIG_MAX = 4 << 20
_TAILS = (1 << 16, 1 << 19, 1 << 22)
"""Bytes of the end of metrics.jsonl in which the last step is looked for, one after the other."""


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run as its folder shows it. ``step``: the last that was trained, of ``steps``; ``reward_mean``: its own;
    ``checkpoint``: the newest step that was saved, not verified; ``pid`` and ``host``: of who runs it now;
    ``created`` and ``active``: when it was declared and when its folder last changed, Unix seconds; ``note``: what
    else is to be said, above all why it is broken."""

    name: str
    path: str
    state: State
    step: int | None = None
    steps: int | None = None
    reward_mean: float | None = None
    checkpoint: int | None = None
    pid: int | None = None
    host: str | None = None
    created: float | None = None
    active: float | None = None
    note: str | None = None

    @property
    def resumable(self) -> bool:
        return self.state in ("interrupted", "dead")


class _Line(msgspec.Struct, frozen=True, kw_only=True):
    event: str
    step: int
    reward_mean: float | None = None


def runs_in(folder: Path) -> Iterator[RunStatus]:
    """The run of a folder, if it is one, else those of the folders in it, by name. Raises OSError when ``folder``
    cannot be listed."""
    if is_run(folder):
        paths = [folder]
    else:
        paths = [path for path in sorted(folder.iterdir()) if _is_folder(path) and is_run(path)]
    for path in paths:
        found = status(path)
        if found is not None:
            yield found


def is_run(path: Path) -> bool:
    """Whether a folder is, or was to become, one of a run."""
    if any(_is_file(path / sign) for sign in _SIGNS):
        return True
    try:
        _config(path)
    except UsageError:
        return False
    return True


def status(path: Path) -> RunStatus | None:
    """How a run is. None when its folder has gone meanwhile."""
    try:
        found = _status(path)
    except OSError as error:
        found = _broken(path, error.strerror or str(error))
    return found if _is_folder(path) else None


def _status(path: Path) -> RunStatus:
    by = holder(path) if _is_file(path / LOCK) else None
    try:
        config = _config(path)
    except UsageError as error:
        if by is not None and not (path / CONFIG).exists():
            return _running(RunStatus(name=path.name, path=str(path), state="running", note="it starts"), by)
        return _broken(path, error.message)
    steps, created = config["keys"].get("steps"), config.get("created")
    line = last_step(path / METRICS)
    saved = Checkpoints(path / "checkpoints").all()
    found = RunStatus(
        name=path.name,
        path=str(path),
        state="interrupted",
        step=line.step if line else 0,
        steps=steps if isinstance(steps, int) else None,
        reward_mean=line.reward_mean if line else None,
        checkpoint=int(saved[-1].name.removeprefix("step_")) if saved else None,
        created=created if isinstance(created, float) else None,
        active=_active(path),
    )
    if by is not None:
        return _running(found, by)
    if found.checkpoint is not None and found.steps is not None and found.checkpoint >= found.steps:
        return msgspec.structs.replace(found, state="finished")
    return msgspec.structs.replace(found, state="dead" if _unsigned(path / LOCK) else "interrupted")


def _running(found: RunStatus, by: Holder) -> RunStatus:
    note = found.note
    if by.host == socket.gethostname() and not lives(by.pid):
        note = f"its process {by.pid} is gone, what it started still holds the folder"
    return msgspec.structs.replace(found, state="running", pid=by.pid, host=by.host, note=note)


def _broken(path: Path, why: str) -> RunStatus:
    return RunStatus(name=path.name, path=str(path), state="broken", active=_active(path), note=why)


def _config(path: Path) -> dict[str, Any]:
    """config.json. Raises UsageError, whatever is wrong with it."""
    file, where = path / CONFIG, str(path)
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > _CONFIG_MAX:
            raise UsageError("config.json is not one that croze wrote", where=where)
        config = read_config(path)
    except FileNotFoundError:
        raise UsageError("it has no config.json", where=where) from None
    except OSError as error:
        raise UsageError(f"config.json cannot be read: {error.strerror}", where=where) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"config.json cannot be read: {error}", where=where) from None
    if not isinstance(config["keys"], dict):
        raise UsageError("config.json does not declare a run", where=where)
    return config


def last_step(path: Path) -> _Line | None:
    """The last whole line of a step in metrics.jsonl, which may be growing; only the end of the file is read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        found = os.fstat(handle)
        for length in _TAILS if stat.S_ISREG(found.st_mode) else ():
            start = max(0, found.st_size - length)
            lines = os.pread(handle, found.st_size - start, start).split(b"\n")[:-1]
            for line in reversed(lines if start == 0 else lines[1:]):
                if b'"step"' in line and (step := _decoded(line)) is not None:
                    return step
            if start == 0:
                break
    finally:
        os.close(handle)
    return None


def _decoded(line: bytes) -> _Line | None:
    try:
        found = msgspec.json.decode(line, type=_Line)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return found if found.event == "step" else None


def _unsigned(lock: Path) -> bool:
    """Whether the last who held the folder never signed off."""
    try:
        return lock.stat().st_size > 0
    except OSError:
        return False


def _active(path: Path) -> float | None:
    """When something in the folder last changed, Unix seconds."""
    try:
        with os.scandir(path) as entries:
            return max((entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=None)
    except OSError:
        return None


def lives(pid: int) -> bool:
    """Whether there is a process of this number on this machine."""
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _is_file(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _is_folder(path: Path) -> bool:
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except OSError:
        return False

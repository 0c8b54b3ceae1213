"""A run's folder: claimed by one process at a time, its declaration on the disk before anything heavy is loaded.

No torch here: a run that is killed in its first second has written ``config.json`` and can be resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import blake3
import msgspec

from croze._version import VERSION
from croze.errors import CrozeError, DeclarationError, InfraFault, UsageError
from croze.run import Run, provenance

CONFIG, LOCK, METRICS = "config.json", "lock", "metrics.jsonl"
LEDGER = "ledger.sqlite"
BEFORE_THE_FIRST_STEP = (METRICS, "faults.jsonl", LEDGER, f"{LEDGER}-wal", f"{LEDGER}-shm", CONFIG, LOCK)
"""What a run that has done nothing yet has put into its folder, beside an empty trace."""
_LOST = (
    "put it back: without it nothing says what the run is; its models in checkpoints/ can be used as they are"
)
_PATIENCE_S, _ASK_S = 1.0, 0.01
"""Longest wait for a folder's lock: who was just killed may hold it a moment longer, and so does who asks for it."""


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """Who holds a run folder. ``since``: Unix seconds."""

    pid: int
    host: str
    since: float


class Era(msgspec.Struct, frozen=True, kw_only=True):
    """From a step on, the arithmetic of a run; beside this what ``build.numerics_told`` gives."""

    from_step: int


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """What config.json must hold, and of which kind what it may hold is."""

    file: str
    keys: dict[str, Any]
    file_digest: str = ""
    sources: dict[str, str] = {}
    tasks: Any = None
    model: dict[str, str] = {}
    numerics: list[Era] = []


class RunFolder:
    """A claimed run folder; ``close`` gives it back, as the process's end does."""

    def __init__(self, path: Path, lock: int, *, made: Sequence[Path] = ()) -> None:
        """``made``: the folder and those above it, inmost first, as far as this process made them."""
        self.path, self._lock, self._made = path, lock, made

    @classmethod
    def create(cls, run: Run) -> tuple[RunFolder, Run]:
        """Make and claim the folder of a new run and write its declaration; the run with ``dir`` set.

        Raises UsageError when the folder holds a run already, or cannot be made.
        """
        path = Path(run.dir) if run.dir else Path("runs") / f"{run.name}-{secrets.token_hex(3)}"
        run = dataclasses.replace(run, dir=str(path))
        try:
            made = [folder for folder in (path, *path.parents) if not folder.exists()]
            path.mkdir(parents=True, exist_ok=True)
            folder = cls(path, _claim(path), made=made)
        except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
            why = getattr(error, "strerror", None) or error
            raise UsageError(
                f"the run folder {str(path)!r} cannot be made: {why}",
                where="run.dir",
                fix="choose a folder that can be written",
            ) from None
        with _closed_on_error(folder):
            if (path / CONFIG).exists():
                raise UsageError(
                    f"{path} already holds a run",
                    where="run.dir",
                    fix=f"croze resume {path}, or choose another run.dir",
                )
            folder.write(declared(run))
        return folder, run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Claim the folder of a run that was started before. Raises UsageError when it is none, or in use."""
        read_config(path)
        try:
            return cls(path, _claim(path))
        except OSError as error:
            raise UsageError(f"the run folder cannot be written: {error.strerror}", where=str(path)) from None

    @property
    def config(self) -> dict[str, Any]:
        return read_config(self.path)

    def amend(self, **told: Any) -> None:
        """Add to config.json what turned out later."""
        self.write({**self.config, **told})

    def write(self, config: Mapping[str, Any]) -> None:
        """config.json, whole or not at all, durable on return."""
        staging = self.path / f".{CONFIG}"
        try:
            with staging.open("wb") as file:
                file.write(msgspec.json.format(msgspec.json.encode(config), indent=1))
                file.flush()
                os.fsync(file.fileno())
            staging.rename(self.path / CONFIG)
            sync_folder(self.path)
        except OSError as error:
            staging.unlink(missing_ok=True)
            raise InfraFault(
                f"{CONFIG} cannot be written: {error.strerror}",
                where=str(self.path),
                fix="free space on the disk",
            ) from error

    def discard(self) -> None:
        """Take back a run that has done nothing yet, so that its folder can be used again; else leave all as it is."""
        metrics = self.path / METRICS
        if (self.path / "checkpoints").exists() or (metrics.exists() and metrics.stat().st_size):
            return
        shutil.rmtree(self.path / "trace", ignore_errors=True)
        for name in BEFORE_THE_FIRST_STEP:
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # what else lies in them is not ours
            for folder in self._made or (self.path,):
                folder.rmdir()

    def close(self) -> None:
        if self._lock >= 0:
            with contextlib.suppress(OSError):
                os.ftruncate(self._lock, 0)  # signed off: a name left in a free lock is that of one who died
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def declared(run: Run) -> dict[str, Any]:
    """The task file and its digest, every key with its value, and where each value came from."""
    sources = {key: source for key, (_, source) in provenance(run).items()}
    return {
        "croze": VERSION,
        "created": time.time(),
        "file": run.file,
        "file_digest": file_digest(run.file),
        "keys": run.keys(),
        "sources": sources,
    }


def file_digest(file: str) -> str:
    """blake3 of a task file, hex; empty for a run made in Python."""
    return blake3.blake3(Path(file).read_bytes()).hexdigest() if file else ""


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a run folder. Raises DeclarationError when the folder is no run."""
    try:
        config = msgspec.json.decode((path / CONFIG).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise DeclarationError(
            "this folder holds no run: it has no config.json", where=str(path), fix="croze ps lists the runs"
        ) from None
    except OSError as error:
        raise DeclarationError(
            f"config.json cannot be read: {error.strerror}",
            where=str(path),
            fix="let the user of the run read it",
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DeclarationError(f"config.json cannot be read: {error}", where=str(path), fix=_LOST) from None
    try:
        msgspec.convert(config, Config)
    except msgspec.ValidationError as error:
        raise DeclarationError(
            f"config.json does not declare a run: {error}", where=str(path), fix=_LOST
        ) from None
    return config


def numerics_at(config: Mapping[str, Any], step: int) -> dict[str, Any]:
    """The arithmetic that ``step`` of a run was computed with; {} where config.json does not say.

    A run may be resumed elsewhere: ``numerics`` is a list, each entry good from its ``from_step`` on.
    """
    told = [entry for entry in config.get("numerics", ()) if entry["from_step"] <= step]
    return told[-1] if told else {}


def holder(path: Path) -> Holder | None:
    """Who holds a run folder now; None when nobody does. Asking claims nothing."""
    try:
        lock = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(lock)
    finally:
        os.close(lock)
    return None


def sync_folder(path: Path) -> None:
    """A folder's entries onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _claim(path: Path) -> int:
    until = time.monotonic() + _PATIENCE_S
    while (lock := _locked(path / LOCK)) is None:
        if time.monotonic() > until:
            by = holder(path)
            named = f"process {by.pid} on {by.host}" if by else "another process"
            raise UsageError(
                f"{path} is in use by {named}", where="run.dir", fix="wait for it, or stop it: croze stop"
            )
        time.sleep(_ASK_S)
    me = Holder(pid=os.getpid(), host=socket.gethostname(), since=time.time())
    with contextlib.suppress(OSError):  # the disk is full: the lock holds without a name too
        os.ftruncate(lock, 0)
        os.pwrite(lock, msgspec.json.encode(me), 0)
    return lock


def _locked(path: Path) -> int | None:
    """The lock, held; None while another process has it, or where it was taken away meanwhile with its folder."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.stat()):
            return lock
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(lock)
    return None


def _holder(lock: int) -> Holder | None:
    try:
        return msgspec.json.decode(os.pread(lock, 4096, 0), type=Holder)
    except msgspec.DecodeError:  # it has claimed the folder and not signed yet
        return None


@contextlib.contextmanager
def _closed_on_error(folder: RunFolder) -> Iterator[None]:
    try:
        yield
    except CrozeError:
        folder.close()
        raise

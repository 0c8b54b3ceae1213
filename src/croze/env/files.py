"""Files of task rows: opened with errors a person can act on, recognised, and told apart."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from croze.config import suggest
from croze.errors import TasksError

Stamp = tuple[int, int]
"""A file's size in bytes and time of change in ns: different when it was written to."""

SAMPLE_BYTES = 64 << 10
SAMPLES = 64

_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"PK\x03\x04": ("zip", "unzip"),
}
PACKED_SUFFIXES = {
    ".gz": "gunzip",
    ".bz2": "bunzip2",
    ".zst": "unzstd",
    ".xz": "unxz",
    ".zip": "unzip",
}
"""Ends of the names of compressed files, and the command that decompresses them."""


@contextmanager
def opened(path: Path, stamp: Stamp | None = None, *, buffering: int = -1) -> Iterator[BinaryIO]:
    """``path`` open for reading. Raises TasksError: it cannot be, or it is no longer what ``stamp`` says."""
    with _open(path, buffering) as file:
        if stamp not in (None, stamp_of(file)):
            raise changed(path)
        yield file


def _open(path: Path, buffering: int) -> BinaryIO:
    check_file(path)
    try:
        return open(path, "rb", buffering=buffering)
    except OSError as error:
        raise unreadable(path, error) from None


def stamp_of(file: BinaryIO) -> Stamp:
    facts = os.fstat(file.fileno())
    return facts.st_size, facts.st_mtime_ns


def changed(path: Path) -> TasksError:
    return TasksError(
        "the file changed while the run was reading it",
        where=str(path),
        fix="write new rows to another file, then start again",
    )


def check_file(path: Path) -> None:
    """Raise TasksError unless ``path`` is a file; a near name in its folder is offered."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from None
    if stat.S_ISDIR(mode):
        raise TasksError("this is a folder", where=str(path), fix="give one .jsonl or .parquet file")
    if not stat.S_ISREG(mode):
        raise TasksError(
            "this is not a regular file: it cannot be read in any order",
            where=str(path),
            fix="write it to a file, or give a function of a seed that yields rows",
        )


def unreadable(path: Path, error: OSError | ValueError) -> TasksError:
    """What the system said of ``path``, as an error for users."""
    if not isinstance(error, OSError):
        return TasksError(f"the file cannot be read: {error}", where=repr(str(path)))
    what = f"the file cannot be read: {error.strerror or error}"
    fix = None
    if error.errno == errno.ENOENT:
        what = "there is no such file"
        fix = (
            suggest(path.name, _neighbours(path)) or "check the path; a relative one starts where croze does"
        )
    elif error.errno == errno.EACCES:
        fix = "let the user of the run read it (chmod, or a copy)"
    elif error.errno == errno.ELOOP:
        fix = "give the file itself: this symbolic link leads to itself"
    return TasksError(what, where=str(path), fix=fix)


def _neighbours(path: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(path.parent) if entry.is_file()]
    except OSError:
        return []


def check_text(path: Path, head: bytes) -> None:
    """Raise TasksError when a file that should be lines of text begins as something else does."""
    for magic, (name, command) in _PACKED.items():
        if head.startswith(magic):
            raise TasksError(
                f"the file is compressed ({name}): rows of it cannot be read in any order",
                where=str(path),
                fix=f"decompress it with {command}",
            )
    if head.startswith(b"PAR1"):
        raise TasksError("this is a Parquet file", where=str(path), fix="name it .parquet")
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise TasksError(
            "the text is UTF-16, not UTF-8",
            where=str(path),
            fix="convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW",
        )


def sampled_digest(file: BinaryIO, size: int) -> bytes:
    """Digest of a file's size and of ``SAMPLES`` evenly spaced blocks, its first and last bytes among them.

    A file of up to SAMPLES * SAMPLE_BYTES (4 MiB) is digested whole. In a larger one, a change that keeps the
    size and lies between the blocks is missed.
    """
    digest = blake2b(str(size).encode(), digest_size=16)
    if size <= SAMPLES * SAMPLE_BYTES:
        places = range(0, size, SAMPLE_BYTES)
    else:
        places = [at * (size - SAMPLE_BYTES) // (SAMPLES - 1) for at in range(SAMPLES)]
    for place in places:
        file.seek(place)
        digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()

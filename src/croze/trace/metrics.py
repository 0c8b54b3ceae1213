"""``metrics.jsonl`` and ``faults.jsonl``: one JSON object a line, appended, readable while they grow."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from croze.errors import InfraFault


class JsonLines:
    """Appends objects to a .jsonl file, each in one write. A line cut by an earlier crash is taken out first.

    Numbers that JSON lacks (nan, inf) become null; numpy's are written as plain numbers.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise InfraFault(
                f"cannot be opened: {error.strerror}",
                where=str(path),
                fix="see that it is a file which this user may write, and that the disk is not full",
            ) from error
        self._mend()

    def write(self, record: Mapping[str, Any]) -> None:
        line = encode_line(record)
        try:
            written = os.write(self._file, line)
        except OSError as error:
            raise InfraFault(
                f"cannot be written: {error.strerror}", where=str(self._path), fix="free space on the disk"
            ) from error
        if written != len(line):
            self._mend()
            raise InfraFault("the disk is full", where=str(self._path), fix="free space on the disk")

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mend(self) -> None:
        size = os.fstat(self._file).st_size
        end = size
        while end > 0:
            start = max(0, end - 4096)
            at = os.pread(self._file, end - start, start).rfind(b"\n")
            if at >= 0:
                end = start + at + 1
                break
            end = start
        if end != size:
            os.ftruncate(self._file, end)


def encode_line(record: Mapping[str, Any] | Sequence[Any]) -> bytes:
    """One line of JSON, its end included. Raises TypeError for what is not plain data."""
    return msgspec.json.encode(record, enc_hook=_plain) + b"\n"


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file that may be growing; none when there is no file."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line) for line in lines if line]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not plain data")

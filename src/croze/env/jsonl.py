"""A .jsonl file read by row number, through a sparse index of where its lines begin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np

from croze.env.files import changed, check_text, opened, sampled_digest, stamp_of
from croze.env.order import Order, Shuffle
from croze.errors import TasksError

STRIDE = 16 << 10
"""Bytes of text that one mark of the index stands for, at least."""
MAX_MARKS = 1 << 18
"""Marks of an index, about: 16 bytes each. A file too large for them has a longer stride."""

_BLOCK = 1 << 20
_NEWLINE, _SPACE = 10, 32
_BOM = b"\xef\xbb\xbf"


class JsonlRows:
    """One JSON object a line, UTF-8; blank lines do not count. Costs at most 4 MiB of memory.

    The first use reads the file once, some 500 MB a second, and keeps the place of one row in every STRIDE bytes.
    A row is read by going to the mark before it. The file must not change afterwards.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.sampled = 0
        self._path = path
        self._known: _Marks | None = None

    def __len__(self) -> int:
        return self._marks().count

    def __getitem__(self, index: int) -> Any:
        _, line = self._line(index)
        try:
            return msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TasksError(
                f"row {index} is not JSON: {error}", where=self.place(index), fix=self._how_to_convert()
            ) from None

    def _how_to_convert(self) -> str:
        """What to do about a line that is no row: the file may be one JSON document spread over lines."""
        words = {b"[": "jq -c '.[]'", b"{": "jq -c ."}.get(self._line(0)[1].strip())
        return f"write one object a line: {words} OLD > NEW" if words else "write one JSON object a line"

    def order(self, key: bytes) -> Order:
        return Shuffle(len(self), key)

    def place(self, index: int) -> str:
        """``FILE:LINE``, counted on demand: only errors need it."""
        left, line = self._line(index)[0], 1
        with self._open() as file:
            while left > 0 and (block := file.read(min(left, _BLOCK))):
                line += block.count(b"\n")
                left -= len(block)
        return f"{self.name}:{line}"

    def identity(self) -> list[Any]:
        """Row count and digest of sampled blocks. Misses what ``sampled_digest`` misses."""
        count = len(self)
        with self._open() as file:
            return [count, sampled_digest(file, self._marks().stamp[0])]

    def _line(self, index: int) -> tuple[int, bytes]:
        """Offset and text of the index-th line that holds something."""
        place, skip = self._marks().before(index)
        with self._open() as file:
            file.seek(place)
            for line in file:
                if not line.isspace():
                    if skip == 0:
                        return place, line
                    skip -= 1
                place += len(line)
        raise changed(self._path)

    def _open(self) -> Any:
        return opened(self._path, self._marks().stamp, buffering=STRIDE)

    def _marks(self) -> _Marks:
        if self._known is None:
            with opened(self._path) as file:
                check_text(self._path, file.read(8))
                marks = _Marks(file)
                if stamp_of(file) != marks.stamp:
                    raise changed(self._path)
            self._known = marks
        return self._known


class _Marks:
    """How many rows a file has, and where one of them begins in every stride of its bytes."""

    def __init__(self, file: BinaryIO) -> None:
        self.stamp = stamp_of(file)
        self.count = 0
        size = self.stamp[0]
        stride = max(STRIDE, size // MAX_MARKS)
        rows, places = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        last = -1
        for starts in _row_starts(file, size):
            strides = starts // stride
            first = np.flatnonzero(np.diff(strides, prepend=last))
            last = int(strides[-1])
            rows.append(self.count + first)
            places.append(starts[first])
            self.count += len(starts)
        self._rows, self._places = np.concatenate(rows), np.concatenate(places)

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes + self._places.nbytes

    def before(self, index: int) -> tuple[int, int]:
        """The offset of a row at or before the index-th, and how many rows further on that one is."""
        if not 0 <= index < self.count:
            raise IndexError(f"row {index} of {self.count}")
        mark = int(np.searchsorted(self._rows, index, side="right")) - 1
        return int(self._places[mark]), index - int(self._rows[mark])


def _row_starts(file: BinaryIO, size: int) -> Iterator[np.ndarray]:
    """Offsets (int64, never an empty array) of the lines that hold something, block by block of ``size`` bytes.

    No line is held whole: what is carried from block to block is where the open line began and whether it
    has been blank so far. A byte order mark is stepped over.
    """
    file.seek(0)
    base = len(_BOM) if file.read(len(_BOM)) == _BOM else 0
    file.seek(base)
    open_start, open_blank = base, True
    while base < size and (block := file.read(min(_BLOCK, size - base))):
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == _NEWLINE)
        cut = int(ends[0]) if len(ends) else len(block)
        open_blank = open_blank and not block[:cut].strip()
        if len(ends):
            filled = np.concatenate([[not open_blank], _filled(block, ends)])
            starts = np.concatenate([[open_start], base + ends[:-1] + 1])[filled]
            if len(starts):
                yield starts
            tail = int(ends[-1]) + 1
            open_start, open_blank = base + tail, not block[tail:].strip()
        base += len(block)
    if not open_blank:
        yield np.array([open_start], np.int64)


def _filled(block: bytes, ends: np.ndarray) -> np.ndarray:
    """Which of the lines between the newlines at ``ends`` hold something (bool, one fewer than ``ends``)."""
    starts, stops = ends[:-1] + 1, ends[1:]
    filled = stops > starts
    bytes_ = np.frombuffer(block, np.uint8)
    doubtful = np.flatnonzero(filled & (bytes_[starts] <= _SPACE))
    for at in doubtful:
        filled[at] = not block[starts[at] : stops[at]].isspace()
    return filled

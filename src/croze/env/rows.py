"""Finite tables of task rows, read by row number: a list, .jsonl, .parquet, a dataset of the hub.

None of them is loaded whole except a list: a .jsonl file keeps an index of line offsets, a .parquet file the
row groups used last. Nothing is opened before the first row is asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

from croze.config import suggest
from croze.errors import TasksError

PARQUET_CACHE_BYTES = 512 << 20
"""Decoded row groups kept for random access; the group in use is kept whatever its size."""


class Rows(Protocol):
    """A finite table. ``rows[i]`` is the i-th row as the source has it, ``place(i)`` says where it lies."""

    name: str

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def place(self, index: int) -> str: ...


class ListRows:
    """Rows already in memory, or any object with a length and integer subscripts (a ``datasets.Dataset``)."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.name = type(rows).__name__
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        try:
            return self._rows[index]
        except Exception as error:  # the user's class, or one that is not read by row number (a data frame)
            raise TasksError(
                f"row {index} cannot be read from a {self.name}: {type(error).__name__}: {error}",
                where=self.place(index),
                fix="give a list of dicts",
            ) from error

    def place(self, index: int) -> str:
        return f"row {index}"


class JsonlRows:
    """One JSON object a line, UTF-8; blank lines do not count. Costs 8 bytes of memory a row."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._starts: np.ndarray | None = None
        self._stamp: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self._index())

    def __getitem__(self, index: int) -> Any:
        start = int(self._index()[index])
        with open(self._path, "rb") as file:
            if _stamp(self._path) != self._stamp:
                raise TasksError(
                    "the file changed while the run was reading it",
                    where=self.name,
                    fix="write new rows to another file, then start again",
                )
            file.seek(start)
            line = file.readline()
        try:
            return msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TasksError(f"row {index} is not JSON: {error}", where=self.place(index)) from None

    def place(self, index: int) -> str:
        """``FILE:LINE``, counted on demand: only errors need it."""
        left, line = int(self._index()[index]), 1
        with open(self._path, "rb") as file:
            while left > 0 and (block := file.read(min(left, 1 << 20))):
                line += block.count(b"\n")
                left -= len(block)
        return f"{self.name}:{line}"

    def _index(self) -> np.ndarray:
        if self._starts is None:
            readable(self._path)
            self._stamp = _stamp(self._path)
            self._starts = _line_starts(self._path)
        return self._starts


class ParquetRows:
    """A Parquet file; a row costs the decoding of its row group unless that is among those used last."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._path = path
        self._ends: np.ndarray | None = None
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        ends = self._index()
        return int(ends[-1]) if len(ends) else 0

    def __getitem__(self, index: int) -> Any:
        ends = self._index()
        group = int(np.searchsorted(ends, index, side="right"))
        table = self._group(group)
        return table.slice(index - (int(ends[group]) - table.num_rows), 1).to_pylist()[0]

    def place(self, index: int) -> str:
        return f"{self.name}, row {index}"

    def _index(self) -> np.ndarray:
        if self._ends is None:
            with self._open() as file:
                meta = file.metadata
                sizes = [meta.row_group(g).num_rows for g in range(meta.num_row_groups)]
            self._ends = np.cumsum(np.array(sizes, dtype=np.int64))
        return self._ends

    def _group(self, group: int) -> Any:
        if group in self._groups:
            self._groups.move_to_end(group)
            return self._groups[group]
        with self._open() as file:
            table = file.read_row_group(group)
        self._groups[group] = table
        while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > PARQUET_CACHE_BYTES:
            self._groups.popitem(last=False)
        return table

    def _open(self) -> Any:
        import pyarrow
        import pyarrow.parquet

        readable(self._path)
        try:
            return pyarrow.parquet.ParquetFile(self._path)
        except pyarrow.ArrowInvalid as error:
            raise TasksError(f"not a Parquet file: {error}", where=self.name) from None


class HubRows:
    """A split of a dataset of the Hugging Face hub, through ``datasets``: ORG/NAME or ORG/NAME/CONFIG."""

    def __init__(self, name: str, split: str) -> None:
        self.name = f"hf:{name}"
        self._split = split
        self._words = name.split("/")
        self._data: Any = None
        if len(self._words) not in (2, 3) or not all(self._words):
            raise TasksError(
                f"{self.name!r} names no dataset", where="cz.tasks", fix="write hf:ORG/NAME[/CONFIG]"
            )

    def __len__(self) -> int:
        return len(self._load())

    def __getitem__(self, index: int) -> Any:
        return self._load()[index]

    def place(self, index: int) -> str:
        return f"{self.name} [{self._split}], row {index}"

    def _load(self) -> Any:
        if self._data is None:
            self._data = self._download()
        return self._data

    def _download(self) -> Any:
        try:
            import datasets  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise TasksError(
                "datasets of the hub need the package `datasets`",
                where=self.name,
                fix="pip install 'croze[data]', or give a .jsonl or .parquet file",
            ) from None
        path, config = "/".join(self._words[:2]), self._words[2] if len(self._words) == 3 else None
        try:
            return datasets.load_dataset(path, config, split=self._split)
        except (
            Exception
        ) as error:  # a library's boundary: it raises its own, the hub's and the network's classes
            raise TasksError(
                f"the dataset cannot be loaded: {type(error).__name__}: {error}",
                where=f"{self.name} [{self._split}]",
                fix="check name, config (hf:ORG/NAME/CONFIG), split and network; offline, give a .jsonl file",
            ) from error


def readable(path: Path) -> None:
    """Raise TasksError unless ``path`` is a file; a near name in its folder is offered."""
    if path.is_file():
        return
    if path.is_dir():
        raise TasksError("this is a folder", where=str(path), fix="give one .jsonl or .parquet file")
    near = [p.name for p in path.parent.iterdir() if p.is_file()] if path.parent.is_dir() else []
    raise TasksError("there is no such file", where=str(path), fix=suggest(path.name, near))


def _stamp(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _line_starts(path: Path) -> np.ndarray:
    """Offsets (uint64) of the lines that hold something. A byte order mark is stepped over."""
    starts = np.empty(1024, dtype=np.uint64)
    count = offset = 0
    with open(path, "rb") as file:
        if file.read(3) == b"\xef\xbb\xbf":
            offset = 3
        file.seek(offset)
        for line in file:
            if not line.isspace():
                if count == len(starts):
                    starts = np.concatenate([starts, np.empty(len(starts), dtype=np.uint64)])
                starts[count] = offset
                count += 1
            offset += len(line)
    return starts[:count].copy()

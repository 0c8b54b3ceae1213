"""Finite tables of task rows, read by row number: a list, a dataset of the hub; files have modules of their own.

Nothing is opened before the first row is asked for, and none is loaded whole except a list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from croze.env.order import Order, Shuffle
from croze.errors import TasksError


class Rows(Protocol):
    """A finite table. ``rows[i]`` is the i-th row as the source has it, ``place(i)`` says where it lies.

    ``order(key)`` is the order ``key`` chooses among those that the table can be read in at a fair price.
    ``identity()`` is plain data that is another when the rows are others; ``sampled`` rows, evenly spaced, are
    to be looked into besides.
    """

    name: str
    sampled: int

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...

    def place(self, index: int) -> str: ...

    def order(self, key: bytes, /) -> Order: ...

    def identity(self) -> list[Any]: ...


class ListRows:
    """Rows already in memory, or any object with a length and integer subscripts (a ``datasets.Dataset``)."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.name = type(rows).__name__
        self.sampled = 1024
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

    def order(self, key: bytes) -> Order:
        return Shuffle(len(self), key)

    def identity(self) -> list[Any]:
        """The length; it misses changes in rows that are not sampled."""
        return [len(self)]


class HubRows:
    """A split of a dataset of the Hugging Face hub, through ``datasets``: ORG/NAME or ORG/NAME/CONFIG."""

    def __init__(self, name: str, split: str) -> None:
        self.name = f"hf:{name}"
        self.sampled = 256
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

    def order(self, key: bytes) -> Order:
        return Shuffle(len(self), key)

    def identity(self) -> list[Any]:
        """The length, and the hub's files with their commit where ``datasets`` knows them."""
        sources = getattr(self._load().info, "download_checksums", None) or {}
        return [len(self), sorted(map(str, sources))]

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

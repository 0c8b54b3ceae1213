"""A .parquet file read by row number, a row group at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from croze.env.files import Stamp, opened, sampled_digest, stamp_of
from croze.env.order import Order, WindowShuffle
from croze.errors import TasksError

WINDOW_BYTES = 64 << 20
"""Row groups held decoded at once, in bytes of their columns as the file's footer counts them (uncompressed, but
still encoded): decoded they take about twice that. The group in use is held whatever its size."""


class ParquetRows:
    """A Parquet file. Its order shuffles row groups, and rows within a window of groups.

    A row can only be had by decoding its whole row group, so rows in an order over the whole of a large file
    would cost a group each. The window is as many random groups as weigh WINDOW_BYTES together; every group is
    decoded once an epoch. A file of up to WINDOW_BYTES is shuffled whole. Write large files with row groups
    well below that (``row_group_size=``), or the window is a single group, and neighbours stay neighbours.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self.sampled = 0
        self._path = path
        self._stamp: Stamp | None = None
        self._sizes: list[int] = []
        self._weights: list[int] = []
        self._ends = np.empty(0, np.int64)
        self._held: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        self._look()
        return sum(self._sizes)

    def __getitem__(self, index: int) -> Any:
        self._look()
        group = int(np.searchsorted(self._ends, index, side="right"))
        table = self._group(group)
        return table.slice(index - (int(self._ends[group]) - table.num_rows), 1).to_pylist()[0]

    def order(self, key: bytes) -> Order:
        self._look()
        return WindowShuffle(self._sizes, self._weights, WINDOW_BYTES, key)

    def place(self, index: int) -> str:
        return f"{self.name}, row {index}"

    def identity(self) -> list[Any]:
        """Row count and digest of sampled blocks. Misses what ``sampled_digest`` misses."""
        count = len(self)
        with opened(self._path, self._stamp) as file:
            return [count, sampled_digest(file, stamp_of(file)[0])]

    def _look(self) -> None:
        if self._stamp is None:
            with self._open() as (parquet, stamp):
                groups = [parquet.metadata.row_group(at) for at in range(parquet.num_row_groups)]
                self._sizes = [group.num_rows for group in groups]
                self._weights = [group.total_byte_size for group in groups]
            self._ends = np.cumsum(np.array(self._sizes, dtype=np.int64))
            self._stamp = stamp

    def _group(self, group: int) -> Any:
        if group in self._held:
            self._held.move_to_end(group)
            return self._held[group]
        room = WINDOW_BYTES - self._weights[group]
        while self._held and sum(self._weights[at] for at in self._held) > room:
            self._held.popitem(last=False)
        with self._open() as (parquet, _):
            self._held[group] = parquet.read_row_group(group)
        return self._held[group]

    @contextmanager
    def _open(self) -> Iterator[tuple[Any, Stamp]]:
        import pyarrow
        import pyarrow.parquet

        with opened(self._path, self._stamp) as file:
            try:
                with pyarrow.parquet.ParquetFile(file) as parquet:
                    yield parquet, stamp_of(file)
            except (pyarrow.ArrowException, OSError) as error:
                what = "not a Parquet file" if self._stamp is None else "the file is damaged"
                raise TasksError(f"{what}: {error}", where=self.name) from None

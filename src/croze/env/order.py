"""Seeded orders of a table's rows that cost no memory and can be entered anywhere.

An order is a permutation of [0, size) computed position by position, so that a stream resumes at position p
without the p - 1 before it. It is pure integer arithmetic: the same on every machine and in every version.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

import numpy as np

_ROUNDS = 12
"""Rounds of the network. Six elements come out uniform (to 14,000 draws) from 12 on; large tables from far fewer."""
_MASK = (1 << 64) - 1


class Order(Protocol):
    """A permutation: ``order[position]`` is the number of the row at that position."""

    def __len__(self) -> int: ...

    def __getitem__(self, position: int, /) -> int: ...


class Shuffle:
    """A permutation of [0, size) chosen by ``key``, one of at most 2^768. Constant memory, some 10 µs a lookup.

    A Feistel network over a grid of a x b >= size cells (a and b near its root), whose cells beyond ``size``
    are walked past (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). The round function is
    splitmix64's finaliser, keyed by BLAKE2b: well mixed, not meant to keep a secret.
    """

    __slots__ = ("_columns", "_keys", "_rows", "_size")

    def __init__(self, size: int, key: bytes) -> None:
        self._size = size
        self._rows = math.isqrt(max(size - 1, 0)) + 1
        self._columns = -(-size // self._rows)
        halves = (blake2b(key, digest_size=_ROUNDS * 4, salt=bytes([half])).digest() for half in (0, 1))
        words = struct.unpack(f"<{_ROUNDS}Q", b"".join(halves))
        self._keys = list(zip(words[::2], words[1::2], strict=True))

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < self._size:
            raise IndexError(f"position {position} of {self._size}")
        while (position := self._network(position)) >= self._size:
            pass
        return position

    def _network(self, cell: int) -> int:
        rows, columns = self._rows, self._columns
        row, column = divmod(cell, columns)
        for down, across in self._keys:
            row = (row + (_mix(column ^ down) * rows >> 64)) % rows
            column = (column + (_mix(row ^ across) * columns >> 64)) % columns
        return row * columns + column


def _mix(z: int) -> int:
    """splitmix64's finaliser: 64 bits in, 64 well mixed bits out."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class WindowShuffle:
    """A shuffle for tables that are read a block at a time: blocks in random order, rows within a window of them.

    A window holds as many whole blocks as weigh ``limit`` together, or one. Rows of one window come before any
    of the next, so that a pass over the table visits each block once; a table within ``limit`` is shuffled whole.
    ``sizes``: rows of each block; ``weights``: what holding it costs. Costs some bytes of memory a block.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[int], limit: int, key: bytes) -> None:
        blocks = Shuffle(len(sizes), key + b" blocks")
        self._blocks = np.array([blocks[at] for at in range(len(sizes))], dtype=np.int64)
        self._starts = np.concatenate([[0], np.cumsum(np.array(sizes, dtype=np.int64))])
        self._ends = np.cumsum(np.diff(self._starts)[self._blocks])
        self._window_ends = np.array(self._windows(weights, limit), dtype=np.int64)
        self._key = key
        self._inside: tuple[int, Shuffle] | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, position: int) -> int:
        if not 0 <= position < len(self):
            raise IndexError(f"position {position} of {len(self)}")
        window = int(np.searchsorted(self._window_ends, position, side="right"))
        begin = int(self._window_ends[window - 1]) if window else 0
        if self._inside is None or self._inside[0] != window:
            size = int(self._window_ends[window]) - begin
            self._inside = window, Shuffle(size, self._key + f" window {window}".encode())
        place = begin + self._inside[1][position - begin]
        at = int(np.searchsorted(self._ends, place, side="right"))
        block = int(self._blocks[at])
        return int(self._starts[block + 1]) - (int(self._ends[at]) - place)

    def _windows(self, weights: Sequence[int], limit: int) -> list[int]:
        """Where each window ends, in positions."""
        ends: list[int] = []
        weight = 0
        for at, block in enumerate(map(int, self._blocks)):
            weight += weights[block]
            if weight > limit or not ends:
                ends.append(0)
                weight = weights[block]
            ends[-1] = int(self._ends[at])
        return ends

"""Rows epoch by epoch, from a table or from a user's function of a seed."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Literal, Protocol

import numpy as np

from croze.env.row import kind
from croze.env.rows import Rows
from croze.errors import TasksError

Purpose = Literal["train", "holdout"]


def derive_seed(seed: int, purpose: Purpose, epoch: int) -> int:
    """A seed in [0, 2^31) for one epoch: even to train on, odd to hold out, so that the two never meet."""
    digest = blake2b(f"croze tasks {seed} {epoch}".encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "little") >> 2) * 2 + (purpose == "holdout")


class Feed(Protocol):
    """Rows epoch by epoch: (number, row) pairs in an order that only seed, purpose and epoch decide."""

    name: str
    finite: bool

    def first(self) -> Any: ...

    def epoch(self, seed: int, purpose: Purpose, epoch: int) -> Iterator[tuple[int, Any]]: ...

    def place(self, number: int, /) -> str: ...


class TableFeed:
    """A finite table, reshuffled every epoch; a row's number is its place in the table, from 0."""

    finite = True

    def __init__(self, rows: Rows) -> None:
        self.name = rows.name
        self.place = rows.place
        self._rows = rows

    def first(self) -> Any:
        self._some()
        return self._rows[0]

    def epoch(self, seed: int, purpose: Purpose, epoch: int) -> Iterator[tuple[int, Any]]:
        self._some()
        numbers = np.arange(len(self._rows), dtype=np.uint32)
        order = np.random.default_rng(derive_seed(seed, purpose, epoch)).permutation(numbers)
        for number in map(int, order):
            yield number, self._rows[number]

    def _some(self) -> None:
        if len(self._rows) == 0:
            raise TasksError("there are no rows", where=self.name, fix="give at least one task")


class CallFeed:
    """A function of a seed that yields rows; when it ends it is called again with the next epoch's seed."""

    finite = False

    def __init__(self, function: Callable[[int], Iterable[Any]]) -> None:
        self.name = f"{getattr(function, '__name__', type(function).__name__)}()"
        self._function = function

    def first(self) -> Any:
        for _, row in self.epoch(0, "train", 0):
            return row
        raise TasksError("it yields no rows", where=self.name, fix="yield at least one dict with a prompt")

    def epoch(self, seed: int, purpose: Purpose, epoch: int) -> Iterator[tuple[int, Any]]:
        rows = self._call(derive_seed(seed, purpose, epoch))
        for number in itertools.count():
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # the user's code: shown as theirs, with its place
                raise _user_error(f"{self.name} failed at row {number}", error) from error
            yield number, row

    def place(self, number: int) -> str:
        return f"{self.name}, row {number}"

    def _call(self, seed: int) -> Iterator[Any]:
        try:
            rows = self._function(seed)
        except Exception as error:  # the user's code, or a signature without a seed
            raise _user_error(f"{self.name} cannot be called with a seed", error) from error
        if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
            raise TasksError(
                f"it returned {kind(rows)}, not rows",
                where=self.name,
                fix="write `def problems(seed): yield {...}`",
            )
        return iter(rows)


def _user_error(what: str, error: Exception) -> TasksError:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return TasksError(f"{what}: {type(error).__name__}: {error}", where=f"{frame.filename}:{frame.lineno}")

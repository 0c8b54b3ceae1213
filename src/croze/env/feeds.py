"""Rows epoch by epoch, from a table or from a user's function of a seed."""

from __future__ import annotations

import inspect
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Literal, Protocol

from croze.env.row import kind
from croze.env.rows import Rows
from croze.errors import TasksError, told

Purpose = Literal["train", "holdout"]


def derive_seed(seed: int, purpose: Purpose, epoch: int) -> int:
    """A seed in [0, 2^31) for one epoch: even to train on, odd to hold out, so that the two never meet."""
    digest = blake2b(f"croze tasks {seed} {epoch}".encode(), digest_size=4).digest()
    return (int.from_bytes(digest, "little") >> 2) * 2 + (purpose == "holdout")


class Feed(Protocol):
    """Rows epoch by epoch: (number, row) pairs in an order that only seed, purpose and epoch decide.

    ``epoch(..., start)`` leaves out the first ``start`` pairs; it is empty when there are no more than those.
    ``identity()`` and the pairs of ``sample()`` are others when the data are others.
    """

    name: str
    finite: bool

    def first(self) -> Any: ...

    def epoch(self, seed: int, purpose: Purpose, epoch: int, start: int = 0) -> Iterator[tuple[int, Any]]: ...

    def identity(self) -> list[Any]: ...

    def sample(self) -> Iterator[tuple[int, Any]]: ...

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

    def epoch(self, seed: int, purpose: Purpose, epoch: int, start: int = 0) -> Iterator[tuple[int, Any]]:
        self._some()
        order = self._rows.order(f"croze tasks {seed} {purpose} {epoch}".encode())
        for position in range(start, len(order)):
            number = order[position]
            yield number, self._rows[number]

    def identity(self) -> list[Any]:
        return self._rows.identity()

    def sample(self) -> Iterator[tuple[int, Any]]:
        size, count = len(self._rows), min(self._rows.sampled, len(self._rows))
        for at in range(count):
            number = at * (size - 1) // max(count - 1, 1)
            yield number, self._rows[number]

    def _some(self) -> None:
        if len(self._rows) == 0:
            raise TasksError("there are no rows", where=self.name, fix="give at least one task")


class CallFeed:
    """A function of a seed that yields rows; when it ends it is called again with the next epoch's seed.

    It must yield the same rows whenever it is called with the same seed. It cannot be entered in the middle:
    to start at a row, it is called and the rows before that one are dropped, which takes their time.
    """

    finite = False
    sampled = 4

    def __init__(self, function: Callable[[int], Iterable[Any]]) -> None:
        self.name = f"{getattr(function, '__name__', type(function).__name__)}()"
        code = getattr(inspect.unwrap(function), "__code__", None)
        self._file = code.co_filename if code else ""
        self._where = f"{self.name} ({self._file}:{code.co_firstlineno})" if code else self.name
        self._function = function

    def first(self) -> Any:
        for _, row in self.epoch(0, "train", 0):
            return row
        raise TasksError("it yields no rows", where=self._where, fix="yield at least one dict with a prompt")

    def epoch(self, seed: int, purpose: Purpose, epoch: int, start: int = 0) -> Iterator[tuple[int, Any]]:
        given = derive_seed(seed, purpose, epoch)
        rows = self._call(given)
        for number in itertools.count():
            try:
                row = next(rows)
            except StopIteration:
                return
            except (Exception, SystemExit) as error:  # the user's code: shown as theirs, with its place
                fix = f"to see it again: list(itertools.islice({self.name[:-1]}{given}), {number + 1}))"
                raise self._error(f"{self.name} failed at row {number}", error, fix) from error
            if number >= start:
                yield number, row

    def identity(self) -> list[Any]:
        return []

    def sample(self) -> Iterator[tuple[int, Any]]:
        return itertools.islice(self.epoch(0, "train", 0), self.sampled)

    def place(self, number: int) -> str:
        return f"{self._where}, row {number}"

    def _call(self, seed: int) -> Iterator[Any]:
        fix = f"write `def {self.name[:-2]}(seed): yield {{...}}`"
        try:
            rows = self._function(seed)
        except (Exception, SystemExit) as error:  # the user's code, or a signature without a seed
            raise self._error(f"{self.name} cannot be called with a seed", error, fix) from error
        if inspect.iscoroutine(rows):
            rows.close()
        if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable):
            raise TasksError(f"it returned {kind(rows)}, not rows", where=self._where, fix=fix)
        return iter(rows)

    def _error(self, what: str, error: BaseException, fix: str) -> TasksError:
        """What user code raised, at the last line of its own file that it passed through."""
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == self._file]
        where = f"{self._file}:{lines[-1]}" if lines else self._where
        return TasksError(f"{what}: {told(error)}", where=where, fix=fix)

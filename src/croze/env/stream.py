"""The endless, seeded stream of tasks that the loop draws from, and the cursor at which it goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec

from croze.env.feeds import Feed
from croze.env.row import BadRow, content, to_task
from croze.errors import TasksError
from croze.types import Task

MAX_REPEATS = 10_000
"""Rows in a row that may be passed over as held out or seen before it counts as running dry."""

_Count = Annotated[int, msgspec.Meta(ge=0)]


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """The place in a stream after the last task given: ``row`` rows of that epoch are behind it.

    ``check``: 48 bits of the digest of that last task, by which a stream that goes on notices that the data,
    or the seed, are others; None before the first task.
    """

    epoch: _Count = 0
    row: _Count = 0
    check: _Count | None = None


def make_task(feed: Feed, template: str | None, name: str, number: int, row: Any) -> Task:
    """A feed's row as a task. Raises TasksError with the row's place."""
    try:
        return to_task(name, row, template)
    except BadRow as bad:
        raise TasksError(f"row {number} {bad}", where=feed.place(number), fix=bad.fix) from None


def place_of(feed: Feed, task: Task) -> str:
    """Where the row of a task that was made from ``feed`` lies."""
    return feed.place(int(task.id.rpartition(".")[2]))


class TaskStream:
    """Tasks without end. ``cursor`` is where a stream of the same seed goes on after the last one given.

    Going on costs one row of a table; a function is called again, and what it yielded before is dropped.
    Raises TasksError at a bad row, when no task is left, or when the cursor does not fit the data.
    """

    def __init__(
        self, feed: Feed, template: str | None, seed: int, without: Iterable[Task], start: Cursor | None
    ) -> None:
        self._feed, self._template, self._seed = feed, template, seed
        self._held = {content(task) for task in without}
        self._cursor = start or Cursor()
        self._passed = 0
        self._tasks = self._run(self._cursor)

    def __iter__(self) -> Iterator[Task]:
        return self

    def __next__(self) -> Task:
        return next(self._tasks)

    @property
    def cursor(self) -> Cursor:
        return self._cursor

    def place(self, task: Task) -> str:
        """Where the row of a task that it gave lies: "FILE:LINE", "row N", ..."""
        return place_of(self._feed, task)

    def _run(self, start: Cursor) -> Iterator[Task]:
        for epoch in itertools.count(start.epoch):
            behind = start.row if epoch == start.epoch else 0
            rows = self._feed.epoch(self._seed, "train", epoch, max(behind - 1, 0))
            if behind:
                self._check_last(rows, start)
            yield from self._epoch(rows, epoch, behind)

    def _epoch(self, rows: Iterator[tuple[int, Any]], epoch: int, behind: int) -> Iterator[Task]:
        """What is left of an epoch after ``behind`` rows, the last of which was given."""
        given, row = behind > 0, behind
        for row, (number, data) in enumerate(rows, behind + 1):
            task = self._task(epoch, number, data)
            digest = content(task)  # now: whoever is given the task may change what it holds
            if digest in self._held:
                self._passed += 1
                if self._passed > MAX_REPEATS and not self._feed.finite:
                    raise self._dry()
                continue
            given, self._passed = True, 0
            self._cursor = Cursor(epoch=epoch, row=row, check=_check(digest))
            yield task
        if row == 0:
            raise TasksError(
                "it yields no rows", where=self._feed.name, fix="yield at least one dict with a prompt"
            )
        if not given and self._feed.finite:
            raise self._dry()

    def _task(self, epoch: int, number: int, data: Any) -> Task:
        return make_task(self._feed, self._template, f"{epoch}.{number}", number, data)

    def _check_last(self, rows: Iterator[tuple[int, Any]], start: Cursor) -> None:
        """Take the row before the cursor and see that it is the one that was given."""
        place = f"row {start.row} of epoch {start.epoch}"
        fix = "go on with the data and the seed that the run began with; a function must depend on its seed alone"
        for number, data in rows:
            if start.check not in (None, _check(content(self._task(start.epoch, number, data)))):
                raise TasksError(
                    f"the task before the cursor ({place}) is not the one that the run was given there",
                    where=self._feed.name,
                    fix=fix,
                )
            return
        raise TasksError(f"the rows end before the cursor ({place})", where=self._feed.name, fix=fix)

    def _dry(self) -> TasksError:
        return TasksError(
            f"no tasks are left to train on: all are among the {len(self._held)} held out",
            where=self._feed.name,
            fix="lower loop.eval_tasks, or give Run(eval_tasks=...)",
        )


def _check(digest: bytes) -> int:
    return int.from_bytes(digest[:6], "big")

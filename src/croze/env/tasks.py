"""Where tasks come from: ``cz.tasks`` and the endless, seeded stream that the loop draws from."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import GeneratorType
from typing import Any, cast

from croze.config import suggest
from croze.env.feeds import CallFeed, Feed, TableFeed
from croze.env.row import BadRow, content, kind, template_columns, to_task
from croze.env.rows import HubRows, JsonlRows, ListRows, ParquetRows
from croze.errors import TasksError
from croze.types import Task

MAX_REPEATS = 10_000
"""Rows in a row that may be passed over as held out or seen before it counts as running dry."""


@dataclass(frozen=True, slots=True)
class TaskSource:
    """Rows as tasks. Made by ``cz.tasks``; pure: the same seed always gives the same tasks.

    A task's id is ``EPOCH.NUMBER`` (unique in a stream), or ``held.EPOCH.NUMBER`` for a held-out one; the
    number is the row's place in a finite source, else the place in that epoch.
    """

    _feed: Feed
    _template: str | None = None

    def first(self) -> Task:
        """The first row as a task, to look at before a run. Raises TasksError."""
        return self._task("first.0", 0, self._feed.first())

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the first row's columns, "prompt" not among them: what a reward can ask for by name."""
        return tuple(self.first().columns)

    @property
    def name(self) -> str:
        return self._feed.name

    def stream(self, seed: int, *, without: Iterable[Task] = ()) -> Iterator[Task]:
        """Tasks without end, in an order given by ``seed``.

        A task equal in content to one of ``without`` is passed over: give it what ``holdout`` returned.
        Raises TasksError at a bad row, or when no task is left.
        """
        held = {content(task) for task in without}
        passed = 0
        for epoch in itertools.count():
            rows = given = 0
            for number, row in self._feed.epoch(seed, "train", epoch):
                task = self._task(f"{epoch}.{number}", number, row)
                rows += 1
                if held and content(task) in held:
                    passed += 1
                    if passed > MAX_REPEATS and not self._feed.finite:
                        raise self._dry(len(held))
                    continue
                passed = 0
                given += 1
                yield task
            if rows == 0:
                raise self._empty()
            if given == 0 and self._feed.finite:
                raise self._dry(len(held))

    def holdout(self, n: int, seed: int) -> list[Task]:
        """``n`` different tasks, chosen by ``seed``, for ``stream(..., without=...)`` to leave out.

        A smaller ``n`` gives the first of a larger one. A function is called with seeds that training never
        uses. Raises TasksError when there are fewer than ``n``.
        """
        held: dict[bytes, Task] = {}
        repeats = 0
        for name, number, row in self._holdout_rows(seed):
            if len(held) >= n or repeats > MAX_REPEATS:
                break
            task = self._task(name, number, row)
            repeats = repeats + 1 if content(task) in held else 0
            held.setdefault(content(task), task)
        if len(held) < n:
            raise TasksError(
                f"{n} tasks are to be held out but only {len(held)} different ones were found",
                where=self.name,
                fix="lower loop.eval_tasks, or give Run(eval_tasks=...)",
            )
        return list(held.values())

    def _holdout_rows(self, seed: int) -> Iterator[tuple[str, int, Any]]:
        for epoch in range(1) if self._feed.finite else itertools.count():
            number = None
            for number, row in self._feed.epoch(seed, "holdout", epoch):
                yield f"held.{epoch}.{number}", number, row
            if number is None:
                return

    def _empty(self) -> TasksError:
        return TasksError("it yields no rows", where=self.name, fix="yield at least one dict with a prompt")

    def _dry(self, held: int) -> TasksError:
        return TasksError(
            f"no tasks are left to train on: all are among the {held} held out",
            where=self.name,
            fix="lower loop.eval_tasks, or give Run(eval_tasks=...)",
        )

    def _task(self, name: str, number: int, row: Any) -> Task:
        try:
            return to_task(name, row, self._template)
        except BadRow as bad:
            raise TasksError(f"row {number} {bad}", where=self._feed.place(number), fix=bad.fix) from None


def tasks(source: Any, *, prompt: str | None = None, split: str = "train") -> TaskSource:
    """Declare where tasks come from. Nothing is read or called yet.

    ``source``: a function of a seed that yields rows, a list of rows (or anything with a length and
    subscripts), a ``.jsonl`` or ``.parquet`` path, or ``"hf:ORG/NAME[/CONFIG]"`` with its ``split``. A row is
    a dict with "prompt" (text, or chat messages) and any columns of plain data; ``prompt="{question} Think
    first."`` builds the prompt from columns instead. Raises TasksError.
    """
    if prompt is not None:
        template_columns(prompt)
    return TaskSource(_feed(source, split), prompt)


def as_tasks(source: Any) -> TaskSource:
    """A TaskSource as it is; anything else through ``tasks``."""
    return source if isinstance(source, TaskSource) else tasks(source)


def _feed(source: Any, split: str) -> Feed:
    if isinstance(source, str) and source.startswith("hf:"):
        return TableFeed(HubRows(source.removeprefix("hf:"), split))
    if isinstance(source, str | os.PathLike):
        path = Path(source).expanduser().absolute()
        if path.suffix == ".jsonl":
            return TableFeed(JsonlRows(path))
        if path.suffix == ".parquet":
            return TableFeed(ParquetRows(path))
        fix = suggest(path.suffix, [".jsonl", ".parquet"]) or "give a .jsonl or .parquet file, or hf:ORG/NAME"
        raise TasksError(f"cannot tell how to read {str(source)!r}", where="cz.tasks", fix=fix)
    if isinstance(source, GeneratorType):
        name = source.__name__
        raise TasksError(
            f"{name}(...) was already called; every epoch calls it anew with another seed",
            where="cz.tasks",
            fix=f"write cz.tasks({name})",
        )
    if isinstance(source, Mapping):
        raise TasksError("one dict is one row, not a source", where="cz.tasks", fix="write cz.tasks([{...}])")
    if not isinstance(source, type) and hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return TableFeed(ListRows(source))
    if callable(source):
        return CallFeed(cast(Callable[[int], Iterable[Any]], source))
    raise TasksError(
        f"cannot read tasks from {kind(source)}",
        where="cz.tasks",
        fix="give a function of a seed, a list of dicts, a .jsonl or .parquet path, or hf:ORG/NAME",
    )

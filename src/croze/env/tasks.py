"""Where tasks come from: ``cz.tasks``, and what a source can do: be looked at, streamed, held out from."""

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
from croze.env.files import PACKED_SUFFIXES
from croze.env.jsonl import JsonlRows
from croze.env.parquet import ParquetRows
from croze.env.row import content, digest, kind, template_columns
from croze.env.rows import HubRows, ListRows
from croze.env.stream import MAX_REPEATS, Cursor, TaskStream, make_task, place_of
from croze.errors import TasksError
from croze.types import Task


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

    def place(self, task: Task) -> str:
        """Where the row of a task that ``stream`` or ``holdout`` gave lies: "FILE:LINE", "row N", ..."""
        return place_of(self._feed, task)

    def stream(self, seed: int, *, without: Iterable[Task] = (), start: Cursor | None = None) -> TaskStream:
        """Tasks without end, in an order given by ``seed``; from ``start``, what would have come after it.

        A task equal in content to one of ``without`` is passed over: give it what ``holdout`` returned, and the
        same again with ``start``. A table is entered at the cursor; a function is called again and its rows
        before the cursor are dropped, which takes their time, so it must yield the same for the same seed.
        Raises TasksError, when drawn from, at a bad row, when no task is left, or when the rows end before
        ``start`` or are not those it was taken from.
        """
        return TaskStream(self._feed, self._template, seed, without, start)

    def fingerprint(self) -> str:
        """32 hex digits that tell whether the data are still what they were. Cheap; not proof.

        A file: its size, row count and 64 blocks of 64 KiB (a file up to 4 MiB whole). A list: its length and
        1024 rows. The hub: length, commit and 256 rows. A function: its first 4 rows for one seed. The prompt
        template in every case; names and times of files in none. What lies between the blocks or rows looked
        at may have changed unnoticed, as may a function's later rows and those of other seeds. Raises TasksError.
        """
        identity = self._feed.identity()
        sampled = [content(self._task("sample", number, row)) for number, row in self._feed.sample()]
        return digest([self._template, identity, sampled]).hex()

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

    def _task(self, name: str, number: int, row: Any) -> Task:
        return make_task(self._feed, self._template, name, number, row)


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


def _file(given: Path) -> JsonlRows | ParquetRows:
    try:
        path = given.expanduser().absolute()
    except RuntimeError as error:
        raise TasksError(f"{str(given)!r} names no file: {error}", where="cz.tasks") from None
    if path.suffix == ".jsonl":
        return JsonlRows(path)
    if path.suffix == ".parquet":
        return ParquetRows(path)
    if path.suffix in PACKED_SUFFIXES:
        what = "is compressed: its rows cannot be read in any order"
        fix = f"decompress it with {PACKED_SUFFIXES[path.suffix]}, and give the .jsonl file"
    else:
        what = "is not a kind of file that can be read"
        fix = suggest(path.suffix, [".jsonl", ".parquet"]) or "give a .jsonl or .parquet file, or hf:ORG/NAME"
    raise TasksError(f"{str(given)!r} {what}", where="cz.tasks", fix=fix)


def _feed(source: Any, split: str) -> Feed:
    if isinstance(source, str) and source.startswith("hf:"):
        return TableFeed(HubRows(source.removeprefix("hf:"), split))
    if isinstance(source, str | os.PathLike):
        return TableFeed(_file(Path(source)))
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

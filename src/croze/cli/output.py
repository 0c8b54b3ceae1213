"""Where a verb's answer goes: stdout, as text or as one JSON object a line."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any


class Output:
    """Stdout. With ``json`` it is kept for records alone: all else that is printed, by the user's file or by
    child processes too, goes to stderr."""

    def __init__(self, *, json: bool) -> None:
        self.json = json
        self._stdout = -1

    def __enter__(self) -> Output:
        if self.json:
            sys.stdout.flush()
            self._stdout = os.dup(1)
            os.dup2(2, 1)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            # whoever read our output went away; Python must not fail once more when it flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if self._stdout >= 0:
            os.dup2(self._stdout, 1)
            os.close(self._stdout)
            self._stdout = -1

    def record(self, record: Mapping[str, Any] | Sequence[Any]) -> None:
        """One JSON object, or a list of them, on a line of its own; numbers that JSON lacks become null."""
        from croze.trace.metrics import encode_line

        line = memoryview(encode_line(record))
        while line:
            line = line[os.write(self._stdout, line) :]

    def text(self, text: str) -> None:
        print(text, flush=True)

    def flush(self) -> None:
        sys.stdout.flush()

    @property
    def live(self) -> bool:
        """Whether a person watches: text on a terminal that can move its cursor."""
        return not self.json and sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def printable(text: str, *, lines: bool = False) -> str:
    """Text that cannot steer a terminal: control characters as escapes (line breaks kept where ``lines``)."""
    return "".join(
        c if (c == "\n" and lines) or unicodedata.category(c)[0] != "C" else _escape(c) for c in text
    )


def excerpt(text: str, width: int) -> str:
    """The beginning of a text on one line, at most ``width`` characters."""
    line = printable(text[: 2 * width])
    return line if len(line) <= width and len(text) <= 2 * width else line[: width - 1] + "…"


def number(value: Any) -> str:
    """A value as text: four digits of a float, shortened ids."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return "-" if value is None else str(value)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of words in columns, the last one ragged."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (
        [*(word.ljust(width) for word, width in zip(row[:-1], widths, strict=False)), row[-1]] for row in rows
    )
    return "\n".join("  ".join(row).rstrip() for row in padded)


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")

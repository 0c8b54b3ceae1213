"""One row made a Task: what a row must be, and prompts built from columns."""

from __future__ import annotations

import difflib
import string
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from croze.config import suggest
from croze.errors import TasksError
from croze.types import Task

_encoder = msgspec.json.Encoder(order="deterministic")


class BadRow(Exception):
    """What is wrong with a row; whoever knows its place makes a TasksError of it."""

    def __init__(self, what: str, fix: str | None = None) -> None:
        super().__init__(what)
        self.fix = fix


def to_task(name: str, row: Any, template: str | None) -> Task:
    """The task a row stands for; its prompt is the template filled in where there is one. Raises BadRow."""
    if not isinstance(row, Mapping):
        raise BadRow(f"is {kind(row)}, not a dict", 'write {"prompt": ..., "answer": ...}')
    strange = next((key for key in row if not isinstance(key, str)), None)
    if strange is not None:
        raise BadRow(f"has a column named {strange!r}; names are text")
    if template is not None:
        prompt = _fill(template, row)
    elif "prompt" in row:
        prompt = row["prompt"]
    else:
        near = difflib.get_close_matches("prompt", row, n=1)
        raise BadRow(
            f"has no prompt; its columns are {', '.join(row) or 'none'}",
            f"call the column {near[0]!r} 'prompt'"
            if near
            else 'add "prompt", or build it: cz.tasks(..., prompt="{question}")',
        )
    _check_prompt(prompt)
    task = Task(id=name, prompt=prompt, columns={k: v for k, v in row.items() if k != "prompt"})
    for column, value in task.columns.items():
        try:
            _encoder.encode(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadRow(
                f"holds in column {column!r} what is not plain data: {error}",
                "use text, numbers, lists and dicts: columns are recorded and cross process boundaries",
            ) from None
    return task


def _check_prompt(prompt: Any) -> None:
    if not isinstance(prompt, str | list):
        raise BadRow(f"has a prompt that is {kind(prompt)}", "a prompt is text or a list of chat messages")
    if not prompt:
        raise BadRow("has an empty prompt", "write one, or leave the row out")
    if isinstance(prompt, list):
        for at, message in enumerate(prompt):
            _check_message(at, message)
    try:
        _encoder.encode(prompt)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(
            f"has a prompt that is not plain data: {error}",
            "use text that UTF-8 can hold, numbers, lists and dicts",
        ) from None


def _check_message(at: int, message: Any) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not message["role"]:
        raise BadRow(
            f"has a prompt whose message {at} is not a chat message: {message!r:.80}",
            'write {"role": "user", "content": "..."}',
        )
    content = message.get("content")
    if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
        raise BadRow(f"has a prompt whose message {at} has {kind(content)} as content", "content is text")


def template_columns(template: Any) -> list[str]:
    """The columns a template names. Raises TasksError when it cannot be read."""
    if not isinstance(template, str):
        raise TasksError(f"prompt= wants a text, got {kind(template)}", where="cz.tasks")
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise TasksError(
            f"prompt={template!r} cannot be read: {error}", where="cz.tasks", fix="write {{ for {"
        ) from None
    columns = [name.split(".")[0].split("[")[0] for name in names]
    if not all(name.isidentifier() for name in columns):
        raise TasksError(
            f"prompt={template!r} has a field without a column's name",
            where="cz.tasks",
            fix="write {column}, and {{ }} for braces that stay",
        )
    return columns


def _fill(template: str, row: Mapping[str, Any]) -> str:
    for name in template_columns(template):
        if name not in row:
            raise BadRow(
                f"has no column {name!r}, which prompt= names; its columns are {', '.join(row) or 'none'}",
                suggest(name, row) or "name a column that every row has",
            )
    try:
        return template.format_map(row)
    except (ValueError, LookupError, AttributeError, TypeError) as error:
        raise BadRow(
            f"does not fit prompt={template!r}: {error}", "see what the columns that it names hold"
        ) from None


def content(task: Task) -> bytes:
    """Digest of prompt and columns: equal means the same task, whatever its id."""
    return digest([task.prompt, task.columns])


def digest(value: Any) -> bytes:
    """16 bytes that stand for plain data."""
    return blake2b(_encoder.encode(value), digest_size=16).digest()


def kind(value: Any) -> str:
    """``value``'s type as a person would say it."""
    if value is None:
        return "nothing"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"

"""List every key that an override may set, with its default, type, range and meaning.

croze keys             all of them
croze keys optim       those of a section, or that contain a word
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import math
import textwrap
import typing
from typing import Any

from croze import config
from croze.cli.output import Output
from croze.config import suggest
from croze.errors import UsageError
from croze.run import TOP_KEYS, Run, all_keys

WIDTH = 110
"""Columns a line of text may have."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("word", nargs="?", metavar="WORD", help="only keys that contain this")


def run(arguments: argparse.Namespace, output: Output) -> None:
    word: str = arguments.word or ""
    rows = [row for row in describe_keys() if word in row["key"]]
    if not rows:
        raise UsageError(f"no key contains {word!r}", where="croze keys", fix=suggest(word, all_keys()))
    for row in rows:
        if output.json:
            output.record(row)
        else:
            output.text(_shown(row))


def describe_keys() -> list[dict[str, Any]]:
    """Every key as {"key", "default", "type", "range", "doc"}.

    The default is None where the task file must say it. The range is [least, greatest], both allowed, with None
    for a side without a bound, and None for a key without a range.
    """
    rows = [_row(key, Run, name) for key, name in TOP_KEYS.items()]
    for section, cls in config.SECTIONS.items():
        rows += [_row(f"{section}.{field.name}", cls, field.name) for field in dataclasses.fields(cls)]
    return rows


def field_docs(cls: type) -> dict[str, str]:
    """The text under each field of a class, as one line."""
    tree = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs: dict[str, str] = {}
    for field, text in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if (
            isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
            and isinstance(text.value.value, str)
        ):
            docs[field.target.id] = " ".join(text.value.value.split())
    return docs


def _row(key: str, cls: type, name: str) -> dict[str, Any]:
    field = next(f for f in dataclasses.fields(cls) if f.name == name)
    default = None if field.default is dataclasses.MISSING else config.to_plain(field.default)
    kind = _kind(typing.get_type_hints(cls)[name])
    bounds = config.RANGES.get(key)
    return {
        "key": key,
        "default": default,
        "type": kind,
        "range": None if bounds is None else [b if math.isfinite(b) else None for b in bounds],
        "doc": field_docs(cls).get(name, ""),
    }


def _kind(annotation: Any) -> str:
    origin, parts = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return " | ".join(map(str, parts))
    if origin is tuple:
        return "words,with,commas" if parts[-1] is Ellipsis else ",".join(_kind(p) for p in parts)
    return {int: "whole number", float: "number", bool: "true | false", str: "text"}.get(
        annotation, str(annotation)
    )


def _shown(row: dict[str, Any]) -> str:
    """A key in two parts: itself with its default, and below what it takes and means."""
    default = "" if row["default"] is None else f" = {told(row['default'])}"
    takes = row["type"] + (f", {spread(*row['range'])}" if row["range"] else "")
    lines = textwrap.wrap(
        f"{takes}. {row['doc']}",
        WIDTH,
        initial_indent="    ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )
    return "\n".join([f"{row['key']}{default}", *lines])


def spread(least: float | None, greatest: float | None) -> str:
    """A range in words; None for a side without a bound."""
    if greatest is None:
        return f"at least {told(least)}"
    return f"at most {told(greatest)}" if least is None else f"{told(least)} to {told(greatest)}"


def told(default: Any) -> str:
    """A default as a person would write it."""
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, list):
        return ",".join(map(str, default)) or "(none)"
    return str(default) if default != "" else "(empty)"

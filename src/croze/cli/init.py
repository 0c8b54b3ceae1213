"""Write a task file to start from: it runs as it is, and its comments say what is what.

croze init sums                          sums.py: arithmetic, with the built-in tiny model, trained in a minute
croze init sums --env code               graded by hidden tests; --env tool: the reply is run by Python
croze init sums --model smollm2-135m-instruct    for a chat model: a built-in name, a hub id or a directory

A file that is there is never changed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import typing
from pathlib import Path

from croze.cli import starters
from croze.cli.output import Output, printable
from croze.errors import InfraFault, UsageError

_LONGEST = 100


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the task file to write: NAME.py")
    parser.add_argument(
        "--env",
        choices=typing.get_args(starters.Environment),
        default="math",
        help="what the model is to learn (default math)",
    )
    parser.add_argument(
        "--model", metavar="MODEL", default=starters.TINY, help=f"the model (default {starters.TINY})"
    )


def run(arguments: argparse.Namespace, output: Output) -> None:
    path = _path(arguments.name)
    model = arguments.model
    if not model or printable(model) != model:
        raise UsageError(
            f"{model!r} names no model", where="--model", fix="croze init NAME --model tiny-calc"
        )
    _write(path, starters.write(arguments.env, model, path.stem))
    then = [f"croze check {path}", f"croze train {path} steps=2"]
    if output.json:
        output.record(
            {"event": "init", "file": str(path), "env": arguments.env, "model": model, "next": then}
        )
    else:
        output.text("\n  ".join([f"wrote {path}. It runs as it is:", *then]))


def _path(name: str) -> Path:
    """Where to write. Raises UsageError for what cannot name a task file."""
    folder, stem = os.path.split(name.removesuffix(".py"))
    path = Path(folder, f"{stem}.py")
    if not re.fullmatch(r"[\w-][\w.-]*", stem) or len(stem) > _LONGEST:
        cleaned = re.sub(r"[^\w-]+", "_", stem).strip("_")[:_LONGEST]
        raise UsageError(
            f"{printable(name)!r} cannot name a task file",
            where="NAME",
            fix=f"use letters, digits, - and _: croze init {cleaned or 'calc'}",
        )
    if os.path.lexists(path):
        raise UsageError(
            f"{path} is there already", where=str(path), fix="choose another name; it is not changed"
        )
    if stem in sys.stdlib_module_names or (stem.isidentifier() and _importable(stem)):
        raise UsageError(
            f"a file {stem}.py would hide the Python module {stem}, which it or others import",
            where="NAME",
            fix=f"choose another name: croze init {path.with_stem('my_' + stem).with_suffix('')}",
        )
    return path


def _importable(name: str) -> bool:
    """Whether there is a module of this name that is not a file of the working directory."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    return found is not None and (found.origin is None or Path(found.origin).parent != Path.cwd())


def _write(path: Path, text: str) -> None:
    """The whole file or none, and none that was there. Raises UsageError."""
    try:
        with path.open("x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError:
        raise UsageError(f"{path} is there already", where=str(path), fix="choose another name") from None
    except FileNotFoundError:
        raise UsageError(
            f"there is no folder {path.parent}", where=str(path), fix=f"mkdir -p {path.parent}"
        ) from None
    except (PermissionError, NotADirectoryError) as error:
        raise UsageError(
            f"{path} cannot be written: {error.strerror}",
            where=str(path),
            fix="choose a folder that you may write to",
        ) from None
    except OSError as error:
        raise InfraFault(f"{path} cannot be written: {error.strerror}", where=str(path)) from error

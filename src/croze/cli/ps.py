"""List runs: what each is doing, how far it is, and whether it can be resumed.

croze ps              the runs under runs/
croze ps DIR ...      the runs in these folders, or these runs

States: running; finished; interrupted (stopped in order, or ended by an error) and dead (its process ended without a
word), which `croze resume` goes on with; broken (its declaration cannot be read). Nothing is changed by looking.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from croze.cli.output import Output, aligned, number, printable
from croze.errors import UsageError
from croze.loop.status import RunStatus, runs_in

RUNS = "runs"
_TITLES = ("run", "state", "step", "reward", "saved", "pid", "age", "active", "folder")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folders", nargs="*", metavar="DIR", help="folders of runs, or runs (default: runs/)")


def run(arguments: argparse.Namespace, output: Output) -> None:
    found = find(arguments.folders)
    if output.json:
        output.record([as_json(one) for one in found])
    elif not found:
        output.text(f"no runs in {', '.join(map(printable, arguments.folders)) or RUNS + '/'}")
    else:
        output.text(table(found, time.time()))


def find(folders: Iterable[str] = ()) -> list[RunStatus]:
    """The runs of these folders (none given: of ``runs/``), running ones first, then by their last activity.

    Raises UsageError for a folder that cannot be listed.
    """
    runs: dict[Path, RunStatus] = {}
    for word in folders or (RUNS,):
        try:
            runs |= {Path(one.path).resolve(): one for one in runs_in(Path(word))}
        except FileNotFoundError:
            if folders:
                raise UsageError(
                    "there is no such folder", where=word, fix="croze ps lists the runs under runs/"
                ) from None
        except NotADirectoryError:
            raise UsageError("this is no folder", where=word, fix="give a folder of runs") from None
        except OSError as error:
            raise UsageError(f"the folder cannot be listed: {error.strerror}", where=word) from None
    return sorted(runs.values(), key=lambda one: (one.state != "running", -(one.active or 0.0), one.path))


def as_json(one: RunStatus) -> dict[str, Any]:
    return msgspec.to_builtins(one) | {"resumable": one.resumable}


def table(runs: Iterable[RunStatus], now: float) -> str:
    """The runs in columns, and below what is to be said of some. ``now``: Unix seconds."""
    rows = [[printable(word) for word in _row(one, now)] for one in runs]
    notes = [f"{one.name}: {one.note}" for one in runs if one.note]
    return "\n".join([aligned([_TITLES, *rows]), *map(printable, notes)])


def _row(one: RunStatus, now: float) -> tuple[str, ...]:
    step = "-" if one.step is None else str(one.step)
    return (
        one.name,
        one.state,
        step if one.steps is None else f"{step} of {one.steps}",
        number(one.reward_mean),
        number(one.checkpoint),
        number(one.pid),
        _ago(one.created, now),
        _ago(one.active, now),
        one.path,
    )


def _ago(then: float | None, now: float) -> str:
    """How long ago, in its largest unit."""
    if then is None:
        return "-"
    seconds = max(0.0, now - then)
    for unit, length in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"

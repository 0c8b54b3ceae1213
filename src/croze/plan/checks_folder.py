"""Whether the run of a folder can go on: its declaration, its task file as it was, a whole checkpoint, a ledger that
adds up, a model that can be had, and nobody who holds the folder."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from croze.env.tasks import as_tasks
from croze.errors import InfraFault
from croze.loop.checkpoints import Checkpoints
from croze.loop.folder import LOCK, file_digest, holder, read_config
from croze.loop.ledger import SqliteLedger
from croze.loop.load import load_declared
from croze.models.source import resolve
from croze.plan import machine
from croze.plan.checks import Check, Report, deadline
from croze.plan.checks_tasks import longest_wait

LEDGER = "ledger.sqlite"


@dataclass(slots=True, kw_only=True)
class FolderContext:
    """A run folder, and what checks have found out so far. ``committed``: weights ids by step of the ledger."""

    path: Path
    config: dict[str, Any] = field(default_factory=dict)
    committed: dict[int, str] = field(default_factory=dict)


def look_at_folder(context: FolderContext, report: Report) -> None:
    """The declaration, and whether somebody works here now."""
    context.config = read_config(context.path)
    by = holder(context.path)
    if by is not None:
        report.fail(
            "usage",
            f"in use by process {by.pid} on {by.host}",
            where=str(context.path / LOCK),
            fix="wait for it, or stop it: croze stop",
        )
    else:
        report.ok(f"declared by croze {context.config.get('croze', '?')}; nobody holds it")


def look_at_file(context: FolderContext, report: Report) -> None:
    """The task file: there, and as it was when the run was started."""
    file, then = context.config["file"], context.config.get("file_digest", "")
    if not file:
        report.fail(
            "declaration",
            "the run was made in Python: no task file is known",
            where=str(context.path),
            fix="resume it from the program that started it",
        )
    elif not Path(file).is_file():
        report.fail("declaration", "the task file is gone", where=file, fix="put it back")
    elif then and file_digest(file) != then:
        report.fail(
            "usage",
            "the task file has changed since the run was started",
            where=file,
            fix="put back what it was, or say that it may differ: croze resume --changed",
        )
    else:
        report.ok("the task file is as it was", where=file)


def look_at_ledger(context: FolderContext, report: Report) -> None:
    """The account of all rollouts adds up, and says which steps are committed."""
    path = context.path / LEDGER
    if not path.exists():
        report.warn(
            "folder.new", "there is no ledger yet: the run begins with its first step", where=str(path)
        )
        return
    try:
        ledger = SqliteLedger(path)
        try:
            counts, commits = ledger.counts(), ledger.steps()
        finally:
            ledger.close()
    except (sqlite3.Error, msgspec.MsgspecError) as error:
        raise InfraFault(
            f"the ledger cannot be read: {error}", where=str(path), fix="restore the file from a copy"
        ) from error
    context.committed = {commit.step: commit.weights_id for commit in commits}
    report.ok(f"{counts.dispatched} rollouts, all accounted for; {len(commits)} steps committed")


def look_at_checkpoint(context: FolderContext, report: Report) -> None:
    """The newest checkpoint that is whole to the last byte and of the ledger's own history."""
    last = max(context.committed, default=0)
    checkpoints = Checkpoints(context.path / "checkpoints")
    found, broken = checkpoints.newest(context.committed)
    for one in broken:
        report.warn("checkpoint", f"{one.path.name} is passed over: {one.why}", where=str(one.path))
    if found is None:
        report.warn(
            "folder.new",
            "there is no whole checkpoint: the run begins with its first step",
            where=str(checkpoints.folder),
        )
        return
    free = machine.free_bytes(context.path)
    if free < found.manifest.bytes:
        report.warn(
            "disk.tight",
            f"a checkpoint takes {found.manifest.bytes >> 20} MiB, {free >> 20} MiB are free",
            where=str(context.path),
            fix="free some space",
        )
    steps = context.config["keys"].get("steps", 0)
    if found.step >= steps:
        report.ok(f"finished: all {steps} steps are done", where=str(found.path))
    else:
        again = f"; {last - found.step} steps after it are done again" if last > found.step else ""
        report.ok(f"goes on after step {found.step} of {steps}{again}", where=str(found.path))


def look_at_tasks(context: FolderContext, report: Report) -> None:
    """The data: those that the run was given tasks from, as far as their fingerprint tells."""
    then = context.config.get("tasks")
    source = as_tasks(load_declared(context.path).tasks)
    with deadline(longest_wait(source), "reading tasks", source.name):
        now = source.fingerprint()
    if then is not None and then != now:
        report.fail(
            "usage",
            "the tasks have changed since the run was started",
            where=source.name,
            fix="put back what they were: a run cannot go on at its place in other data",
        )
    else:
        report.ok(
            "the tasks are what they were" if then else "the run has not read its tasks yet",
            where=source.name,
        )


def look_at_model(context: FolderContext, report: Report) -> None:
    """The model the run started from: read again when it goes on."""
    files = resolve(context.config["keys"]["model"])
    then = context.config.get("model")
    if isinstance(then, dict) and then.get("source") != files.source:
        report.warn(
            "model.source",
            f"the model now comes from {files.source}, then from {then.get('source')}",
            where=str(files.path),
            fix="the weights must be the same; resume compares them",
        )
    else:
        report.ok(f"{files.name} is there and whole", where=files.source)


CHECKS = (
    Check(name="folder", look=look_at_folder),
    Check(name="file", look=look_at_file, needs=("folder",)),
    Check(name="tasks", look=look_at_tasks, needs=("file",)),
    Check(name="ledger", look=look_at_ledger, needs=("folder",)),
    Check(name="checkpoint", look=look_at_checkpoint, needs=("ledger",)),
    Check(name="model", look=look_at_model, needs=("folder",)),
)

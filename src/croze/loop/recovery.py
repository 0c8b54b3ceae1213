"""Where a run goes on: the newest whole checkpoint, with ledger, metrics and trace cut back to its step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from croze.env.tasks import as_tasks
from croze.errors import UsageError
from croze.loop.checkpoints import Broken, Checkpoint, Checkpoints, Cut
from croze.loop.folder import RunFolder, file_digest
from croze.loop.ledger import Ledger, Resumed
from croze.run import Run
from croze.trace import marks


class Recovered(msgspec.Struct, frozen=True, kw_only=True):
    """What a run goes on from. ``checkpoint`` None: from its beginning. ``broken``: passed over, newest first."""

    checkpoint: Checkpoint | None = None
    broken: tuple[Broken, ...] = ()
    resumed: Resumed | None = None

    @property
    def step(self) -> int:
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def cut(self) -> Cut | None:
        """What was cut at ``step``."""
        if self.checkpoint is None:
            return None
        manifest = self.checkpoint.manifest
        return Cut(step=manifest.step, weights_id=manifest.weights_id, state=manifest.state)

    @property
    def state(self) -> dict[str, Any]:
        return self.checkpoint.manifest.state if self.checkpoint else {}


def recover(
    path: Path, ledger: Ledger, checkpoints: Checkpoints, note: Callable[[Mapping[str, Any]], None]
) -> Recovered:
    """Choose the checkpoint and cut everything back to its step; ledger and checkpoint are of one step or not used.

    ``note`` keeps which checkpoints were passed over, before anything changes. Only for whoever holds the folder.
    Cut off half-way it can simply be done again.
    """
    committed = {commit.step: commit.weights_id for commit in ledger.steps()}
    found, broken = checkpoints.newest(committed)
    for lost in broken:
        note({"event": "broken_checkpoint", "checkpoint": lost.path.name, "why": lost.why})
    step = found.step if found else 0
    resumed = ledger.cut(step, time.time())
    marks.cut(path, found.manifest.state["marks"] if found else {})
    checkpoints.go_on_from(step)
    return Recovered(checkpoint=found, broken=tuple(broken), resumed=resumed)


def check_unchanged(folder: RunFolder, run: Run, *, may_differ: bool) -> None:
    """Refuse to go on with another task file, or other tasks, than the run was started with. Raises UsageError.

    Where they ``may_differ``, the stream of tasks still refuses when the task before its cursor is another one.
    """
    if may_differ:
        return
    config = folder.config
    then = config.get("file_digest", "")
    if then and then != file_digest(run.file):
        raise UsageError(
            "the task file has changed since the run was started",
            where=run.file,
            fix="put back what it was, or say that it may differ: croze resume --changed",
        )
    source = as_tasks(run.tasks)
    if "tasks" in config and config["tasks"] != source.fingerprint():
        raise UsageError(
            "the tasks have changed since the run was started",
            where=source.name,
            fix="put back what they were, or, if the rows so far are what they were: croze resume --changed",
        )

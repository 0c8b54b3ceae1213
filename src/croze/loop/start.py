"""``train`` and ``resume``: check the declaration, claim the run folder, and only then load what computes.

No torch here: ``config.json`` is on the disk before it is imported, so that a run can be resumed from its first
second on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from croze.errors import DeclarationError, Interrupted, UsageError
from croze.loop import declaration
from croze.loop.checkpoints import Checkpoint, Checkpoints, verify
from croze.loop.folder import RunFolder
from croze.loop.ledger import SqliteLedger
from croze.loop.load import load_declared
from croze.loop.recovery import check_unchanged
from croze.run import Run
from croze.types import WeightsId

if TYPE_CHECKING:
    from croze.loop.training import Training

OnEvent = Callable[[dict[str, Any]], None]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A finished training: its run folder, the last weights' id, and a model folder that others can load."""

    run_dir: Path
    weights_id: WeightsId
    model_dir: Path


def train(run: Run, *, on_event: OnEvent | None = None) -> Result:
    """Train a declared run to its last step. Events (dicts) go to ``on_event`` as they happen.

    Raises UsageError and its kinds for a wrong declaration, before anything heavy starts; InfraFault when the
    machinery fails; Interrupted on Ctrl-C. Whatever ends it, ``resume`` goes on from the run folder.
    """
    folder, run = RunFolder.create(run)
    with folder:
        try:
            return _training(run, folder, on_event or _silent, resumed=False).run_to_end()
        except UsageError:
            folder.discard()
            raise


def resume(
    path: str | Path, run: Run | None = None, *, changed: bool = False, on_event: OnEvent | None = None
) -> Result:
    """Go on with the run in folder ``path`` as if it had never stopped; a finished one is only told.

    ``run``: the declaration of a run that was made in Python; others are read from their task file, which must
    be what it was, as its tasks must, unless ``changed``. Raises as ``train`` does, UsageError also where the
    folder holds no run, or another process holds it.
    """
    listen = on_event or _silent
    with RunFolder.open(Path(path)) as folder:
        with _nothing_lost(folder.path):
            run = load_declared(folder.path, run)
            finished = _finished(run, folder)
            if finished is None:
                check_unchanged(folder, run, may_differ=changed)
        if finished is not None:
            listen({"event": "done", "run_dir": run.dir, "weights_id": finished.weights_id})
            return finished
        return _training(run, folder, listen, resumed=True).run_to_end()


def _training(run: Run, folder: RunFolder, listen: OnEvent, *, resumed: bool) -> Training:
    """Check the declaration, and only then import what computes: seconds."""
    with _nothing_lost(folder.path):
        declaration.check(run)
        from croze.loop.training import Training

        return Training(run, folder, listen, resumed=resumed)


@contextmanager
def _nothing_lost(path: Path) -> Iterator[None]:
    """What an interrupt cuts off here is only the beginning: the run goes on with a resume."""
    try:
        yield
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted(
            "stopped before it had begun", where=str(path), fix=f"croze resume {path}"
        ) from None


def result(run: Run, weights_id: str) -> Result:
    """What a run that has reached its last step gives."""
    model = Path(run.dir) / "checkpoints" / f"step_{run.steps:06d}" / "model"
    return Result(run_dir=Path(run.dir), weights_id=WeightsId(weights_id), model_dir=model)


def _finished(run: Run, folder: RunFolder) -> Result | None:
    """The result of a run whose last step is committed, evaluated where that is due, and saved, whole."""
    database = folder.path / "ledger.sqlite"
    if not database.exists():
        return None
    ledger = SqliteLedger(database)
    try:
        steps = ledger.steps()
    finally:
        ledger.close()
    if not steps or steps[-1].step < run.steps:
        return None
    if steps[-1].step > run.steps:
        raise DeclarationError(
            f"config.json says steps={run.steps}, and {steps[-1].step} are done",
            where=str(folder.path),
            fix=f"put back config.json as the run wrote it: steps is at least {steps[-1].step}",
        )
    checkpoints = Checkpoints(folder.path / "checkpoints", keep=run.loop.keep)
    saved = verify(checkpoints.folder / f"step_{run.steps:06d}")
    if not isinstance(saved, Checkpoint) or saved.manifest.weights_id != steps[-1].weights_id:
        return None
    if not saved.manifest.state.get("evaluated"):
        return None
    checkpoints.go_on_from(run.steps)
    return result(run, steps[-1].weights_id)


def _silent(_: dict[str, Any]) -> None:
    """Nobody listens."""

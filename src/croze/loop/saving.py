"""Saving while training: a checkpoint is written on a thread of its own, beside the next step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from croze.clock import Clock
from croze.errors import InfraFault
from croze.loop.checkpoints import Checkpoints, Cut, Manifest
from croze.train.protocol import Snapshot, Trainer

OnEvent = Callable[[dict[str, Any]], None]
Named = tuple[str, Any]
"""A tensor and its name."""


class Saver:
    """Writes the checkpoints of a run, one at a time. A save that fails is told, and tried again a step later."""

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainer: Trainer,
        write_model: Callable[[list[Named], Path], None],
        keep_files: Callable[[], None],
        *,
        every: int,
        clock: Clock,
        on_event: OnEvent,
        saved: Manifest | None = None,
    ) -> None:
        """``write_model`` writes exported tensors as a model that others load, into a folder it makes; ``keep_files``
        brings onto the disk what else a checkpoint counts on. ``every``: steps between checkpoints, 0: none before
        the end. ``saved``: the checkpoint the run went on from."""
        self._checkpoints, self._trainer = checkpoints, trainer
        self._write_model, self._keep_files = write_model, keep_files
        self._every, self._clock, self._on_event = every, clock, on_event
        self._job: asyncio.Task[None] | None = None
        self._saved = saved
        self._fault: InfraFault | None = None

    def due(self, step: int) -> bool:
        """Whether the state after ``step`` is to be saved."""
        return self._fault is not None or (self._every > 0 and step % self._every == 0)

    async def begin(self, cut: Cut) -> None:
        """Start writing the state as it is now. What it holds still is let go as soon as its bytes are written."""
        asked = self._clock.now()
        await self.finish()
        snapshot, exported = self._trainer.snapshot(), list(self._trainer.export())
        blocked_s = self._clock.now() - asked
        self._job = asyncio.create_task(self._save(cut, snapshot, exported, blocked_s), name="save")

    async def finish(self) -> None:
        """Wait for the save under way, if there is one."""
        if self._job is not None:
            await self._job
            self._job = None

    async def keep(self, cut: Cut | None) -> None:
        """Have the state of ``cut`` on the disk, unless it is there. Raises InfraFault when it cannot be written."""
        await self.finish()
        if cut is None or self._holds(cut):
            return
        await self.begin(cut)
        await self.finish()
        if self._fault is not None:
            raise InfraFault(
                self._fault.message,
                where=self._fault.where,
                fix=f"free space on the disk, then croze resume {self._checkpoints.folder.parent}",
            )

    def _holds(self, cut: Cut) -> bool:
        saved = self._saved
        return saved is not None and (saved.step, saved.state) == (cut.step, cut.state)

    async def _save(self, cut: Cut, snapshot: Snapshot, exported: list[Named], blocked_s: float) -> None:
        """``blocked_s``: how long the loop stood still for it, before it was begun."""
        began = self._clock.now()
        told: dict[str, Any] = {"event": "save", "step": cut.step, "blocked_s": blocked_s}
        try:
            with snapshot:
                self._saved = await asyncio.to_thread(self._write, cut, snapshot, exported)
            self._fault = None
            told |= {"ok": True, "bytes": self._saved.bytes, "seconds": self._clock.now() - began}
        except InfraFault as fault:
            self._fault = fault
            told |= {"ok": False, "message": fault.message, "where": fault.where, "fix": fault.fix}
        self._on_event(told)

    def _write(self, cut: Cut, snapshot: Snapshot, exported: list[Named]) -> Manifest:
        def fill(folder: Path) -> None:
            snapshot.write(folder / "trainer")  # first: the next optimizer step waits for it
            self._write_model(exported, folder / "model")
            self._keep_files()

        expected = self._saved.bytes if self._saved else 0
        return self._checkpoints.write(cut.step, cut.weights_id, cut.state, fill, expected=expected)

"""Checkpoints: a folder each, which exists only through a manifest written last.

``step_NNNNNN/`` holds ``trainer/`` (all that training needs to go on), ``model/`` (what other libraries load) and
``manifest.json`` with the size and blake3 digest of every file. A checkpoint is written beside its name, brought
onto the disk, and renamed; nothing is ever overwritten, and old ones go only after a newer one is whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import blake3
import msgspec

from croze.errors import CheckpointMismatch, InfraFault
from croze.loop.folder import sync_folder

FORMAT = 1
MANIFEST = "manifest.json"
RESERVE = 1 << 30
"""Most bytes kept free of checkpoints (at most a fiftieth of the disk): the ledger and the trace need some too."""
FREE_SPACE = "free space on the disk; the checkpoints before it are whole"

BLOCK = 1 << 18
"""Bytes of a file that are digested at a time."""


class FileSum(msgspec.Struct, frozen=True, kw_only=True):
    """What a file was when written. ``digest``: blake3, hex."""

    bytes: int
    digest: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is: the step it was cut at, the weights' id, the loop's ``state`` there, its files."""

    step: int
    weights_id: str
    state: dict[str, Any]
    files: dict[str, FileSum]
    format: int = FORMAT

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


class Cut(msgspec.Struct, frozen=True, kw_only=True):
    """What is saved beside the files: a committed step, its weights' id, the loop's state there."""

    step: int
    weights_id: str
    state: dict[str, Any]


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """manifest.json: the manifest and the blake3 digest of its own bytes."""

    digest: str
    manifest: msgspec.Raw


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A verified checkpoint."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step


class Broken(msgspec.Struct, frozen=True, kw_only=True):
    """A folder that is no checkpoint any more, and why. ``whole``: its files are; the ledger has not come so far."""

    path: Path
    why: str
    whole: bool = False


class Checkpoints:
    """The checkpoints of a run: ``keep`` newest stay (0: all)."""

    def __init__(self, folder: Path, *, keep: int = 2) -> None:
        self.folder, self._keep = folder, keep

    def write(
        self,
        step: int,
        weights_id: str,
        state: dict[str, Any],
        fill: Callable[[Path], None],
        *,
        expected: int = 0,
    ) -> Manifest:
        """Make the checkpoint of ``step``: ``fill`` writes its files into the folder it is given.

        ``expected``: bytes it may take; refused before it is begun where the disk has not so much. Raises InfraFault,
        and leaves no trace, when the disk is full or fails: the checkpoints before stay.
        """
        staging = self.folder / f".step_{step:06d}.partial"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _remove(staging)
            self._need(expected)
            staging.mkdir()
            fill(staging)
            manifest = Manifest(step=step, weights_id=weights_id, state=state, files=_sums(staging))
            _write_durably(staging / MANIFEST, _seal(manifest))
            for place in (*(p for p in staging.rglob("*") if p.is_dir()), staging):
                sync_folder(place)
            if (name := self.folder / f"step_{step:06d}").exists():
                self._set_aside(name)
            staging.rename(name)
            sync_folder(self.folder)
        except OSError as error:
            _remove(staging)
            raise InfraFault(
                f"the checkpoint of step {step} cannot be written: {error.strerror}",
                where=str(self.folder),
                fix=FREE_SPACE,
            ) from error
        except BaseException:
            _remove(staging)
            raise
        self._prune()
        return manifest

    def newest(self, committed: Mapping[int, str] | None = None) -> tuple[Checkpoint | None, list[Broken]]:
        """The newest checkpoint whose every byte is as it was written, and those passed over on the way.

        ``committed``: weights ids by step of a ledger; a checkpoint that is not of its history is passed over. Raises
        CheckpointMismatch where the newest is of a format that this croze cannot read; InfraFault where there are only
        whole ones that are newer than all that is committed. A step is committed before it is saved: that ledger has
        lost rows, and going on would throw the checkpoints away.
        """
        broken: list[Broken] = []
        for path in reversed(self._folders()):
            found = verify(path) if committed is None else _verify_in(committed, path)
            if isinstance(found, Checkpoint):
                return found, broken
            broken.append(found)
        ahead = next((one for one in broken if one.whole), None)
        if ahead is not None:
            last = max(committed or {}, default=0)
            raise InfraFault(
                f"{ahead.path.name} is whole, and the ledger ends at step {last}: part of it is lost",
                where=str(self.folder),
                fix="put back ledger.sqlite together with ledger.sqlite-wal, or, to do all again after step"
                f" {last}, move the checkpoints to another place",
            )
        return None, broken

    def all(self) -> list[Path]:
        """Folders that have a manifest, oldest first; not verified."""
        return [p for p in self._folders() if (p / MANIFEST).exists()]

    def go_on_from(self, step: int) -> None:
        """Set aside what lies above ``step``, until a newer one is whole, and remove what a write or a removal left
        that was cut off. Only for whoever holds the run folder."""
        for path in self._folders():
            if _step_of(path) > step:
                self._set_aside(path)
            elif not (path / MANIFEST).exists():
                _remove(path)
        for path in self.folder.glob(".step_*.partial"):
            _remove(path)
        self._keep_newest()

    def _folders(self) -> list[Path]:
        return sorted((p for p in self.folder.glob("step_*") if _step_of(p) >= 0), key=_step_of)

    def _need(self, expected: int) -> None:
        disk = shutil.disk_usage(self.folder)
        reserve = min(RESERVE, disk.total // 50)
        if expected and disk.free < expected + reserve:
            free, wanted = disk.free >> 20, (expected + reserve) >> 20
            raise InfraFault(
                f"the disk has {free} MiB free, a checkpoint needs {wanted}",
                where=str(self.folder),
                fix=FREE_SPACE,
            )

    def _set_aside(self, path: Path) -> None:
        aside = self.folder / f".old_{path.name}"
        _remove(aside)
        path.rename(aside)

    def _prune(self) -> None:
        for path in self.folder.glob(".old_*"):
            _remove(path)
        self._keep_newest()

    def _keep_newest(self) -> None:
        for path in self.all()[: -self._keep] if self._keep else ():
            (path / MANIFEST).unlink()  # from here on it is no checkpoint, wherever the removal is cut off
            _remove(path)


def verify(path: Path) -> Checkpoint | Broken:
    """Read and digest every file of a checkpoint. Raises CheckpointMismatch for one of another format."""
    try:
        sealed = msgspec.json.decode((path / MANIFEST).read_bytes(), type=Sealed)
        if blake3.blake3(bytes(sealed.manifest)).hexdigest() != sealed.digest:
            return Broken(path=path, why="its manifest has been changed: its digest is another")
        manifest = msgspec.json.decode(sealed.manifest, type=Manifest)
    except (OSError, UnicodeDecodeError, msgspec.MsgspecError) as error:
        return Broken(path=path, why=f"its manifest cannot be read: {error}")
    if manifest.step != _step_of(path):
        return Broken(path=path, why=f"it is the checkpoint of step {manifest.step}, under another name")
    if manifest.format != FORMAT:
        raise CheckpointMismatch(
            f"the checkpoint has format {manifest.format}, this croze reads {FORMAT}",
            where=str(path),
            fix="resume with the croze that wrote it",
        )
    for name, want in manifest.files.items():
        try:
            have = _sum(path / name)
        except OSError as error:
            return Broken(path=path, why=f"{name}: {error.strerror}")
        if have.bytes != want.bytes:
            return Broken(path=path, why=f"{name} has {have.bytes} bytes instead of {want.bytes}")
        if have.digest != want.digest:
            return Broken(path=path, why=f"{name} has been changed: its digest is another")
    return Checkpoint(path=path, manifest=manifest)


def _verify_in(committed: Mapping[int, str], path: Path) -> Checkpoint | Broken:
    """``verify``, for a checkpoint that must be of a ledger's history."""
    found, last = verify(path), max(committed, default=0)
    if isinstance(found, Checkpoint) and found.step > last:
        return Broken(path=path, why=f"the ledger ends at step {last}", whole=True)
    if isinstance(found, Checkpoint) and committed.get(found.step) != found.manifest.weights_id:
        return Broken(path=path, why=f"the ledger has other weights at step {found.step}")
    return found


def _seal(manifest: Manifest) -> bytes:
    text = msgspec.json.encode(manifest)
    return msgspec.json.encode(Sealed(digest=blake3.blake3(text).hexdigest(), manifest=msgspec.Raw(text)))


def _step_of(path: Path) -> int:
    number = path.name.removeprefix("step_")
    return int(number) if number.isdigit() else -1


def _sums(folder: Path) -> dict[str, FileSum]:
    """Every file's size and digest, after bringing it onto the disk."""
    found = {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        found[file.relative_to(folder).as_posix()] = _sum(file)
    return found


def _sum(file: Path) -> FileSum:
    digest, size = blake3.blake3(), 0
    block = memoryview(bytearray(BLOCK))
    with file.open("rb", buffering=0) as source:  # a mapped file would count as memory of this process
        while read := source.readinto(block):
            digest.update(block[:read])
            size += read
    return FileSum(bytes=size, digest=digest.hexdigest())


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path, ignore_errors=True)

"""The complete training state on disk: fp32 masters, AdamW's moments, counters.

``trainer.json`` and ``state-00001-of-NNNNN.safetensors``: tensors ``KIND/NAME``, KIND one of masters, exp_avg and
exp_avg_sq, NAME canonical (or peft's, for an adapter). What a trainer is built from is not in it: the base under
an adapter and the reference of a KL term are the initial weights, read again from the model; ``origin`` says
whether they are the same. The learning rate follows from the step, and nothing here draws random numbers.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import blake3
import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from croze.errors import CheckpointFault, CheckpointMismatch, UsageError, WaitExpired
from croze.models.weights import LoraSpec

FORMAT = "croze-trainer-1"
HEADER = "trainer.json"
SHARD_BYTES = 1 << 29
"""A file holds about this much: one at a time is in host memory on its way to an accelerator or from it."""
WAIT_S = 600.0
"""Longest wait of an optimizer step for a snapshot that is being written, and the reverse."""
FP32 = "F32"
"""What safetensors calls the dtype of all tensors here."""

Named = Iterable[tuple[str, torch.Tensor]]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What the tensors are of. ``updates``: optimizer steps applied; ``shards``: files."""

    format: str = FORMAT
    algorithm: str
    optimizer: str = "adamw"
    lora: LoraSpec | None
    origin: str
    updates: Count
    skipped: Count
    skips_in_a_row: Count
    shards: Count = 0


class Hold:
    """Whether the training state may change: a step changes it, a snapshot keeps it still, never both."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.wait_s = wait_s
        self._lock = threading.Lock()
        self._holder = ""

    def take(self, who: str) -> None:
        """Wait until nobody holds the state; ``drop`` may come from another thread. Raises WaitExpired."""
        if not self._lock.acquire(timeout=self.wait_s):
            raise WaitExpired(
                f"{who} waited {self.wait_s:g} s for {self._holder}",
                where="training state",
                fix="write or close each snapshot before the next one; is the disk hanging?",
            )
        self._holder = who

    def drop(self) -> None:
        self._lock.release()

    @contextmanager
    def taken(self, who: str) -> Iterator[None]:
        self.take(who)
        try:
            yield
        finally:
            self.drop()


class StateSnapshot:
    """``Snapshot`` without a copy: the live tensors, which no step changes until they are written or let go."""

    def __init__(self, header: Header, tensors: Callable[[], Named], hold: Hold) -> None:
        self.header, self._tensors, self._hold = header, tensors, hold
        self._held, self._turn = True, threading.Lock()

    def write(self, folder: Path) -> tuple[Path, ...]:
        """See ``Snapshot.write``. The state is let go once the kernel has the bytes, before they are on the disk."""
        if not self._claim():
            raise UsageError("this snapshot was written or closed before", where="training state")
        try:
            if (folder / HEADER).exists():
                raise UsageError(
                    f"{folder} already holds a training state", where="snapshot", fix="name another folder"
                )
            folder.mkdir(parents=True, exist_ok=True)
            shards = _write_shards(folder, self._tensors())
        except (OSError, SafetensorError) as error:
            raise unwritten("the training state", folder, error) from error
        finally:
            self._hold.drop()
        try:
            header = msgspec.structs.replace(self.header, shards=len(shards))
            (folder / HEADER).write_bytes(msgspec.json.format(msgspec.json.encode(header), indent=1))
            written = (*shards, folder / HEADER)
            for path in (*written, folder):
                flush(path)
        except OSError as error:
            raise unwritten("the training state", folder, error) from error
        return written

    def close(self) -> None:
        """Let the state change again, unless it is being written: then the writer does. May be called twice."""
        if self._claim():
            self._hold.drop()

    def _claim(self) -> bool:
        """Whether the caller is the first to take the snapshot, and with it the duty to let the state go."""
        with self._turn:
            held, self._held = self._held, False
        return held

    def __enter__(self) -> StateSnapshot:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_header(folder: Path, own: Header) -> Header:
    """The header of a saved state that fits a trainer whose own is ``own``.

    Raises CheckpointFault where it is missing or damaged, CheckpointMismatch where it is of another training.
    """
    path = folder / HEADER
    try:
        header = msgspec.json.decode(path.read_bytes(), type=Header)
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from None
    except msgspec.MsgspecError as error:
        raise _damaged(path, str(error)) from None
    if header.format != FORMAT:
        raise _other("has the format", header.format, FORMAT, folder, "resume with the croze that wrote it")
    fixes = {
        "algorithm": f"set algo.name={header.algorithm}",
        "optimizer": "resume with the trainer that wrote it",
        "lora": "resume with the lora.* options it was made with",
        "origin": "resume with the model files that the run began from, and with or without algo.kl as it did",
    }
    for field, fix in fixes.items():
        if getattr(header, field) != getattr(own, field):
            raise _other(f"has the {field}", getattr(header, field), getattr(own, field), folder, fix)
    return header


def read_state(folder: Path, header: Header, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy a saved state into ``tensors``: all of it, or an error before anything has changed."""
    found: dict[str, tuple[Any, ...]] = {}
    for path in shard_paths(folder, header.shards):
        found |= _shapes(path)
    _check_fit(folder, found, tensors)
    for path in shard_paths(folder, header.shards):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():  # noqa: SIM118 - safe_open is no mapping
                tensors[name].copy_(shard.get_tensor(name))


def digest(tensors: Named) -> str:
    """blake3 over name, dtype, shape and bytes of every tensor, hex."""
    whole = blake3.blake3()
    for name, tensor in tensors:
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
        whole.update(flat.data)
    return whole.hexdigest()


def shard_paths(folder: Path, count: int) -> Iterator[Path]:
    return (folder / f"state-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1))


def _write_shards(folder: Path, tensors: Named) -> list[Path]:
    shards = _shards(tensors)
    paths = list(shard_paths(folder, len(shards)))
    for path, shard in zip(paths, shards, strict=True):
        save_file(shard, path)
    return paths


def _shards(tensors: Named) -> list[dict[str, torch.Tensor]]:
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = SHARD_BYTES
    for name, tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append({})
            room = SHARD_BYTES
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def _shapes(path: Path) -> dict[str, tuple[Any, ...]]:
    """Name -> (dtype, *shape) of a file's tensors; opening it tells whether it is whole."""
    try:
        with safe_open(path, framework="pt") as shard:
            slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118
            return {name: (s.get_dtype(), *s.get_shape()) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error) if path.exists() else "it is missing") from None


def _check_fit(
    folder: Path, found: Mapping[str, tuple[Any, ...]], tensors: Mapping[str, torch.Tensor]
) -> None:
    wanted = {name: (FP32, *tensor.shape) for name, tensor in tensors.items()}
    odd = sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))
    if odd:
        raise CheckpointMismatch(
            f"the saved training state does not fit this model: {len(odd)} of {len(tensors)} tensors are missing, "
            f"unknown or of another shape, e.g. {', '.join(odd[:3])}",
            where=str(folder),
            fix="resume with the model it was made with",
        )


def _other(what: str, found: Any, own: Any, folder: Path, fix: str) -> CheckpointMismatch:
    return CheckpointMismatch(
        f"the saved training state {what} {_told(found)}, this training {_told(own)}",
        where=str(folder / HEADER),
        fix=fix,
    )


def _told(value: Any) -> str:
    if isinstance(value, LoraSpec):
        return f"rank {value.rank}, scale {value.scale:g}, {'+'.join(value.targets)}"
    return str(value)[:32] if value else "none"


def _damaged(path: Path, why: str) -> CheckpointFault:
    return CheckpointFault(
        f"{path.name} of a saved training state cannot be read: {why}",
        where=str(path),
        fix="use the checkpoint before it",
    )


def unwritten(what: str, folder: Path, error: OSError | SafetensorError) -> CheckpointFault:
    """The fault of a disk that is full or fails."""
    why = error.strerror if isinstance(error, OSError) else str(error)
    return CheckpointFault(
        f"{what} cannot be written: {why}",
        where=str(folder),
        fix="free space on the disk; training can go on without it",
    )


def flush(path: Path) -> None:
    """A file's or directory's content onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Where a run's growing files end: noted with every checkpoint, and what they are cut back to when a run resumes.

What comes after the mark belongs to steps that will be made again. ``faults.jsonl`` is not among these files: a
fault that happened stays told.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from croze.errors import InfraFault

GROWING = ("metrics.jsonl", "trace/*/*.arrows")


def mark(run_dir: Path) -> dict[str, int]:
    """Bytes of every growing file now, by path in the run folder. Flush what writes them first."""
    return {file.relative_to(run_dir).as_posix(): file.stat().st_size for file in _growing(run_dir)}


def keep(run_dir: Path) -> None:
    """Bring every growing file onto the disk: a mark that outlives a loss of power needs what lies before it."""
    for file in _growing(run_dir):
        handle = os.open(file, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def cut(run_dir: Path, marks: Mapping[str, int]) -> int:
    """Cut every growing file back to its mark, and remove those that have none; bytes cut in all.

    A file shorter than its mark (the machine lost power) stays as it is: its readers stop at the last whole row.
    """
    lost = 0
    try:
        for file in _growing(run_dir):
            size, end = file.stat().st_size, marks.get(file.relative_to(run_dir).as_posix(), 0)
            lost += max(0, size - end)
            if end == 0:
                file.unlink()
            elif size > end:
                os.truncate(file, end)
    except OSError as error:
        raise InfraFault(f"cannot be cut back: {error.strerror}", where=str(error.filename)) from error
    return lost


def _growing(run_dir: Path) -> list[Path]:
    return [file for pattern in GROWING for file in sorted(run_dir.glob(pattern))]

"""The watch over a driver's cgroups: whoever kills this process, they are gone moments later (invariant 7)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

_REAPER = Path(__file__).with_name("reaper.py")

_ADOPTED = 'exec </dev/null; "$@" & exit 0'
"""The shell goes at once and leaves the reaper to init."""


class Watch:
    """One reaper process (``reaper.py``) for the groups under ``homes`` whose names begin with ``prefix``."""

    def __init__(self, prefix: str, homes: Iterable[Path]) -> None:
        self._prefix = prefix
        self._homes = sorted({str(home) for home in homes})
        self._pipe = -1

    def begin(self) -> None:
        """Start the reaper, unless it runs. A few milliseconds. Raises OSError."""
        if self._pipe >= 0:
            return
        theirs, ours = os.pipe()
        try:
            words = [sys.executable, "-I", "-S", str(_REAPER), str(theirs), str(os.getpid()), self._prefix]
            subprocess.run(
                ["/bin/sh", "-c", _ADOPTED, "croze-reaper", *words, *self._homes],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs,),
                start_new_session=True,
                env={},
                cwd="/",
                check=False,
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._pipe = ours

    def end(self) -> None:
        """Let the reaper go: nothing is left to watch."""
        if self._pipe >= 0:
            pipe, self._pipe = self._pipe, -1
            try:
                os.write(pipe, b"Q")
            except OSError:
                return  # it is gone, or user code closed our end
            os.close(pipe)

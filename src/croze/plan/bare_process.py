"""What a training process occupies before it holds a model: measured in a fresh one, ``python -m`` this module."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

from croze.models.protocol import ModelFiles

ASSUMED = 380 << 20
"""Where it cannot be measured: Linux, Python 3.11, torch 2.13 for CPUs, a small tokenizer."""
WAIT_S = 60.0


class BareProcess:
    """Starts measuring when made, so that other work can go on meanwhile; ``size`` waits for the answer.

    ``files``: of a model whose tokenizer is to be loaded. The same is measured once in a process.
    """

    def __init__(self, files: ModelFiles | None = None) -> None:
        self._words = (str(files.path),) if files is not None else ()
        self.child: subprocess.Popen[bytes] | None = None
        if self._words not in _measured:
            self.child = subprocess.Popen(
                [sys.executable, "-m", __name__, *self._words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def size(self) -> int:
        """Resident bytes; ASSUMED where no answer came."""
        if self.child is not None and self._words not in _measured:
            try:
                told, _ = self.child.communicate(timeout=WAIT_S)
            except subprocess.TimeoutExpired:
                return ASSUMED
            if self.child.returncode != 0:
                return ASSUMED
            _measured[self._words] = int(told)
        return _measured[self._words]

    def close(self) -> None:
        """End the child if it still runs."""
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.communicate()

    def __enter__(self) -> BareProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_measured: dict[tuple[str, ...], int] = {}


def main(words: list[str]) -> None:
    """Import what training imports, load the tokenizer of the model folder named, print the resident bytes."""
    from croze.models.tokenizer import load_tokenizer

    for name in ("croze.train.trainer", "torch.fx.experimental.symbolic_shapes", "scipy.special"):
        importlib.import_module(name)  # the latter two at the first backward pass, and the first evaluation

    if words:
        load_tokenizer(ModelFiles(name="", path=Path(words[0]), source=""))
    print(resident())


def resident() -> int:
    """Resident bytes of this process."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:  # no /proc: the most it ever was
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Run folders in every state, made with croze's own means by processes of their own; nothing is trained."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from croze.loop.checkpoints import Checkpoints
from croze.loop.folder import RunFolder
from croze.run import Run

HOLD = """
import signal, sys, time
from pathlib import Path
from croze.loop.folder import RunFolder
from croze.run import Run

def leave(*_):
    folder.close()
    sys.exit(4)

for name, how in zip(sys.argv[2::2], sys.argv[3::2]):
    signal.signal(getattr(signal, name), {"leave": leave, "ignore": signal.SIG_IGN, "hear": lambda *_: None}[how])
path = Path(sys.argv[1])
if (path / "config.json").exists():
    folder = RunFolder.open(path)
else:
    folder, _ = RunFolder.create(Run(model="tiny-calc", tasks=[], reward=print, dir=str(path), steps=9))
print("held", flush=True)
while True:
    time.sleep(60)
"""
CLAIM = """
import fcntl, sys, time
lock = open(sys.argv[1], "w")
fcntl.flock(lock, fcntl.LOCK_EX)
lock.write(sys.argv[2])
lock.flush()
print("held", flush=True)
time.sleep(600)
"""


@contextlib.contextmanager
def started(program: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that has said "held"; killed in the end."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def held(path: Path, **signals: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """A process that holds the run of ``path`` (made where there is none): ``SIGINT="leave"``, "ignore" or "hear"."""
    words = [word for pair in ({"SIGINT": "leave"} | signals).items() for word in pair]
    return started(HOLD, str(path), *words)


def claimed(path: Path, signature: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """A process that has the lock of ``path`` and has signed it so."""
    return started(CLAIM, str(path / "lock"), signature)


def interrupted(path: Path, steps: int = 9) -> Path:
    """A run whose process has left it in order."""
    with RunFolder.create(Run(model="tiny-calc", tasks=[], reward=print, dir=str(path), steps=steps))[0]:
        pass
    return path


def dead(path: Path) -> Path:
    """A run whose process was killed."""
    with held(path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    return path


def saved(path: Path, step: int) -> Path:
    """The run with a checkpoint of ``step``."""
    Checkpoints(path / "checkpoints").write(
        step, "w" * 64, {}, lambda folder: (folder / "file").write_bytes(b"data") and None
    )
    return path


def stepped(path: Path, *rewards: float | None) -> Path:
    """The run with these steps in its metrics."""
    with (path / "metrics.jsonl").open("a") as file:
        for step, reward in enumerate(rewards, 1):
            file.write(json.dumps({"event": "step", "step": step, "reward_mean": reward, "tokens": 7}) + "\n")
    return path

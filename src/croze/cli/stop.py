"""Stop a run in order: it saves what it has trained and can be resumed. Waits until it has ended.

croze stop runs/calc-7f3a     as Ctrl-C would; at most 300 s (--timeout), then the run still goes on stopping
croze stop                    the one run that is running under runs/
croze stop calc-7f3a --now    without saving: Ctrl-C twice, and a kill after 10 s (--timeout); it can be resumed too

Only the process that holds the run's folder is ever signalled, and only on this machine; what it started ends by
itself. Exit code 0: the run is not running (any more), also where it was not before; 2: there is no such run, or it
runs where it cannot be reached; 3: it still runs after the timeout.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

from croze.cli import ps
from croze.cli.output import Output
from croze.errors import UsageError, WaitExpired
from croze.loop.folder import LOCK, Holder, holder, read_config
from croze.loop.load import find_run_folder
from croze.loop.status import lives, status

TIMEOUT_S, NOW_S = 300.0, 10.0
AGAIN_S = 0.5
"""Between two signals of --now: two at once might arrive as one."""
_LOOK_S = 0.05
_KILLED_S = 10.0
"""A killed process lets go of its folder, and what it started ends."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="a run folder, or the beginning of its name under runs/"
    )
    parser.add_argument("--now", action="store_true", help="do not wait for it to save")
    parser.add_argument(
        "--timeout",
        type=seconds,
        metavar="S",
        help=f"seconds to wait (default {TIMEOUT_S:g}; with --now {NOW_S:g})",
    )


def run(arguments: argparse.Namespace, output: Output) -> None:
    folder = find_run_folder(arguments.run) if arguments.run else only_running()
    began = time.monotonic()
    by = holder(folder)
    if by is None:
        read_config(folder)
        _tell(folder, by, [], 0.0, output)
        return
    timeout = arguments.timeout if arguments.timeout is not None else NOW_S if arguments.now else TIMEOUT_S
    if not output.json:
        what = "to end at once" if arguments.now else "to save and end"
        output.text(f"asking process {by.pid} {what}; waiting at most {timeout:g} s for {folder}")
    with Process(by.pid) as process:
        _check(process, by, folder)
        sent = stop_now(process, by, folder, timeout) if arguments.now else ask(process, by, folder, timeout)
    _tell(folder, by, sent, time.monotonic() - began, output)


def seconds(text: str) -> float:
    """An argument that is a time."""
    value = float(text)
    if not 0 < value < 1e7:
        raise ValueError(text)
    return value


def only_running() -> Path:
    """The run under ``runs/`` that is running. Raises UsageError unless there is one."""
    running = [one for one in ps.find() if one.state == "running"]
    if len(running) == 1:
        return Path(running[0].path)
    names = ", ".join(one.name for one in running)
    raise UsageError(
        f"several runs are running: {names}" if running else "nothing is running under runs/",
        where="croze stop",
        fix="croze stop RUN" if running else "croze ps DIR lists the runs of another folder",
    )


class Process:
    """A process by a handle, so that no signal ever meets another that was given its number."""

    def __init__(self, pid: int) -> None:
        self.pid, self._handle, self.there = pid, -1, True
        try:
            self._handle = os.pidfd_open(pid)
        except AttributeError:  # no such handles here: the number must do
            self.there = lives(pid)
        except (OSError, OverflowError):
            self.there = False

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle >= 0:
            os.close(self._handle)

    def holds(self, file: Path) -> bool:
        """Whether it has ``file`` open. Where the system does not tell, it is believed."""
        try:
            wanted = file.stat()
            handles = list(Path(f"/proc/{self.pid}/fd").iterdir())
        except FileNotFoundError:
            return not Path("/proc/self/fd").exists()
        for handle in handles:
            with contextlib.suppress(OSError):
                found = handle.stat()
                if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                    return True
        return False

    def ignores(self, number: int) -> bool:
        """Whether it was started to ignore a signal, as shells start what they put into the background."""
        try:
            lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
            mask = next(line.split()[1] for line in lines if line.startswith("SigIgn:"))
        except (OSError, StopIteration):
            return False
        return bool(int(mask, 16) >> (number - 1) & 1)

    def send(self, number: signal.Signals) -> bool:
        """Whether it was still there to be sent a signal."""
        try:
            if self._handle >= 0:
                signal.pidfd_send_signal(self._handle, number)
            else:
                os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def ask(process: Process, by: Holder, folder: Path, timeout: float) -> list[str]:
    """One signal, and the wait for the folder; the signals sent. Raises WaitExpired."""
    sent = [] if not process.there else _asked(process)
    if not _freed(folder, by, timeout):
        what = "has not saved and ended yet" if sent else "is gone, but what it started holds the folder"
        raise WaitExpired(
            f"process {by.pid} {what} after {timeout:g} s",
            where=str(folder),
            fix=f"wait: it was asked once and ends when it can; or croze stop {folder} --now",
        )
    return sent


def stop_now(process: Process, by: Holder, folder: Path, timeout: float) -> list[str]:
    """Signals until the folder is free, a kill after ``timeout``; the signals sent. Raises WaitExpired."""
    sent: list[str] = []
    deadline = time.monotonic() + timeout
    while process.there and (left := deadline - time.monotonic()) > 0:
        sent += _asked(process)
        if _freed(folder, by, min(AGAIN_S, left)):
            return sent
    if process.there and process.send(signal.SIGKILL):
        sent.append("SIGKILL")
    if not _freed(folder, by, _KILLED_S):
        raise WaitExpired(
            f"process {by.pid} is gone, but what it started has held the folder for {_KILLED_S:g} s more",
            where=str(folder),
            fix=f"see who has it: fuser -v {folder / LOCK}",
        )
    return sent


def _asked(process: Process) -> list[str]:
    number = signal.SIGTERM if process.ignores(signal.SIGINT) else signal.SIGINT
    return [number.name] if process.send(number) else []


def _check(process: Process, by: Holder, folder: Path) -> None:
    """Raise UsageError unless ``process`` is the one that holds the folder, here, and ours to stop."""
    here = socket.gethostname()
    if by.host != here:
        raise UsageError(
            f"the run is held by process {by.pid} on {by.host}, and this is {here}",
            where=str(folder),
            fix=f"on {by.host}: croze stop {folder}",
        )
    try:
        if not process.there or process.holds(folder / LOCK):
            return
    except PermissionError:
        raise UsageError(
            f"process {by.pid}, which holds the run, belongs to another user",
            where=str(folder),
            fix="stop it as that user",
        ) from None
    if holder(folder) != by:  # it ended while it was looked at
        return
    raise UsageError(
        f"process {by.pid} of this machine does not hold the run: another one had that number",
        where=str(folder),
        fix="a container of this host may run it: stop it there",
    )


def _freed(folder: Path, by: Holder, timeout: float) -> bool:
    """Wait until ``by`` does not hold the folder any more; whether that came."""
    deadline = time.monotonic() + timeout
    while holder(folder) == by:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_S)
    return True


def _tell(folder: Path, by: Holder | None, sent: list[str], took_s: float, output: Output) -> None:
    found = status(folder)
    config = read_config(folder) if found is not None and found.state != "broken" else {"file": ""}
    resume = f"croze resume {folder}" if config["file"] else f"cz.resume({str(folder)!r}, run)"
    told: dict[str, Any] = {
        "event": "stop",
        "run_dir": str(folder),
        "pid": by.pid if by else None,
        "signals": sent,
        "seconds": took_s,
        "state": found.state if found else "gone",
        "step": found.step if found else None,
        "steps": found.steps if found else None,
        "checkpoint": found.checkpoint if found else None,
        "resume": resume if found is not None and found.resumable else None,
    }
    if output.json:
        output.record(told)
        return
    lead = "stopped" if by else "it was not running"
    saved = f", saved at step {told['checkpoint']}" if told["resume"] and told["checkpoint"] else ""
    output.text(f"{lead}: {told['state']}, step {told['step']} of {told['steps']}{saved}")
    if told["resume"]:
        output.text(f"  {told['resume']}")

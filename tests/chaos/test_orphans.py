"""However a run ends, nothing that it started is left (invariant 7)."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dying import TASK, Nursery, Process, alive, gone_within

pytestmark = pytest.mark.chaos

SLEEPS = "86399.25"
"""Seconds that a sandboxed program sleeps: by this word it is found."""
SANDBOXED = TASK.replace(
    "def judged(reply: str, answer: str) -> float:",
    "async def judged(reply: str, answer: str, sandbox: cz.Sandbox) -> float:\n"
    f"    await sandbox.exec(['sleep', '{SLEEPS}'], wall_s=600)",
)


@pytest.fixture(scope="module")
def nursery(tmp_path_factory) -> Iterator[Nursery]:
    folder = tmp_path_factory.mktemp("orphans")
    for driver, options in (("bubblewrap", ""), ("unsafe", ", allow_unsafe=True")):
        text = SANDBOXED.replace(
            "run = cz.Run(", f"run = cz.Run(\n    sandbox=cz.SandboxOptions(driver='{driver}'{options}),"
        )
        (folder / f"{driver}.py").write_text(text)
    made = Nursery(folder)
    yield made
    made.close()


def sleeping() -> list[str]:
    return [line for line in command_lines() if SLEEPS in line]


def watching(pid: int) -> list[str]:
    """Reapers of a process, and of the worker that it started."""
    return [line for line in command_lines() if "reaper.py" in line and str(pid) in line.split()]


def command_lines() -> Iterator[str]:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                yield (folder / "cmdline").read_text().replace("\0", " ")
            except (FileNotFoundError, ProcessLookupError):
                continue


def traces() -> set[str]:
    """Names that croze gives to what would outlive a process."""
    places = (
        "/dev/shm",
        "/sys/fs/cgroup",
        "/sys/fs/cgroup/memory",
        "/sys/fs/cgroup/pids",
        "/sys/fs/cgroup/cpu",
    )
    return {f"{p}/{name}" for p in places if os.path.isdir(p) for name in os.listdir(p) if "croze" in name}


def judging(nursery: Nursery, driver: str, folder: Path) -> Process:
    process = nursery.start("train", f"{driver}.py", f"run.dir={folder}/run", "reward.timeout_s=600")
    while len(sleeping()) < 2 and process.lives():
        time.sleep(0.02)
    if any(event.get("kind") == "sandbox.unavailable" for event in process.events()):
        pytest.skip("no isolation on this machine")
    assert process.lives(), process.tail()
    return process


@pytest.mark.parametrize("driver", ["bubblewrap", "unsafe"])
@pytest.mark.parametrize("how", ["kill", "kill group", "int", "int twice", "term"])
def test_nothing_is_left(nursery, driver, how, tmp_path):
    before = traces()
    process = judging(nursery, driver, tmp_path)
    if how.startswith("kill"):
        process.signal(signal.SIGKILL, group=how == "kill group")
        code = -signal.SIGKILL
    else:
        process.signal(signal.SIGTERM if how == "term" else signal.SIGINT, group=True)
        if how == "int twice":
            process.until(lambda p: p.told("stopping") or not p.lives())
            process.signal(signal.SIGINT, group=True)
        code = 4
    assert process.wait() == code, process.tail()
    left = gone_within(
        5, lambda: [*alive(process.mark), *sleeping(), *watching(process.pid), *(traces() - before)]
    )
    assert left == []

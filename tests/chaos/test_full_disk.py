"""A disk that runs full costs saves, then the run, and never what is on it: with room again it goes on."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from croze.loop.checkpoints import Checkpoint, verify
from dying import TASK, Nursery, Process, facts

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk"),
]
DISK_MIB, CHECKPOINT_MIB = 48, 11
EVERY = "loop.checkpoint_every=1"


@pytest.fixture(scope="module")
def nursery(tmp_path_factory) -> Iterator[Nursery]:
    folder = tmp_path_factory.mktemp("full")
    (folder / "task.py").write_text(TASK)
    with Nursery(folder) as made:
        yield made


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    where = tmp_path / "disk"
    where.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "croze-test", str(where)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mount is not allowed here")
    yield where
    subprocess.run(["umount", "--lazy", str(where)], check=True)


def fill(disk: Path, *, leave_mib: float) -> Path:
    """Take all room but ``leave_mib``; the file that takes it."""
    ballast = disk / "ballast"
    ballast.unlink(missing_ok=True)
    room = shutil.disk_usage(disk).free - int(leave_mib * 2**20)
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while leave_mib == 0 or room > 0:
            room -= file.write(bytes(min(room, 1 << 20) if leave_mib else 1 << 12))
    return ballast


def saves(process: Process, ok: bool) -> list[dict]:
    return [e for e in process.told("save") if e["ok"] is ok]


def test_a_save_without_room_keeps_training_and_the_checkpoint_before(nursery, disk):
    process = nursery.start("train", "task.py", f"run.dir={disk}/run", "steps=100000", EVERY)
    process.until(lambda p: saves(p, True))
    ballast = fill(disk, leave_mib=CHECKPOINT_MIB / 2)
    failed = process.until(lambda p: saves(p, False))[0]
    assert failed["message"] and "free space" in failed["fix"]
    before = len(process.told("step"))
    process.until(lambda p: len(p.told("step")) > before + 2)
    kept = [e["step"] for e in saves(process, True)][-1]
    assert isinstance(verify(disk / "run" / "checkpoints" / f"step_{kept:06d}"), Checkpoint)
    ballast.unlink()
    process.until(lambda p: saves(p, True)[-1]["step"] > before)
    process.signal(signal.SIGINT)
    assert process.wait() == 4
    told = [json.loads(line) for line in (disk / "run" / "faults.jsonl").read_text().splitlines()]
    assert failed in told
    assert not list((disk / "run" / "checkpoints").glob(".*"))


def test_the_first_save_fails_half_way(nursery, disk):
    """There is nothing yet to tell how much room it takes."""
    ballast = fill(disk, leave_mib=CHECKPOINT_MIB / 2)
    process = nursery.start("train", "task.py", f"run.dir={disk}/run", "steps=100000", EVERY)
    process.until(lambda p: len(saves(p, False)) >= 2)
    assert not list((disk / "run" / "checkpoints").iterdir()) or process.lives()
    assert {e["message"].partition(":")[0] for e in saves(process, False)} <= {
        "the training state cannot be written",
        "the model cannot be written",
    }
    ballast.unlink()
    process.until(lambda p: saves(p, True))
    process.signal(signal.SIGINT)
    assert process.wait() == 4


@pytest.mark.parametrize("after", [1, 3])
def test_without_any_room_it_ends_and_goes_on_later(nursery, disk, after, tmp_path):
    words = ("train", "task.py", "steps=12", EVERY)
    assert nursery.run(*words, f"run.dir={tmp_path}/whole").code == 0
    process = nursery.start(*words, f"run.dir={disk}/run")
    process.until(lambda p: len(p.told("step")) >= after)
    ballast = fill(disk, leave_mib=0)
    assert process.wait() == 3, process.tail()
    error = process.events()[-1]
    assert error["event"] == "error" and error["kind"] in ("infra", "checkpoint"), error
    assert "Traceback" not in process.said() and "Exception ignored" not in process.said()
    again = nursery.run("resume", f"{disk}/run")
    assert again.code == 3 and again.events()[-1]["kind"] in ("infra", "checkpoint"), again.tail()
    ballast.unlink()
    process = nursery.run("resume", f"{disk}/run")
    assert process.code == 0, process.tail()
    whole, found = facts(tmp_path / "whole"), facts(disk / "run")
    assert [key for key in whole if whole[key] != found[key]] == []


def test_no_room_for_the_last_checkpoint(nursery, disk):
    fill(disk, leave_mib=CHECKPOINT_MIB / 2)
    process = nursery.run("train", "task.py", f"run.dir={disk}/run", "steps=2")
    error = process.events()[-1]
    assert process.code == 3 and error["fix"] == f"free space on the disk, then croze resume {disk}/run"
    (disk / "ballast").unlink()
    assert nursery.run("resume", f"{disk}/run").code == 0

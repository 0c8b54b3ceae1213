"""Cgroups do not outlive whoever made them, however that ends; and the reaper touches nobody else's."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from croze.sandbox import cgroup
from croze.sandbox.bubblewrap import Bubblewrap
from croze.sandbox.watch import Watch

pytestmark = pytest.mark.skipif(cgroup.find() is None, reason="no cgroups can be made here")

HOLDER = """
import asyncio, os, sys, time
from croze.sandbox.bubblewrap import Bubblewrap
async def main():
    driver = Bubblewrap()
    boxes = [await driver.create() for _ in range(3)]
    running = [asyncio.ensure_future(box.exec(["sleep", "3131"])) for box in boxes]
    await asyncio.sleep(0.2)
    if sys.argv[1] == "fork" and os.fork() == 0:
        time.sleep(30)
        os._exit(0)
    print("ready", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def groups_of(pid: int) -> list[Path]:
    found = cgroup.find()
    assert found is not None
    return [d for home in set(found.homes.values()) for d in home.glob(f"croze-*-{pid}-*")]


def processes(word: str) -> list[str]:
    out = subprocess.run(
        ["ps", "-ww", "-eo", "stat=,args="], capture_output=True, text=True, check=True
    ).stdout
    return [line for line in out.splitlines() if word in line and not line.startswith("Z")]


def tree(pid: int) -> list[int]:
    out = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    rows = [tuple(map(int, line.split())) for line in out.splitlines()]
    found = [pid]
    for above in found:
        found += [child for child, parent in rows if parent == above]
    return found


def until(condition, wait_s=5.0) -> bool:
    deadline = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("how", ["process", "tree", "fork"])
def test_a_killed_holder_leaves_no_process_and_no_cgroup(how):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, how], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
    assert groups_of(holder.pid) and len(processes("sleep 3131")) >= 3
    doomed = tree(holder.pid) if how == "tree" else [holder.pid]
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError):  # a child may die of its parent's death first
            os.kill(pid, signal.SIGKILL)
    holder.wait()
    try:
        assert until(lambda: not groups_of(holder.pid) and not processes("sleep 3131"))
        assert until(lambda: not processes(f" {holder.pid} croze-")), "the reaper itself goes too"
    finally:
        if how == "fork":
            os.killpg(holder.pid, signal.SIGKILL)
    holder.stdout.close()


def test_a_closed_driver_leaves_no_reaper_and_no_group():
    mine = f" {os.getpid()} croze-"
    before = len(processes(mine))
    groups = len(groups_of(os.getpid()))

    async def main():
        driver, other = Bubblewrap(), Bubblewrap()
        kept = await other.create()
        async with await driver.create() as box:
            assert until(lambda: len(processes(mine)) == before + 2)
            assert (await box.exec(["true"])).ok
        await driver.close()
        assert until(lambda: len(processes(mine)) == before + 1)
        assert (await kept.exec(["true"])).ok, "one driver's end is not another's"
        again = await driver.create()
        assert (await again.exec(["true"])).ok
        await driver.close()
        await other.close()

    asyncio.run(main())
    assert until(lambda: len(processes(mine)) == before) and len(groups_of(os.getpid())) == groups


def test_the_reaper_removes_only_what_bears_its_prefix(tmp_path):
    for name in ("croze-1-2-3-1", "croze-1-2-3-2", "croze-1-2-33-1", "other"):
        (tmp_path / name).mkdir()
    watch = Watch("croze-1-2-3-", [tmp_path])
    watch.begin()
    watch.begin()
    os.close(watch._pipe)
    assert until(lambda: len(list(tmp_path.iterdir())) == 2)
    time.sleep(0.05)
    assert sorted(d.name for d in tmp_path.iterdir()) == ["croze-1-2-33-1", "other"]


def test_the_reaper_goes_without_a_deed_when_it_is_let_go(tmp_path):
    (tmp_path / "croze-1-2-3-1").mkdir()
    watch = Watch("croze-1-2-3-", [tmp_path])
    watch.begin()
    watch.end()
    watch.end()
    assert until(lambda: not processes(str(tmp_path))) and list(tmp_path.iterdir())

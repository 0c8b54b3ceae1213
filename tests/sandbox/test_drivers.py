"""Choosing a driver fails closed, and the unsafe one says what it is."""

import asyncio
import os
import subprocess
import sys
import time

import pytest

from croze.errors import SandboxLost, SandboxUnavailable
from croze.sandbox.bubblewrap import Bubblewrap
from croze.sandbox.drivers import open_driver
from croze.sandbox.lazy import LazySandbox
from croze.sandbox.protocol import Limits, Sandbox
from croze.sandbox.unsafe import Unsafe


def test_auto_is_isolated_here():
    async def main():
        driver = await open_driver(allow_unsafe=True)
        assert (driver.name, driver.tier) == ("bubblewrap", "local")
        await driver.close()

    asyncio.run(main())


def test_unsafe_must_be_allowed():
    with pytest.raises(SandboxUnavailable, match="does not isolate") as info:
        asyncio.run(open_driver("unsafe"))
    assert "allow_unsafe" in info.value.fix


def test_the_unsafe_driver_says_so_where_it_is_the_one_in_use(caplog):
    driver = asyncio.run(open_driver("unsafe", allow_unsafe=True))
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("croze.sandbox", "WARNING")
    assert "WITHOUT isolation" in record.getMessage()
    asyncio.run(driver.close())


WITHOUT = """
import asyncio, ctypes, sys
from croze.errors import SandboxUnavailable
from croze.sandbox.drivers import open_driver
libc = ctypes.CDLL(None, use_errno=True)
class Op(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("k", ctypes.c_uint)]
class Program(ctypes.Structure):
    _fields_ = [("len", ctypes.c_ushort), ("ops", ctypes.POINTER(Op))]
mount = {"x86_64": 165, "aarch64": 40}[__import__("platform").machine()]
ops = (Op * 4)(Op(0x20, 0, 0, 0), Op(0x15, 0, 1, mount), Op(0x06, 0, 0, 0x50001), Op(0x06, 0, 0, 0x7FFF0000))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, ctypes.byref(Program(4, ops)), 0, 0) == 0
try:
    asyncio.run(open_driver())
except SandboxUnavailable as error:
    assert "bubblewrap cannot isolate here: bwrap:" in error.message and "seccomp=unconfined" in error.fix, error
else:
    raise SystemExit("isolated without mount?")
driver = asyncio.run(open_driver(allow_unsafe=True))
print(driver.name, driver.tier)
"""

JUDGED = """
import asyncio, pathlib, sys
from croze.config import SandboxOptions
from croze.reward.judge import Judge
sys.path.insert(0, str(pathlib.Path.cwd() / "reward"))
import reward_cases
from made import rollout
async def main():
    printed = []
    sandbox = SandboxOptions(allow_unsafe=True)
    async with Judge(reward_cases.falls_with_its_worker, sandbox=sandbox, output=printed.append) as judge:
        outcomes = await judge.judge([rollout("x"), rollout("3", member=1)])
        warned = b"".join(printed).count(b"WITHOUT isolation")
        print(warned, judge.restarts > 0, outcomes[1].message or outcomes[1].score)
asyncio.run(main())
"""


def test_where_mounting_is_forbidden_there_is_a_clear_error_and_only_an_allowed_way_out():
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=60)
    assert done.stdout == "unsafe unsafe\n", done.stderr
    assert done.stderr.count("WITHOUT isolation") == 1, "a program without logging set up hears it too"


def test_a_run_hears_of_missing_isolation_once_though_workers_are_replaced():
    program = WITHOUT.rpartition("driver = ")[0] + JUDGED
    tests = os.path.dirname(os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=tests
    )
    assert done.stdout == "1 True 3.0\n", done.stdout + done.stderr


def on_unsafe(work, limits=None):
    async def main():
        driver = Unsafe()
        try:
            async with await driver.create(limits=limits) as box:
                return await work(box)
        finally:
            await driver.close()

    return asyncio.run(main())


def test_unsafe_does_the_same_work_under_its_own_name():
    async def work(box):
        await box.write("/box/a/x", "1")
        first = await box.exec_python("import os; print(open('a/x').read(), os.environ.get('SECRET'))")
        other = await box.sibling()
        return first, await box.list(), await other.list(), await box.exec(["cat"], stdin=b"in")

    os.environ["SECRET"] = "host"
    try:
        first, own, other, cat = on_unsafe(work)
    finally:
        del os.environ["SECRET"]
    assert first.text == "1 None\n" and (first.tier, first.driver) == ("unsafe", "unsafe")
    assert own == ["a"] and other == [] and cat.stdout == b"in"


def test_unsafe_keeps_deadlines_and_output_limits():
    async def work(box):
        began = time.monotonic()
        slow = await box.exec_python("print('x', flush=True); import time; time.sleep(60)", wall_s=0.4)
        took = time.monotonic() - began
        loud = await box.exec_python("while 1: print('y' * 65536)")
        spin = await box.exec_python("while 1: pass", cpu_s=1, wall_s=20)
        return slow, took, loud, spin

    slow, took, loud, spin = on_unsafe(work)
    assert (slow.status, slow.fault, slow.text) == ("timeout_wall", "policy", "x\n") and took < 5
    assert (loud.status, spin.status) == ("output_limit", "timeout_cpu")


def test_unsafe_is_gone_once_destroyed():
    async def work(box):
        folder = box._folder
        await box.destroy()
        with pytest.raises(SandboxLost):
            await box.exec(["true"])
        return os.path.exists(folder)

    assert on_unsafe(work) is False


def test_a_lazy_sandbox_costs_nothing_until_used_and_takes_its_siblings_along():
    async def main():
        driver = Bubblewrap()
        lazy = LazySandbox(driver, Limits())
        assert isinstance(lazy, Sandbox) and not driver._live
        await lazy.destroy()
        lazy = LazySandbox(driver, Limits())
        await asyncio.gather(lazy.write("a", "1"), lazy.write("b", "2"))
        assert len(driver._live) == 1 and await lazy.list() == ["a", "b"]
        await lazy.sibling()
        assert len(driver._live) == 2
        await lazy.destroy()
        assert not driver._live

    asyncio.run(main())

"""The bubblewrap driver keeps its promises: files, output, limits, endings."""

import asyncio
import errno
import os
import subprocess
import time
from pathlib import Path

import msgspec
import pytest

from croze.errors import ConfigError, SandboxLost, SandboxUnsupported
from croze.sandbox import cgroup
from croze.sandbox.bubblewrap import Bubblewrap
from croze.sandbox.protocol import KEPT_BYTES, Limits


def bwraps() -> list[str]:
    """Live bwrap processes that this process started, directly or not."""
    out = subprocess.run(
        ["ps", "-eo", "ppid=,stat=,comm="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in out.splitlines()]
    return [r[2] for r in rows if r[0] == str(os.getpid()) and "bwrap" in r[2] and not r[1].startswith("Z")]


def own_cgroups() -> list[Path]:
    found = cgroup.find()
    homes = set(found.homes.values()) if found else set()
    return [d for home in homes for d in home.glob(f"croze-*-{os.getpid()}-*")]


def test_runs_python_and_tells_all(inside):
    async def work(box):
        return await box.exec_python("import sys; print(6 * 7); print('oops', file=sys.stderr); sys.exit(3)")

    result = inside(work)
    assert (result.status, result.fault, result.exit_code, result.signal) == ("exited", "none", 3, None)
    assert (result.text, result.error_text) == ("42\n", "oops\n")
    assert (result.stdout_total, result.stderr_total, result.truncated) == (3, 5, False)
    assert (result.tier, result.driver) == ("local", "bubblewrap")
    assert result.wall_ms > 0 and result.cpu_ms > 0 and result.max_rss_mib > 0
    assert set(result.to_plain()) == {f.name for f in msgspec.structs.fields(type(result))}
    msgspec.json.encode(result.to_plain())


def test_runs_programs_with_stdin_env_and_cwd(inside):
    async def work(box):
        await box.write("sub/x", "")
        return await box.exec(
            ["/bin/sh", "-c", 'cat; pwd; echo "$A-$HOME-$SECRET"'], stdin=b"in\n", env={"A": "b"}, cwd="sub"
        )

    os.environ["SECRET"] = "never inside"
    try:
        assert inside(work).text == "in\n/box/sub\nb-/box-\n"
    finally:
        del os.environ["SECRET"]


def test_a_missing_program_or_cwd_is_the_programs_end_not_ours(inside):
    async def work(box):
        return (
            await box.exec(["nonesuch"]),
            await box.exec_python("1", cwd="/nowhere"),
            await box.exec(["true"]),
        )

    absent, lost, fine = inside(work)
    assert absent.exit_code == 127 and lost.exit_code == 126 and fine.exit_code == 0


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("exit()", 0),
        ("quit(4)", 4),
        ("raise SystemExit('why')", 1),
        ("import sys; sys.exit(True)", 1),
        ("raise ValueError('x')", 1),
        ("x = (", 1),
        ("import os; os._exit(9)", 9),
        ("import sys; sys.stdout.close()", 0),
    ],
)
def test_python_ends_as_python_does(inside, code, exit_code):
    async def work(box):
        return await box.exec_python(code)

    assert inside(work).exit_code == exit_code


def test_what_python_owes_at_its_end_is_done(inside):
    code = """
import atexit, threading, time
atexit.register(print, "atexit")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
f = open("unclosed", "w"); f.write("flushed")
print("main")
"""

    async def work(box):
        return await box.exec_python(code), await box.read("unclosed")

    result, text = inside(work)
    assert result.text.split() == ["main", "thread", "atexit"] and text == b"flushed"


def test_main_is_main_and_tracebacks_show_only_the_program(inside):
    async def work(box):
        return await box.exec_python(
            "def f():\n  1 / 0\nprint(__name__)\nimport pickle\npickle.dumps(f)\nf()"
        )

    result = inside(work)
    assert result.text == "__main__\n"
    assert result.error_text.startswith(
        'Traceback (most recent call last):\n  File "program.py", line 6, in <module>'
    )


def test_equal_programs_print_equal_output(inside):
    async def work(box):
        other = await box.sibling()
        try:
            return [(await b.exec_python("print(set('abcdefgh'), hash('x'))")).text for b in (box, other)]
        finally:
            await other.destroy()

    first, second = inside(work)
    assert first == second


def test_files_persist_between_programs_and_not_beyond(inside):
    async def work(box):
        await box.write("a/b.bin", bytes(range(256)))
        await box.exec_python("import json; json.dump([1], open('/box/c.json', 'w'))")
        other = await box.sibling()
        names = await box.list(), await box.list("a"), await other.list()
        await other.destroy()
        return names, await box.read("/box/a/b.bin"), await box.read("c.json")

    names, raw, text = inside(work)
    assert names == (["a", "c.json"], ["b.bin"], []) and raw == bytes(range(256)) and text == b"[1]"


def test_file_errors_are_pythons_own(inside):
    async def work(box):
        await box.exec_python("import os; os.mkfifo('fifo'); os.mkdir('d')")
        seen = []
        for call in (
            box.read("none"),
            box.read("d"),
            box.list("none"),
            box.write("/usr/x", "1"),
            box.read("fifo"),
        ):
            with pytest.raises(OSError) as info:
                await call
            seen.append(info.value.errno)
        with pytest.raises(OSError) as info:
            await box.write("big", b"x" * (17 << 20))
        return [*seen, info.value.errno]

    *seen, full = inside(work)
    assert seen == [errno.ENOENT, errno.EISDIR, errno.ENOENT, errno.EROFS, errno.EINVAL]
    assert full in (errno.ENOSPC, errno.EFBIG)


def test_large_files_come_back_whole(inside):
    data = os.urandom(3 << 20)

    async def work(box):
        await box.write("big", data)
        return await box.read("big")

    assert inside(work) == data


def test_upload_and_download(inside, tmp_path):
    (tmp_path / "in").write_bytes(b"\0data")

    async def work(box):
        await box.upload(tmp_path / "in", "x")
        await box.download("x", tmp_path / "out")

    inside(work)
    assert (tmp_path / "out").read_bytes() == b"\0data"


def test_output_keeps_head_and_tail_and_true_totals(inside):
    async def work(box):
        return await box.exec_python(
            "import sys; sys.stdout.write('a' * 100_000 + 'b' * 200_000 + 'c' * 100_000)"
        )

    result = inside(work)
    assert result.stdout == b"a" * KEPT_BYTES + b"c" * KEPT_BYTES
    assert result.stdout_total == 400_000 and result.truncated and result.status == "exited"


def test_endless_output_is_stopped(inside):
    async def work(box):
        return await box.exec_python("while 1: print('x' * 65536)")

    result = inside(work)
    assert (result.status, result.fault) == ("output_limit", "policy") and len(
        result.stdout
    ) == 2 * KEPT_BYTES


def test_wall_deadline_keeps_partial_output(inside):
    async def work(box):
        begin = time.monotonic()
        result = await box.exec_python("import time; print('so far', flush=True); time.sleep(99)", wall_s=0.5)
        return result, time.monotonic() - begin, await box.exec_python("print('usable')")

    result, took, after = inside(work)
    assert (result.status, result.fault, result.text) == ("timeout_wall", "policy", "so far\n")
    assert took < 5 and after.text == "usable\n"


def test_cpu_limit(inside):
    async def work(box):
        return await box.exec_python("while 1: pass", cpu_s=1, wall_s=30)

    result = inside(work)
    assert (result.status, result.fault) == ("timeout_cpu", "policy") and 900 < result.cpu_ms < 2500


def test_memory_limit(inside):
    async def work(box):
        first = await box.exec_python("x = []\nwhile 1: x.append(bytearray(1 << 20))")
        return first, await box.exec_python("print('usable')")

    result, after = inside(work)
    assert (result.status, result.fault) == ("oom", "policy") and after.text == "usable\n"


def test_memory_taken_by_a_child_counts_though_the_exit_code_is_zero(inside):
    if "cgroup memory" in Bubblewrap().missing:
        pytest.skip("no memory cgroup here")
    children = (
        "import subprocess, sys\n"
        "for _ in range(3): subprocess.Popen(['/bin/sh', '-c', 'x=$(yes | head -c 60000000); sleep 2'])\n"
    )

    async def work(box):
        return await box.exec_python(children + "import time; time.sleep(3)")

    result = inside(work)
    assert result.oom_kills > 0 and (result.status, result.fault) == ("oom", "policy")


def test_disk_limit(inside):
    code = "import os\nfor i in range(99):\n  with open(f'f{i}', 'wb') as f: f.write(bytes(1 << 20))"

    async def work(box):
        result = await box.exec_python(code)
        return result, len(await box.list())

    result, files = inside(work)
    assert (result.status, result.fault) == ("disk", "policy") and files <= 17


def test_process_limit(inside):
    code = """
import os, time
for n in range(99):
    if os.fork() == 0:
        time.sleep(9)
        os._exit(0)
    print(n, flush=True)
"""

    async def work(box):
        return await box.exec_python(code)

    result = inside(work)
    assert result.exit_code == 1 and int(result.text.split()[-1]) <= 24 and result.leftover_procs > 10


@pytest.mark.parametrize("how", ["os.setsid()", "None"])
def test_daemons_do_not_outlive_their_program(inside, how):
    code = f"""
import os, time
if os.fork() == 0:
    {how}
    if os.fork() == 0:
        time.sleep(999)
    os._exit(0)
print('done')
"""

    async def work(box):
        begin = time.monotonic()
        result = await box.exec_python(code)
        listing = await box.exec_python("import os; print(sum(n.isdigit() for n in os.listdir('/proc')))")
        return result, time.monotonic() - begin, listing.text

    result, took, processes = inside(work)
    assert result.text == "done\n" and result.status == "exited" and result.leftover_procs >= 1
    assert took < 5 and processes == "2\n"


def test_programs_of_one_sandbox_take_turns_and_sandboxes_do_not(inside):
    async def work(box):
        code = "import time; time.sleep(0.4)"
        same = await asyncio.gather(box.exec_python(code), box.exec_python(code))
        other = await box.sibling()
        begin = time.monotonic()
        await asyncio.gather(box.exec_python(code), other.exec_python(code))
        took = time.monotonic() - begin
        await other.destroy()
        return same, took

    same, took = inside(work)
    assert max(r.queue_ms for r in same) > 300 and took < 0.75


def test_a_destroyed_sandbox_raises_lost_even_under_a_running_program(inside):
    async def work(box):
        running = asyncio.ensure_future(box.exec_python("import time; time.sleep(60)"))
        await asyncio.sleep(0.2)
        await box.destroy()
        await box.destroy()
        for call in (running, box.exec(["true"]), box.read("x")):
            with pytest.raises(SandboxLost):
                await call

    inside(work)


def test_a_killed_sandbox_raises_lost_and_is_no_result(inside):
    async def work(box):
        running = asyncio.ensure_future(box.exec_python("import time; time.sleep(60)"))
        await asyncio.sleep(0.2)
        box._start.process.kill()
        with pytest.raises(SandboxLost):
            await running

    inside(work)


def test_cancelling_a_call_leaves_nothing_behind(inside):
    async def work(box):
        running = asyncio.ensure_future(box.exec_python("import time; time.sleep(60)"))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert bwraps() == []

    inside(work)


def test_many_at_once_and_nothing_left():
    async def main():
        driver = Bubblewrap()

        async def one(i):
            async with await driver.create() as box:
                return (await box.exec_python(f"print({i} + 1)")).text

        texts = await asyncio.gather(*(one(i) for i in range(12)))
        await driver.create()
        await driver.close()
        return texts

    descriptors = len(os.listdir("/proc/self/fd"))
    assert asyncio.run(main()) == [f"{i + 1}\n" for i in range(12)]
    assert bwraps() == [] and own_cgroups() == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_what_it_cannot_do_says_so(inside):
    async def work(box):
        for call in (box.session(), box.snapshot(), box.fork(2), box.verify(), box.renew(5)):
            with pytest.raises(SandboxUnsupported, match="bubblewrap"):
                await call
        with pytest.raises(ValueError, match="NUL"):
            await box.exec(["a\0b"])
        with pytest.raises(ValueError, match="environment"):
            await box.exec(["true"], env={"a=b": "c"})
        return (await box.exec_python("print('still usable')")).text

    assert inside(work) == "still usable\n"

    async def net():
        await Bubblewrap().create(net="gateway")

    with pytest.raises(SandboxUnsupported, match="gateway"):
        asyncio.run(net())


def test_limits_are_checked():
    with pytest.raises(ConfigError, match="disk_mib"):
        Limits(memory_mib=64, disk_mib=64)
    with pytest.raises(ConfigError, match=r"sandbox\.pids must be"):
        Limits(pids=0)

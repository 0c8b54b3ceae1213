"""The parts under the driver: job encoding, verdicts, captures, cgroup bookkeeping."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from croze.errors import SandboxLost
from croze.sandbox import cgroup, jobs
from croze.sandbox.capture import Capture
from croze.sandbox.cgroup import Cgroups, Counters
from croze.sandbox.jobs import Report
from croze.sandbox.protocol import Limits

settings.register_profile("shared machine", deadline=None)
settings.load_profile("shared machine")

CLEAN = st.text(st.characters(blacklist_characters="\0", blacklist_categories=("Cs",)), max_size=20)
NAME = CLEAN.filter(lambda s: s and "=" not in s)


@given(
    st.lists(CLEAN, min_size=1, max_size=5),
    st.binary(max_size=50),
    st.dictionaries(NAME, CLEAN, max_size=4),
    CLEAN,
)
def test_a_job_reads_back_as_it_was_meant(argv, body, env, cwd):
    data = jobs.encode(
        "exec",
        argv=argv,
        body=body,
        env=env,
        cwd=cwd,
        limits=Limits(),
        address_space=7,
        extra_pids=1,
        extra_cpu_s=2,
    )
    size = int.from_bytes(data[:4], "little")
    fields = data[4 : 4 + size].split(b"\0")
    count = int(fields[7])
    assert data[4 + size :] == body and fields[0] == b"exec" and fields[1] == os.fsencode(cwd)
    assert [int(f) for f in fields[2:8]] == [7, 7, 64 << 20, 33, 256, len(env)]
    assert dict(p.decode().split("=", 1) for p in fields[8 : 8 + count]) == env
    assert [f.decode() for f in fields[8 + count : -1]] == argv


@given(st.binary(max_size=60))
def test_no_report_is_believed_that_is_not_nine_numbers(data):
    try:
        report = Report.parse(data)
    except SandboxLost:
        return
    assert len(data.split()) == 9 and isinstance(report.cpu_ms, float)


def report(exit_code=0, signum=0, starved=0, full=0, note=0) -> Report:
    code = -1 if signum else exit_code
    return Report.parse(f"{code} {signum} {int(signum == 9)} 10 1000 0 {starved} {full} {note}".encode())


NOTHING = Counters()


@pytest.mark.parametrize(
    ("seen", "stopped", "counted", "verdict"),
    [
        (report(), None, NOTHING, ("exited", "none")),
        (report(3), None, NOTHING, ("exited", "none")),
        (report(signum=11), None, NOTHING, ("signaled", "none")),
        (report(signum=9), None, NOTHING, ("signaled", "none")),
        (report(), None, Counters(oom_kills=1), ("oom", "policy")),
        (report(1, note=1), None, NOTHING, ("oom", "policy")),
        (report(signum=9), "timeout_wall", NOTHING, ("timeout_wall", "policy")),
        (report(signum=9, starved=950), "timeout_wall", NOTHING, ("timeout_wall", "unknown")),
        (report(signum=9, starved=500), "timeout_wall", NOTHING, ("timeout_wall", "policy")),
        (report(signum=9, starved=950), "timeout_cpu", NOTHING, ("timeout_cpu", "policy")),
        (report(0), "timeout_wall", NOTHING, ("exited", "none")),
        (report(0), "output_limit", NOTHING, ("output_limit", "policy")),
        (report(signum=signal.SIGXCPU), None, NOTHING, ("timeout_cpu", "policy")),
        (report(signum=signal.SIGXFSZ), None, NOTHING, ("disk", "policy")),
        (report(1, full=1), None, NOTHING, ("disk", "policy")),
        (report(0, full=1), None, NOTHING, ("exited", "none")),
        (report(1), None, Counters(pids_refused=2), ("pids", "policy")),
        (report(0), None, Counters(pids_refused=2), ("exited", "none")),
    ],
)
def test_how_a_job_ended_and_whose_doing_it_was(seen, stopped, counted, verdict):
    assert (
        jobs.judge(seen, stopped=stopped, seen=counted, limits=Limits(), cpu_ms=10, wall_ms=1000) == verdict
    )


@given(st.lists(st.binary(max_size=300), max_size=12), st.integers(1, 64))
@settings(max_examples=40)
def test_a_capture_keeps_head_tail_and_total(chunks, kept):
    async def main():
        capture = Capture(limit=1 << 30, overflow=lambda: None, kept=kept)
        for chunk in chunks:
            os.write(capture.write_fd, chunk)
            await asyncio.sleep(0)
        capture.started()
        await capture.end(5)
        capture.close()
        return capture

    capture, data = asyncio.run(main()), b"".join(chunks)
    assert capture.total == len(data) and capture.truncated == (len(data) > 2 * kept)
    assert capture.kept == (data if len(data) <= 2 * kept else data[:kept] + data[-kept:])


def test_overflow_is_told_once():
    async def main():
        told = []
        capture = Capture(limit=10, overflow=lambda: told.append(1))
        for _ in range(5):
            os.write(capture.write_fd, b"x" * 9)
            await asyncio.sleep(0.01)
        capture.close()
        return told

    assert asyncio.run(main()) == [1]


def here() -> Cgroups:
    found = cgroup.find()
    if found is None:
        pytest.skip("no cgroups can be made here")
    return found


def test_a_killed_owners_groups_are_swept_and_a_living_ones_are_not():
    groups = here()
    mine = groups.create(memory_bytes=64 << 20, pids=8)
    child = (
        "import time\nfrom croze.sandbox import cgroup\n"
        "g = cgroup.find().create(memory_bytes=64 << 20, pids=8)\nprint(g.directories[0], flush=True)\ntime.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
    theirs = owner.stdout.readline().strip()
    stray = subprocess.Popen(["sleep", "60"])
    for directory in (theirs,):
        with open(f"{directory}/cgroup.procs", "w") as f:
            f.write(str(stray.pid))
    groups.sweep()
    assert os.path.exists(theirs) and stray.poll() is None
    owner.kill()
    owner.wait()
    owner.stdout.close()
    groups.sweep()
    assert stray.wait(5) == -9
    groups.sweep()
    assert not os.path.exists(theirs) and all(d.exists() for d in mine.directories)
    assert mine.try_remove()


def test_removal_kills_what_is_left():
    group = here().create(memory_bytes=64 << 20, pids=8)
    left = subprocess.Popen(["sleep", "60"])
    for path in group.join_files:
        with open(path, "w") as f:
            f.write(str(left.pid))
    asyncio.run(group.remove())
    assert left.wait(5) == -9 and not any(d.exists() for d in group.directories)


def test_counters_of_both_versions(tmp_path):
    """Files as the kernel writes them."""
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 4\noom 2\noom_kill 1\noom_group_kill 0\n")
    (tmp_path / "memory.peak").write_text("2097152\n")
    (tmp_path / "pids.events").write_text("max 7\n")
    (tmp_path / "cpu.stat").write_text("usage_usec 1500\nuser_usec 1000\nsystem_usec 500\n")
    two = cgroup.Cgroup(2, dict.fromkeys(("memory", "pids"), tmp_path)).counters()
    assert two == Counters(oom_kills=1, pids_refused=7, cpu_ms=1.5, peak_mib=2.0)
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "memory.max_usage_in_bytes").write_text("1048576\n")
    (tmp_path / "cpuacct.usage").write_text("2500000\n")
    one = cgroup.Cgroup(1, dict.fromkeys(("memory", "pids", "cpuacct"), tmp_path)).counters()
    assert one == Counters(oom_kills=3, pids_refused=7, cpu_ms=2.5, peak_mib=1.0)
    assert cgroup.Cgroup(1, {"memory": tmp_path / "gone"}).counters() == Counters()

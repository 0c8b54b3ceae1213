"""What a machine has left, read from files as the kernel writes them."""

from pathlib import Path

import pytest

from croze.plan import machine

GIB = 1 << 30


def proc(folder: Path, cgroup: str) -> Path:
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text(f"MemTotal: 33554432 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    (folder / "self/cgroup").write_text(cgroup)
    return folder


def group(folder: Path, **files: str | int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name.replace("__", ".")).write_text(f"{value}\n")


def test_without_limits_the_kernel_is_believed(tmp_path):
    root = tmp_path / "cg"
    group(root / "a", memory__max="max", memory__current=GIB)
    assert machine.memory_available(proc(tmp_path / "proc", "0::/a"), root) == 8 * GIB


@pytest.mark.parametrize("outer", [None, 3 * GIB])
def test_the_tightest_group_around_counts(tmp_path, outer):
    root = tmp_path / "cg"
    group(
        root / "a/b",
        memory__max=6 * GIB,
        memory__current=2 * GIB,
        memory__stat=f"anon 1\ninactive_file {GIB}",
    )
    group(root / "a", memory__max=outer or "max", memory__current=2 * GIB)
    found = machine.memory_available(proc(tmp_path / "proc", "0::/a/b"), root)
    assert found == (5 * GIB if outer is None else GIB)


def test_version_one_is_read_too(tmp_path):
    root = tmp_path / "cg"
    group(root / "memory/x", memory__limit_in_bytes=2 * GIB, memory__usage_in_bytes=3 * GIB)
    group(root / "memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=GIB)
    assert machine.memory_available(proc(tmp_path / "proc", "4:memory:/x\n0::/"), root) == 0


def test_this_machine_has_some():
    assert 1 << 20 < machine.memory_available() < 1 << 46
    assert machine.cores() >= 1


def test_the_disk_of_a_folder_to_be(tmp_path):
    assert machine.existing(tmp_path / "a/b/c") == tmp_path
    assert machine.free_bytes(tmp_path / "a/b/c") > 0

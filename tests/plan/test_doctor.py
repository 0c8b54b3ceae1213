"""What ``croze doctor`` looks at, one by one, on machines as they may be."""

import resource
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from croze.plan import checks_host as host
from croze.plan import checks_install as install
from croze.plan import doctor
from croze.plan.checks import Finding, Report


def found(look: Callable[[Any, Report], None], context: Any = None) -> list[Finding]:
    report = Report("check")
    look(context, report)
    return report.findings


def only(look: Callable[[Any, Report], None], context: Any = None) -> Finding:
    (one,) = found(look, context)
    return one


def test_every_look_is_a_check_once():
    names = [check.name for check in doctor.CHECKS]
    assert len(set(names)) == len(names)
    assert {need for check in doctor.CHECKS for need in check.needs} <= set(names)


# --------------------------------------------------------------------------------------------- packages


@pytest.fixture
def installed_as(monkeypatch, tmp_path) -> Callable[..., None]:
    """Installs a croze whose metadata has these lines; it is found before the real one."""

    def install_it(*lines: str) -> None:
        info = tmp_path / "croze-9.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            "\n".join(["Metadata-Version: 2.1", "Name: croze", "Version: 9.9", *lines, ""])
        )
        monkeypatch.syspath_prepend(tmp_path)

    return install_it


def test_packages_that_are_missing_or_old(installed_as):
    installed_as(
        "Requires-Dist: msgspec>=0.1",
        "Requires-Dist: numpy>=999",
        "Requires-Dist: no-such-stave[a,b]>=2,<3",
        "Requires-Dist: gone; sys_platform == 'nowhere'",
        "Requires-Dist: peft>=999; extra == 'lora'",
        "Provides-Extra: lora",
    )
    old, missing = found(install.look_at_packages)
    assert (old.status, old.kind, old.where) == ("fail", "packages.version", "numpy")
    assert metadata.version("numpy") in old.message and old.fix == "pip install 'numpy>=999'"
    assert (missing.kind, missing.fix) == ("packages.missing", "pip install 'no-such-stave[a,b]<3,>=2'")
    extras = {f.where: f for f in found(install.look_at_extras)}
    if install.installed("peft"):
        assert extras["peft"].status == "warn" and extras["peft"].fix == "pip install 'croze[lora]'"


def test_a_croze_that_does_not_say_what_it_needs(installed_as):
    installed_as()
    one = only(install.look_at_packages)
    assert (one.status, one.kind) == ("warn", "packages.unknown")
    assert only(install.look_at_python).status == "ok"


def test_python_that_is_too_old(installed_as):
    installed_as("Requires-Python: >=9.9")
    one = only(install.look_at_python)
    assert one.status == "fail" and ">=9.9" in one.message and one.where == sys.executable


def test_torch_that_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    (tmp_path / "transformers.py").write_text("import no_such_stave\n")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from croze.plan.checks import make\nfrom croze.plan.doctor import CHECKS\n"
        "names = ('torch', 'cuda', 'exactness')\n"
        "for f in make(tuple(c for c in CHECKS if c.name in names), None): print(f.check, f.kind, f.message)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("torch torch.import torch cannot be imported: libcudart.so.13")
    assert lines[1] == "torch torch.import transformers cannot be imported: No module named 'no_such_stave'"
    assert lines[2:] == [f"{name} skipped not checked: torch failed" for name in ("cuda", "exactness")]


# -------------------------------------------------------------------------------------------------- host


def groups(folder: Path, line: str, **files: str) -> tuple[Path, Path]:
    """/proc and /sys/fs/cgroup of a machine on which this process is in a group with these files."""
    (folder / "proc" / "self").mkdir(parents=True)
    (folder / "proc" / "self" / "cgroup").write_text(line + "\n")
    inner = folder / "cgroup" / line.split(":", 2)[2].lstrip("/")
    if not line.startswith("0:"):
        inner = folder / "cgroup" / "cpu" / line.split(":", 2)[2].lstrip("/")
    inner.mkdir(parents=True)
    for name, text in files.items():
        (inner / name.replace("__", ".")).write_text(text)
    return folder / "proc", folder / "cgroup"


@pytest.mark.parametrize(
    ("line", "files", "quota"),
    [
        ("0::/a/b", {"cpu__max": "150000 100000\n"}, 1.5),
        ("0::/a/b", {"cpu__max": "max 100000\n"}, None),
        ("0::/a/b", {}, None),
        ("4:cpu,cpuacct:/a", {"cpu__cfs_quota_us": "200000\n", "cpu__cfs_period_us": "100000\n"}, 2.0),
        ("4:cpu,cpuacct:/a", {"cpu__cfs_quota_us": "-1\n", "cpu__cfs_period_us": "100000\n"}, None),
        ("4:memory:/a", {"cpu__cfs_quota_us": "200000\n", "cpu__cfs_period_us": "100000\n"}, None),
        ("0::/a", {"cpu__max": "nonsense"}, None),
    ],
)
def test_the_quota_of_a_cgroup(line, files, quota, tmp_path):
    assert host.cpu_quota(*groups(tmp_path, line, **files)) == quota


def test_the_outer_groups_count_too(tmp_path):
    proc, root = groups(tmp_path, "0::/a/b", cpu__max="400000 100000")
    (root / "a" / "cpu.max").write_text("50000 100000")
    assert host.cpu_quota(proc, root) == 0.5
    assert host.cpu_quota(tmp_path / "none", root) is None


@pytest.mark.parametrize(
    ("cores", "quota", "threads", "kinds"),
    [
        (4, 1.5, "", ["cores.quota"]),
        (4, 4.0, "4", ["check"]),
        (4, None, "8", ["check", "cores.threads"]),
        (2, 0.5, "²", ["cores.quota"]),
    ],
)
def test_cores(cores, quota, threads, kinds):
    findings = found(lambda _, report: host.judge_cores(cores, quota, threads, report))
    assert [f.kind for f in findings] == kinds
    if "cores.quota" in kinds:
        assert "engine.threads=1:" in str(findings[0].fix)


@pytest.mark.parametrize(("free", "status"), [(100 << 20, "fail"), (1 << 30, "warn"), (8 << 30, "ok")])
def test_memory(free, status):
    one = only(lambda _, report: host.judge_memory(free, 16 << 30, report))
    assert one.status == status and (one.fix is None) == (status == "ok")


@pytest.mark.parametrize(("free", "status"), [(1 << 20, "fail"), (1 << 30, "warn"), (8 << 30, "ok")])
def test_room(free, status, tmp_path):
    one = only(lambda _, report: host.judge_place("runs", tmp_path, free, "set run.dir", report))
    assert one.status == status and one.where == str(tmp_path)
    assert (one.fix is None) == (status == "ok")


def test_a_place_that_is_no_folder(tmp_path):
    (tmp_path / "runs").touch()
    first = found(host.look_at_disk, tmp_path)[0]
    assert (first.kind, first.where) == ("disk.readonly", str(tmp_path / "runs")) and "run.dir" in str(
        first.fix
    )


def test_limits_in_a_process_of_its_own():
    """A soft limit that can be raised, and one that cannot."""
    program = (
        "import resource as r\nfrom croze.plan import checks_host as h\nfrom croze.plan.checks import Report\n"
        "r.setrlimit(r.RLIMIT_NOFILE, (200, r.getrlimit(r.RLIMIT_NOFILE)[1]))\n"
        "r.setrlimit(r.RLIMIT_FSIZE, (1 << 30, 1 << 30))\n"
        "report = Report('limits')\nh.look_at_limits(None, report)\n"
        "for f in report.findings: print(f.status, f.where, f.fix)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    lines = done.stdout.splitlines()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY or hard >= 1024:
        assert lines[0] == "warn ulimit -n ulimit -n 1024"
    assert "warn ulimit -f raise the hard limit (limits.conf)" in lines

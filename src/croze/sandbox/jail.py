"""What a bubblewrap sandbox sees: the command line that builds it."""

from __future__ import annotations

import os
import py_compile
import sys
import tempfile
from pathlib import Path

import msgspec

from croze.errors import SandboxUnavailable
from croze.sandbox.protocol import BOX, Limits

INNER_UID = 65536
"""The user that programs run as, seen from inside."""

GUEST = "/.croze.pyc"
ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": BOX,
    "TMPDIR": BOX,
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""All of a program's environment. A fixed hash seed makes equal programs print equal output."""


class Python(msgspec.Struct, frozen=True, kw_only=True):
    """The interpreter that sandboxes run: the one that runs croze, outside of its virtual environment."""

    executable: str
    prefix: str

    @classmethod
    def own(cls) -> Python:
        prefix = os.path.realpath(sys.base_prefix)
        name = f"python{sys.version_info.major}.{sys.version_info.minor}"
        executable = next(
            (p for p in (f"{prefix}/bin/{name}", f"{prefix}/bin/python3") if os.access(p, os.X_OK)), None
        )
        if executable is None:
            raise SandboxUnavailable(
                f"no interpreter {name} under {prefix}",
                where="sandbox",
                fix="use a Python with its own prefix",
            )
        home = os.path.realpath(Path.home())
        if not _under(prefix, "/usr") and _under(home, prefix):
            raise SandboxUnavailable(
                f"Python's prefix {prefix} holds your home directory, which sandboxes must not see",
                where="sandbox",
                fix="use a Python installed in a directory of its own",
            )
        return cls(executable=executable, prefix=prefix)

    @property
    def command(self) -> list[str]:
        """Ignores the user's site and the working directory, as -I does, yet keeps the hash seed."""
        return [self.executable, "-s", "-S", "-P"]


def _under(path: str, root: str) -> bool:
    return os.path.commonpath([path, root]) == root


def compiled_guest() -> bytes:
    """The guest as bytecode, compiled once: every sandbox would else spend milliseconds on it."""
    with tempfile.TemporaryDirectory(prefix="croze-") as folder:
        target = os.path.join(folder, "guest.pyc")
        py_compile.compile(
            str(Path(__file__).with_name("guest.py")), cfile=target, dfile="guest", doraise=True
        )
        return Path(target).read_bytes()


def system_binds(python: Python) -> list[str]:
    """Read-only: the system's programs and libraries and the interpreter; nothing else of the host."""
    words = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64", "lib32"):
        path = f"/{name}"
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    words += ["--perms", "0755", "--dir", "/etc"]
    for path in ("/etc/ld.so.cache", "/etc/alternatives"):
        words += ["--ro-bind-try", path, path]
    if not _under(python.prefix, "/usr"):
        # bwrap gives made-up parents the mode of the host's, which may keep the sandbox's user out.
        for parent in reversed(Path(python.prefix).parents[:-1]):
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", python.prefix, python.prefix]
    return words


class Descriptors(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors handed to bwrap; ``info`` and ``block`` are None where jobs share the guest's user."""

    control: int
    guest: int
    filter: int | None
    info: int | None
    block: int | None

    @property
    def all(self) -> tuple[int, ...]:
        every = (self.control, self.guest, self.filter, self.info, self.block)
        return tuple(fd for fd in every if fd is not None)


def command(bwrap: str, python: Python, binds: list[str], limits: Limits, fds: Descriptors) -> list[str]:
    """The whole command line of one sandbox."""
    words = [bwrap, "--die-with-parent", "--new-session", "--as-pid-1", "--hostname", "croze", "--clearenv"]
    words += [f"--unshare-{ns}" for ns in ("user", "pid", "net", "ipc", "uts", "cgroup")]
    words += ["--cap-drop", "ALL"]
    if fds.block is None or fds.info is None:
        words += ["--uid", str(INNER_UID), "--gid", str(INNER_UID)]
    else:
        words += [w for cap in ("SETUID", "SETGID", "KILL") for w in ("--cap-add", f"CAP_{cap}")]
        words += ["--info-fd", str(fds.info), "--userns-block-fd", str(fds.block)]
    if fds.filter is not None:
        words += ["--seccomp", str(fds.filter)]
    for key, value in ENVIRONMENT.items():
        words += ["--setenv", key, value]
    disk = limits.disk_mib << 20
    shm = min(disk, 16 << 20)
    words += binds
    words += ["--proc", "/proc", "--dev", "/dev"]
    words += ["--perms", "1777", "--size", str(shm), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    words += ["--perms", "0777", "--size", str(disk), "--tmpfs", BOX, "--symlink", BOX[1:], "/tmp"]
    words += ["--perms", "0444", "--file", str(fds.guest), GUEST, "--chdir", BOX, "--remount-ro", "/"]
    user = 0 if fds.block is None else INNER_UID
    return [*words, "--", *python.command, GUEST, str(fds.control), str(user)]


_JOIN = 'while [ "$1" != -- ]; do echo $$ >"$1" || exit 125; shift; done; shift; exec "$@"'


def joining(groups: list[str], words: list[str]) -> list[str]:
    """The same command, started inside the cgroups whose ``cgroup.procs`` files these are."""
    return ["/bin/sh", "-c", _JOIN, "croze", *groups, "--", *words] if groups else words

"""What a sandbox is: a place to run code that nobody trusts, and the truth about how it ended.

The machinery's own faults (a sandbox that died, a driver that cannot start one) *raise*; they are never an
``ExecResult`` and so can never become a reward (invariant 1). What the code did to itself is a result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import msgspec

from croze.config import SandboxOptions, check_range
from croze.errors import ConfigError, SandboxUnsupported
from croze.types import Fault

Status = Literal[
    "exited",
    "signaled",
    "timeout_cpu",
    "timeout_wall",
    "timeout_idle",
    "oom",
    "pids",
    "disk",
    "output_limit",
    "cancelled",
    "lost",
]
Tier = Literal["unsafe", "local", "gvisor", "microvm"]
"""How strong the wall is: none; this kernel's namespaces; a user-space kernel; a virtual machine."""

Net = Literal["none", "loopback", "gateway", "allowlist"]

KEPT_BYTES = 64 * 1024
"""Of each output stream, this much of the head and of the tail is kept."""

BOX = "/box"
"""The writable directory inside a sandbox, and the working directory of everything run in it."""


class ExecResult(msgspec.Struct, frozen=True, kw_only=True):
    """How one program ended.

    ``fault`` is "policy" where the program broke a limit, "none" where it ended by itself (whatever its exit
    code), "unknown" where a timeout may be the host's doing. ``stdout`` and ``stderr`` are the first and last
    64 KiB; ``stdout_total`` and ``stderr_total`` the bytes written. ``exit_code`` xor ``signal`` is set.
    """

    status: Status
    fault: Fault
    exit_code: int | None = None
    signal: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    stdout_total: int = 0
    stderr_total: int = 0
    truncated: bool = False
    cpu_ms: float = 0.0
    wall_ms: float = 0.0
    queue_ms: float = 0.0
    max_rss_mib: float = 0.0
    oom_kills: int = 0
    pids_refused: int = 0
    leftover_procs: int = 0
    tier: Tier = "local"
    driver: str = ""
    node: str = ""

    @property
    def text(self) -> str:
        """stdout as text, undecodable bytes replaced."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        """stderr as text, undecodable bytes replaced."""
        return self.stderr.decode("utf-8", "replace")

    @property
    def ok(self) -> bool:
        """Ended by itself with exit code 0. Code that nobody trusts can always bring this about."""
        return self.status == "exited" and self.exit_code == 0

    def to_plain(self) -> dict[str, Any]:
        """JSON-ready, every field under its own name, output as text."""
        return {**msgspec.structs.asdict(self), "stdout": self.text, "stderr": self.error_text}


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one program may use. CPU is the budget, wall time the backstop."""

    cpu_s: float = 5.0
    wall_s: float = 10.0
    memory_mib: int = 512
    """All processes together where a memory cgroup is at hand, else each process's address space."""
    pids: int = 32
    """Processes and threads alive at once."""
    disk_mib: int = 64
    """What /box holds."""
    output_mib: int = 64
    """Killed when either output stream passes this."""
    fds: int = 256

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_range(f"sandbox.{name}", getattr(self, name))
        for name in ("output_mib", "fds"):
            if getattr(self, name) <= 0:
                raise ConfigError(
                    f"{name} must be above 0, got {getattr(self, name)}", where=f"sandbox.{name}"
                )
        if self.disk_mib >= self.memory_mib:
            raise ConfigError(
                f"sandbox.disk_mib ({self.disk_mib}) must be below sandbox.memory_mib ({self.memory_mib})",
                where="sandbox.disk_mib",
                fix=f"set sandbox.memory_mib above {self.disk_mib}, or sandbox.disk_mib below {self.memory_mib}:"
                " files in /box live in memory",
            )

    @classmethod
    def of(cls, options: SandboxOptions) -> Limits:
        """Raises ConfigError, which names the key."""
        return cls(
            cpu_s=options.cpu_s,
            wall_s=options.wall_s,
            memory_mib=options.memory_mib,
            pids=options.pids,
            disk_mib=options.disk_mib,
        )


class Sandbox(ABC):
    """One isolated place with its own files, used once and destroyed. ``async with`` destroys it.

    Paths are those of the inside; relative ones start at ``/box``. Programs of one sandbox run one after
    another, and whatever a program leaves running is killed when it ends. Errors about files are Python's own
    (``FileNotFoundError``, ...). A call that is cancelled destroys the sandbox.
    """

    driver: str
    tier: Tier

    @abstractmethod
    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        cpu_s: float | None = None,
        wall_s: float | None = None,
    ) -> ExecResult:
        """Run a program to its end. ``env`` is added to a small fixed environment, never the host's."""

    @abstractmethod
    async def exec_python(
        self,
        code: str,
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        cpu_s: float | None = None,
        wall_s: float | None = None,
    ) -> ExecResult:
        """Run Python source as ``__main__`` in a fresh process, standard library only."""

    @abstractmethod
    async def read(self, path: str) -> bytes:
        """The bytes of a regular file. Links are followed inside, where nothing of the host is."""

    @abstractmethod
    async def write(self, path: str, data: bytes | str) -> None:
        """Create or replace a file, and the directories above it."""

    @abstractmethod
    async def list(self, path: str = BOX) -> Sequence[str]:
        """The names in a directory, sorted."""

    @abstractmethod
    async def sibling(self) -> Sandbox:
        """A second, empty sandbox of the same driver, limits and net: where a verdict is reached. The caller
        destroys it."""

    @abstractmethod
    async def destroy(self) -> None:
        """End every process and drop every file. May be called twice."""

    async def upload(self, source: Path, path: str) -> None:
        """Copy a file of the host into the sandbox."""
        await self.write(path, source.read_bytes())

    async def download(self, path: str, target: Path) -> None:
        """Copy a file of the sandbox to the host."""
        target.write_bytes(await self.read(path))

    async def session(self) -> NoReturn:
        """A long-lived shell."""
        self._refuse("session")

    async def snapshot(self) -> NoReturn:
        """Freeze the files under a name."""
        self._refuse("snapshot")

    async def fork(self, n: int = 1) -> NoReturn:
        """Copies that go separate ways."""
        self._refuse("fork")

    async def verify(self) -> NoReturn:
        """A sandbox that holds this one's files read-only."""
        self._refuse("verify")

    async def renew(self, lease_s: float) -> NoReturn:
        """Extend the lease."""
        self._refuse("renew")

    def _refuse(self, what: str) -> NoReturn:
        raise SandboxUnsupported(
            f"the sandbox driver {self.driver!r} cannot {what}",
            where="sandbox",
            fix="use sibling(), read and write",
        )

    async def __aenter__(self) -> Sandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.destroy()


class Driver(Protocol):
    """Makes sandboxes of one kind. ``missing`` names the layers this machine could not give."""

    name: str
    tier: Tier
    missing: tuple[str, ...]

    async def create(self, *, limits: Limits | None = None, net: Net = "none") -> Sandbox:
        """A fresh sandbox. Raises SandboxUnavailable, SandboxFault or SandboxUnsupported (net)."""
        ...

    async def close(self) -> None:
        """Destroy every sandbox that is left."""
        ...

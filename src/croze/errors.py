"""Every error croze raises on purpose, and what the process exits with.

    CrozeError                      kind                    exit
    ├── UsageError                  usage                   2   wrong use or declaration
    │   ├── ConfigError             config                  2   a key or value of the options
    │   ├── DeclarationError        declaration             2   the task file, the Run, a reward's signature
    │   ├── TasksError              tasks                   2   a data source or one of its rows
    │   ├── ModelError              model                   2   a model that cannot be used
    │   │   ├── ModelNotFound       model.not_found         2
    │   │   └── ModelUnsupported    model.unsupported       2
    │   ├── CheckpointMismatch      checkpoint.mismatch     2   a whole checkpoint, but of another training
    │   ├── PluginError             plugin                  2   an installed plug-in that cannot be used
    │   └── SandboxUnsupported      sandbox.unsupported     2   this driver cannot do that
    ├── CheckFailed                 check                   1   a check or an invariant did not hold
    │   └── InvariantViolated       invariant               1
    ├── InfraFault                  infra                   3   the machinery failed, never the model
    │   ├── CheckpointFault         checkpoint              3   files that cannot be written, or are damaged
    │   ├── EngineFault             engine                  3
    │   ├── RewardFault             reward                  3   a reward worker died, hung, or gave no number
    │   ├── SandboxFault            sandbox                 3   also SandboxLost (sandbox.lost)
    │   │   ├── SandboxLost         sandbox.lost            3
    │   │   └── SandboxUnavailable  sandbox.unavailable     3   no isolation on this machine
    │   └── WaitExpired             wait                    3   a named wait met its deadline
    └── Interrupted                 interrupted             4   stopped by the user, resumable

A message says what happened; ``where`` names the file, key or subsystem; ``fix`` says what to do.
Faults of the *model* (its own endless loop, its own memory) are not errors: they are data in ``Outcome``.
"""

from __future__ import annotations

from typing import ClassVar


class CrozeError(Exception):
    """Root of the tree. ``kind`` is stable and meant for programs; the message is meant for people."""

    kind: ClassVar[str] = "croze"
    exit_code: ClassVar[int] = 3

    def __init__(self, message: str, *, where: str | None = None, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.fix = fix

    def __reduce__(self):
        return _rebuild, (type(self), self.message, self.where, self.fix)

    def __str__(self) -> str:
        lines = [f"error[{self.kind}]: {self.message}"]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  do:    {self.fix}")
        return "\n".join(lines)


def told(error: BaseException, *, limit: int = 1000) -> str:
    """An error of any class as "Type: text", at most ``limit`` characters that every encoding has. Raises nothing."""
    try:
        text = error.message if isinstance(error, CrozeError) else str(error)
    except Exception as broken:  # user code: an exception whose own text cannot be had
        text = f"(its text cannot be had: {type(broken).__name__})"
    name = type(error).__name__
    return (f"{name}: {text}" if text else name).encode("utf-8", "replace").decode()[:limit]


def _rebuild(cls: type[CrozeError], message: str, where: str | None, fix: str | None) -> CrozeError:
    return cls(message, where=where, fix=fix)


class UsageError(CrozeError):
    """The caller asked for something wrong; nothing was started."""

    kind = "usage"
    exit_code = 2


class ConfigError(UsageError):
    kind = "config"


class DeclarationError(UsageError):
    kind = "declaration"


class TasksError(UsageError):
    kind = "tasks"


class ModelError(UsageError):
    kind = "model"


class ModelNotFound(ModelError):
    kind = "model.not_found"


class ModelUnsupported(ModelError):
    kind = "model.unsupported"


class CheckpointMismatch(UsageError):
    kind = "checkpoint.mismatch"


class PluginError(UsageError):
    kind = "plugin"


class SandboxUnsupported(UsageError):
    kind = "sandbox.unsupported"


class CheckFailed(CrozeError):
    kind = "check"
    exit_code = 1


class InvariantViolated(CheckFailed):
    kind = "invariant"


class InfraFault(CrozeError):
    """The machinery failed. It can never become a reward (invariant 1)."""

    kind = "infra"


class CheckpointFault(InfraFault):
    kind = "checkpoint"


class EngineFault(InfraFault):
    kind = "engine"


class RewardFault(InfraFault):
    kind = "reward"


class SandboxFault(InfraFault):
    kind = "sandbox"


class SandboxLost(SandboxFault):
    kind = "sandbox.lost"


class SandboxUnavailable(SandboxFault):
    kind = "sandbox.unavailable"


class WaitExpired(InfraFault):
    kind = "wait"


class Interrupted(CrozeError):
    kind = "interrupted"
    exit_code = 4

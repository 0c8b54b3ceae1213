"""croze: RL post-training infrastructure for language models. The public names, imported when first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from croze._version import VERSION

if TYPE_CHECKING:
    from croze.config import (
        Algo,
        EngineOptions,
        LoopOptions,
        Lora,
        Optim,
        RewardOptions,
        Sampling,
        SandboxOptions,
        SyncOptions,
        TraceOptions,
    )
    from croze.env.tasks import TaskSource, tasks
    from croze.errors import CrozeError
    from croze.loop.replay import replay
    from croze.loop.start import resume, train
    from croze.loop.verbs import evaluate
    from croze.plan.preflight import check
    from croze.run import Run
    from croze.sandbox.protocol import ExecResult, Sandbox
    from croze.types import Outcome, Rollout, Task

_HOMES = {
    "croze.config": (
        "Algo",
        "EngineOptions",
        "Lora",
        "LoopOptions",
        "Optim",
        "RewardOptions",
        "Sampling",
        "SandboxOptions",
        "SyncOptions",
        "TraceOptions",
    ),
    "croze.env.tasks": ("TaskSource", "tasks"),
    "croze.errors": ("CrozeError",),
    "croze.loop.replay": ("replay",),
    "croze.loop.start": ("resume",),
    "croze.loop.verbs": ("evaluate",),
    "croze.plan.preflight": ("check",),
    "croze.run": ("Run",),
    "croze.sandbox.protocol": ("ExecResult", "Sandbox"),
    "croze.types": ("Outcome", "Rollout", "Task"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [  # noqa: RUF022 - grouped as a reader would look for them
    "Run",
    "tasks",
    "check",
    "train",
    "resume",
    "replay",
    "evaluate",
    "Outcome",
    "Rollout",
    "Task",
    "TaskSource",
    "Sandbox",
    "ExecResult",
    "Sampling",
    "Optim",
    "Lora",
    "Algo",
    "EngineOptions",
    "LoopOptions",
    "RewardOptions",
    "SandboxOptions",
    "SyncOptions",
    "TraceOptions",
    "CrozeError",
]
__version__ = VERSION


def __getattr__(name: str) -> Any:
    if name == "train":  # the package, which can be called
        return importlib.import_module("croze.train")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'croze' has no attribute {name!r}")
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

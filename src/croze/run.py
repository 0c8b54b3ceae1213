"""``Run``: the declaration, pure data. The verbs live in the packages that do them."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from croze import config
from croze.config import (
    Algo,
    EngineOptions,
    LoopOptions,
    Lora,
    Optim,
    RewardOptions,
    Sampling,
    SandboxOptions,
    Source,
    SyncOptions,
    TraceOptions,
)
from croze.errors import ConfigError, DeclarationError

RewardFunction = Callable[..., Any]
MOST_ROLLOUTS = 1_000_000
"""Of one step: their headers are in memory together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A model, tasks and a reward: all that a run is, before anything is started.

    ``model``: a built-in name, hub id, local directory or .gguf file. ``tasks``: what ``cz.tasks`` returns, or
    anything it accepts. ``reward``: one function, called by argument name. The rest are options; every one of
    them can be overridden on the command line as ``key=value``.
    """

    model: str
    """A built-in name, hub id, local directory or .gguf file."""
    tasks: Any
    reward: RewardFunction
    eval_tasks: Any = None
    """Held-out tasks; None holds out a part of ``tasks`` where loop.eval_tasks asks for it."""
    name: str = "run"
    """What the run folder's name begins with: letters, digits, ".", "-" and "_"."""
    seed: int = 0
    """Where all random numbers start: tasks, sampling, adapters."""
    steps: int = 100
    """Training steps, each on a batch of groups_per_step x group_size rollouts."""
    group_size: int = 8
    """Rollouts per task."""
    groups_per_step: int = 8
    """Tasks per step."""
    dir: str = ""
    """The run folder (key ``run.dir``); empty: runs/NAME-ID."""
    adapter: str = ""
    """A trained adapter's folder (peft's format, made with these lora.* options) that ``evaluate`` adds."""
    overrides: tuple[str, ...] = ()
    """Keys that were given on the command line."""
    file: str = ""
    """The task file it was loaded from; empty for a Run made in Python."""
    sampling: Sampling = field(default_factory=Sampling)
    optim: Optim = field(default_factory=Optim)
    lora: Lora = field(default_factory=Lora)
    algo: Algo = field(default_factory=Algo)
    engine: EngineOptions = field(default_factory=EngineOptions)
    loop: LoopOptions = field(default_factory=LoopOptions)
    reward_options: RewardOptions = field(default_factory=RewardOptions)
    sandbox: SandboxOptions = field(default_factory=SandboxOptions)
    sync: SyncOptions = field(default_factory=SyncOptions)
    trace: TraceOptions = field(default_factory=TraceOptions)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise DeclarationError(
                f"Run.model must be text, a model's name or path, got {self.model!r}",
                where="Run(model=...)",
                fix="built-in names, a directory, a .gguf file and hub ids (ORG/NAME) are models",
            )
        if not callable(self.reward):
            raise DeclarationError(
                f"Run.reward must be a function, got {type(self.reward).__name__}",
                where="Run(reward=...)",
                fix="write `def right(reply, answer): return float(reply == answer)`, and reward=right",
            )
        hints = typing.get_type_hints(Run)
        for key in TOP_KEYS.values():
            if not config.matches(getattr(self, key), hints[key]):
                raise ConfigError(
                    f"{key} wants {config.describe(hints[key])}, got {getattr(self, key)!r}",
                    where=f"Run({key}=...)",
                    fix=config.meaning(key),
                )
        for section, cls in config.SECTIONS.items():
            value = getattr(self, _FIELD_OF.get(section, section))
            if not isinstance(value, cls):
                name = _FIELD_OF.get(section, section)
                raise ConfigError(
                    f"{name} wants cz.{cls.__name__}(...), got {value!r}",
                    where=f"Run({name}=...)",
                    fix=f"write {name}=cz.{cls.__name__}(...)",
                )
            config.check_types(section, value)
        for key, value in self.keys().items():
            config.check_range(key, value)
        if self.groups_per_step * self.group_size > MOST_ROLLOUTS:
            raise ConfigError(
                f"a step of {self.groups_per_step} groups of {self.group_size} rollouts is more than {MOST_ROLLOUTS}",
                where="groups_per_step",
                fix="lower groups_per_step or group_size",
            )
        if not re.fullmatch(r"[\w.-]{1,100}", self.name) or self.name.startswith("."):
            raise ConfigError(
                f"name {self.name!r} cannot name a folder", where="name", fix="use letters, digits, - and _"
            )
        odd = [t for t in self.lora.targets if t not in Lora().targets]
        if odd or not self.lora.targets:
            raise ConfigError(
                f"lora.targets does not know {', '.join(odd)}" if odd else "lora.targets is empty",
                where="lora.targets",
                fix=f"choose from {', '.join(Lora().targets)}",
            )

    def keys(self) -> dict[str, Any]:
        """Every key with its value, dotted: what ``config.json`` and ``check`` show."""
        flat: dict[str, Any] = {key: getattr(self, name) for key, name in TOP_KEYS.items()}
        for section in config.SECTIONS:
            value = getattr(self, _FIELD_OF.get(section, section))
            for f in dataclasses.fields(value):
                flat[f"{section}.{f.name}"] = config.to_plain(getattr(value, f.name))
        return flat

    def override(self, words: Mapping[str, str], source: str = "command line") -> Run:
        """A copy with ``key=value`` overrides applied; unknown keys and wrong types are errors."""
        top: dict[str, Any] = {}
        nested: dict[str, dict[str, Any]] = {}
        hints = typing.get_type_hints(Run)
        for key, text in words.items():
            section, _, name = key.partition(".")
            if key in TOP_KEYS:
                top[TOP_KEYS[key]] = config.coerce(key, text, hints[TOP_KEYS[key]])
            elif section in config.SECTIONS and name in _fields(config.SECTIONS[section]):
                annotation = typing.get_type_hints(config.SECTIONS[section])[name]
                nested.setdefault(section, {})[name] = config.coerce(key, text, annotation)
            else:
                raise ConfigError(f"unknown key {key!r}", where=source, fix=_nearest(key))
        for section, changes in nested.items():
            attribute = _FIELD_OF.get(section, section)
            top[attribute] = dataclasses.replace(getattr(self, attribute), **changes)
        return dataclasses.replace(self, **top, overrides=(*self.overrides, *words))


TOP_KEYS: dict[str, str] = {
    "model": "model",
    "name": "name",
    "seed": "seed",
    "steps": "steps",
    "group_size": "group_size",
    "groups_per_step": "groups_per_step",
    "run.dir": "dir",
}
_FIELD_OF = {"reward": "reward_options"}
_IN_THE_FILE = ("tasks", "reward", "eval_tasks", "adapter")


def _fields(cls: type) -> set[str]:
    return {f.name for f in dataclasses.fields(cls)}


def all_keys() -> list[str]:
    """Every key an override may set."""
    nested = [
        f"{section}.{name}" for section, cls in config.SECTIONS.items() for name in sorted(_fields(cls))
    ]
    return [*TOP_KEYS, *nested]


def _nearest(key: str) -> str:
    """What to do about a key that there is not."""
    section, _, name = key.rpartition(".")
    if key in _IN_THE_FILE:
        return f"{key} is set in the task file: cz.Run({key}=...)"
    same = [k for k in all_keys() if k.rpartition(".")[2] == name.lower()]
    if len(same) == 1:
        return f"did you mean {same[0]!r}?"
    if key in config.SECTIONS:
        return f"{key} is a section of keys: see `croze keys {key}`"
    if section in config.SECTIONS:  # what its keys have in common with this one is no likeness
        return config.suggest(key, all_keys(), cutoff=0.75) or f"see `croze keys {section}`"
    return config.suggest(key, all_keys()) or "see `croze keys`"


def provenance(run: Run) -> dict[str, tuple[Any, Source]]:
    """Where each key's value came from: the command line, the task file, or the default."""
    defaults = Run(model="default", tasks=(), reward=print).keys()
    return {
        key: (value, "override" if key in run.overrides else "default" if value == defaults[key] else "file")
        for key, value in run.keys().items()
    }

"""Calling a reward by the names of its arguments, and reading what it returned.

A reward asks for what it needs: ``reply`` (text), ``rollout``, ``sandbox``, ``prompt``, ``task``, or any
column of the task. It is a function or a coroutine function and returns a number, a dict of named parts
(their sum is the score), an ``Outcome``, or None (not applicable: the rollout is left out).

A parameter named ``completions`` means TRL's batched form: lists in (``prompts``, ``completions``, every
column), a list of numbers or None out. https://huggingface.co/docs/trl/main/rewards
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import msgspec

from croze.config import suggest
from croze.errors import DeclarationError, RewardFault, TasksError
from croze.reward.locate import TOP_LEVEL, place
from croze.types import Fault, Outcome, Rollout, Task

RESERVED = ("reply", "rollout", "sandbox", "prompt", "task")
BATCHED = ("prompts", "completions", "completion_ids")

RewardFunction = Callable[..., Any]


class RewardSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a reward's signature asks for. ``wants`` are all names, ``needs`` those without a default."""

    name: str
    where: str
    wants: tuple[str, ...]
    needs: tuple[str, ...]
    everything: bool
    """Has ``**kwargs``: gets every column too."""
    batched: bool
    is_async: bool

    @property
    def needs_sandbox(self) -> bool:
        return "sandbox" in self.wants


def inspect_reward(fn: RewardFunction) -> RewardSpec:
    """Read a reward's signature. Raises DeclarationError for one that cannot be called by name."""
    name = getattr(fn, "__qualname__", type(fn).__name__)
    where = place(fn)
    if inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise DeclarationError("the reward yields, and never returns", where=where, fix="return the score")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError) as error:
        raise DeclarationError(
            f"the reward's signature cannot be read: {error}", where=where, fix=TOP_LEVEL
        ) from error
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL):
            raise DeclarationError(
                f"the reward takes {p.name!r} by position",
                where=where,
                fix="name every argument: rewards are called by name",
            )
    named = [p for p in parameters if p.kind != p.VAR_KEYWORD]
    spec = RewardSpec(
        name=name,
        where=where,
        wants=tuple(p.name for p in named),
        needs=tuple(p.name for p in named if p.default is p.empty),
        everything=any(p.kind == p.VAR_KEYWORD for p in parameters),
        batched=any(p.name == "completions" for p in named),
        is_async=inspect.iscoroutinefunction(fn)
        or inspect.iscoroutinefunction(getattr(fn, "__call__", None)),  # noqa: B004
    )
    if spec.needs_sandbox and not spec.is_async:
        raise DeclarationError(
            "a reward that uses a sandbox must await it", where=where, fix=f"write `async def {name}(...)`"
        )
    return spec


def check_columns(spec: RewardSpec, columns: Iterable[str]) -> None:
    """Hold a reward's arguments against the columns that tasks have. Raises DeclarationError."""
    given = sorted(set(columns))
    known = _given_by_croze(spec)
    for name in spec.wants:
        if name in known and name in given and name != "prompt":
            raise DeclarationError(
                f"the column {name!r} has the name of an argument that croze gives",
                where=spec.where,
                fix="rename the column",
            )
    for name in spec.needs:
        if name not in known and name not in given:
            raise DeclarationError(
                f"the reward asks for {name!r}, which is no column of the tasks",
                where=spec.where,
                fix=suggest(name, [*given, *sorted(known)])
                or f"tasks have {', '.join(given) or 'no columns'}; croze gives {', '.join(sorted(known))}",
            )


def check_task(spec: RewardSpec, task: Task) -> None:
    """Hold a reward's arguments against one task: rows need not be alike. Raises TasksError."""
    known, given = _given_by_croze(spec), sorted(task.columns)
    for name in spec.needs:
        if name not in known and name not in task.columns:
            raise TasksError(
                f"task {task.id} has no column {name!r}, which the reward {spec.name} needs",
                where=f"task {task.id}",
                fix=suggest(name, given)
                or f"this task has {', '.join(given) or 'no columns'}; give every row a {name!r}, or the"
                " argument a default",
            )


def _given_by_croze(spec: RewardSpec) -> set[str]:
    return {"sandbox", *BATCHED} if spec.batched else set(RESERVED)


def arguments(spec: RewardSpec, rollout: Rollout, sandbox: Any = None) -> dict[str, Any]:
    """One call's arguments, by name."""
    own = {
        "reply": rollout.reply,
        "rollout": rollout,
        "sandbox": sandbox,
        "prompt": rollout.task.prompt,
        "task": rollout.task,
    }
    columns = rollout.task.columns
    every = {**columns, **{k: v for k, v in own.items() if k in spec.wants}}
    return every if spec.everything else _only(spec, every)


def batched_arguments(spec: RewardSpec, rollouts: Sequence[Rollout], sandbox: Any = None) -> dict[str, Any]:
    """One call's arguments as TRL gives them: lists, with chat messages where the prompt was chat."""
    columns = {name for r in rollouts for name in r.task.columns}
    every: dict[str, Any] = {name: [r.task.columns.get(name) for r in rollouts] for name in columns}
    every["prompts"] = [r.task.prompt for r in rollouts]
    every["completions"] = [
        r.reply if isinstance(r.task.prompt, str) else [{"role": "assistant", "content": r.reply}]
        for r in rollouts
    ]
    every["completion_ids"] = [[int(i) for i in r.ids_T[r.prompt_tokens :]] for r in rollouts]
    if spec.needs_sandbox:
        every["sandbox"] = sandbox
    return every if spec.everything else _only(spec, every)


def _only(spec: RewardSpec, every: dict[str, Any]) -> dict[str, Any]:
    return {name: every[name] for name in spec.wants if name in every}


def outcome_of(value: Any, name: str) -> Outcome:
    """What a reward returned, as an Outcome. Raises RewardFault for anything that is no finite number."""
    if value is None:
        return Outcome(valid=False, message=f"{name} returned None: not applicable")
    if isinstance(value, Outcome):
        return _checked(value, name)
    if isinstance(value, dict):
        if not value:
            raise _fault(name, f"returned {value!r}: parts need names")
        parts = _parts(value, name, "part")
        return Outcome(score=_number(sum(parts.values()), name, "the sum of the parts"), parts=parts)
    return Outcome(score=_number(value, name, "the score"))


def _checked(outcome: Outcome, name: str) -> Outcome:
    """An Outcome that user code made: nothing has held its fields to their types yet."""
    if not isinstance(outcome.valid, bool) or outcome.fault not in get_args(Fault):
        raise _fault(name, f"Outcome has valid={outcome.valid!r}, fault={outcome.fault!r}")
    if not isinstance(outcome.message, str) or not isinstance(outcome.turns, tuple | list):
        raise _fault(name, "Outcome has a message that is no text, or turns that are no tuple")
    return msgspec.structs.replace(
        outcome,
        score=_number(outcome.score, name, "the score"),
        parts=_parts(outcome.parts, name, "part"),
        turns=tuple(_parts(t, name, f"turn {i}, part") for i, t in enumerate(outcome.turns)),
    )


def _parts(parts: Any, name: str, what: str) -> dict[str, float]:
    if not isinstance(parts, dict) or not all(isinstance(k, str) for k in parts):
        raise _fault(name, f"returned {_short(parts)}: parts are a dict, and need names")
    return {k: _number(v, name, f"{what} {k!r}") for k, v in parts.items()}


def outcomes_of(value: Any, name: str, count: int) -> list[Outcome]:
    """What a batched reward returned, one Outcome a rollout."""
    if (
        isinstance(value, str | bytes | dict)
        or not hasattr(value, "__len__")
        or not hasattr(value, "__iter__")
    ):
        raise _fault(name, f"returned {_short(value)}, and not a list of {count} numbers")
    values = list(value)
    if len(values) != count:
        raise _fault(name, f"returned {len(values)} rewards for {count} completions")
    return [outcome_of(v, name) for v in values]


def _number(value: Any, name: str, what: str) -> float:
    if isinstance(value, str | bytes | complex) or getattr(value, "ndim", 0) != 0:
        raise _fault(name, f"{what} is {_short(value)}, which is no number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise _fault(name, f"{what} is {_short(value)}, which is no number") from None
    if not math.isfinite(number):
        raise _fault(name, f"{what} is {number}")
    return number


def _short(value: Any) -> str:
    try:
        text = f"{type(value).__name__} {value!r}"
    except Exception:  # user code
        text = type(value).__name__
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # what the same mistake gives is to read the same
    return text if len(text) <= 80 else text[:77] + "..."


def _fault(name: str, problem: str) -> RewardFault:
    return RewardFault(
        f"{name}: {problem}",
        where=f"reward {name}",
        fix="return a finite number, a dict of named finite numbers, cz.Outcome, or None",
    )

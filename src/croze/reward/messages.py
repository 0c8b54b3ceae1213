"""What the judge and its reward worker tell each other: msgpack frames, each one of these."""

from __future__ import annotations

import msgspec

from croze.config import RewardOptions, SandboxOptions
from croze.reward.locate import FunctionRef
from croze.types import Outcome, Rollout


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag="setup"):
    """First to the worker: which function, under which options."""

    reward: FunctionRef
    options: RewardOptions
    sandbox: SandboxOptions
    again: bool = False
    """This worker replaces one that has already warned of what there is to warn of."""


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """Judge these rollouts in one call: one, or a group for a batched reward."""

    id: int
    rollouts: list[Rollout]


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag="ping"):
    """Is the worker's event loop alive?"""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The function was found and can be called."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The worker cannot work: the error that its caller shall raise, by its ``kind``."""

    kind: str
    message: str
    where: str | None = None
    fix: str | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True, tag="result"):
    """One call's outcomes, in the order of its rollouts."""

    id: int
    outcomes: list[Outcome]


class Pong(msgspec.Struct, frozen=True, kw_only=True, tag="pong"):
    """The answer to a ping."""


ToWorker = Setup | Call | Ping
FromWorker = Ready | Refused | Result | Pong

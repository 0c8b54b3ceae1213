"""What to do next, decided without I/O and without a clock: events in, actions out.

``Decisions`` is the whole; ``Admission``, ``Retry``, ``Batching`` and ``Filtering`` are its parts. The live
loop feeds it what happened and carries out what it answers; a simulator can drive the same object. Events
come one at a time; a late or repeated one about an attempt is ignored. After each this identity holds,

    dispatched = trained + filtered + stale + failed + cancelled + in flight,

where every attempt counts as one rollout and those that wait for their step count as in flight.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from croze.errors import InvariantViolated
from croze.types import Fault

Final = Literal["trained", "filtered", "stale", "failed", "cancelled"]


class Key(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """An attempt: the ``attempt``-th try at member ``member`` of group ``group``, all counted from 0."""

    group: int
    member: int
    attempt: int = 0

    @property
    def rollout_id(self) -> str:
        return f"g{self.group}.{self.member}.{self.attempt}"

    @property
    def group_id(self) -> str:
        return f"g{self.group}"


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """The account of all rollouts ever dispatched."""

    dispatched: int = 0
    in_flight: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    failed: int = 0
    cancelled: int = 0

    def check(self, where: str) -> Counts:
        """Itself, when the identity holds; raises InvariantViolated with the numbers when not."""
        parts = {name: getattr(self, name) for name in self.__struct_fields__ if name != "dispatched"}
        if self.dispatched != sum(parts.values()) or min(parts.values()) < 0:
            told = " + ".join(f"{count} {name}" for name, count in parts.items())
            raise InvariantViolated(f"{self.dispatched} rollouts were dispatched, but {told}", where=where)
        return self


# Events: what happened.


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt came to its outcome. ``valid``: it has a score; else ``fault`` says whose doing that was."""

    key: Key
    valid: bool = True
    fault: Fault = "none"
    reason: str = ""

    def __post_init__(self) -> None:
        if self.valid and self.fault in ("infra", "unknown"):
            raise ValueError(f"an attempt that met a fault of {self.fault!r} cannot be valid")


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt was taken back before its outcome."""

    key: Key
    reason: str = ""


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """The step whose batch ``StepDone`` gave is trained; of it, the groups ``untrained`` (ids) had nothing to
    teach and were left out of the loss."""

    step: int
    untrained: frozenset[str] = frozenset()


Event = Ended | Cancelled | Committed


# Actions: what to do about it.


class Dispatch(msgspec.Struct, frozen=True, kw_only=True):
    """Start this attempt, for this step."""

    key: Key
    step: int


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt reached its final state; it never changes again."""

    key: Key
    state: Final
    reason: str = ""


class GroupDone(msgspec.Struct, frozen=True, kw_only=True):
    """All members of a group have ended. ``members`` are its valid ones; a ``kept`` group is trained."""

    group: int
    step: int
    kept: bool
    members: tuple[Key, ...]
    reason: str = ""


class StepDone(msgspec.Struct, frozen=True, kw_only=True):
    """All groups of a step are done; train on the kept ones (possibly none), then tell ``Committed``."""

    step: int
    kept: tuple[GroupDone, ...]


Action = Dispatch | Settled | GroupDone | StepDone


class Admission:
    """What is dispatched when: whole steps, one at a time. Group g belongs to step 1 + g // groups."""

    def __init__(self, *, groups_per_step: int, group_size: int, committed: int = 0) -> None:
        self._groups = groups_per_step
        self._size = group_size
        self._committed = committed
        self._opened = committed

    def open(self) -> tuple[Dispatch, ...]:
        """The first attempts of the next step."""
        if self._opened != self._committed:
            raise InvariantViolated(f"step {self._opened} is not committed yet", where="admission")
        self._opened += 1
        first = (self._opened - 1) * self._groups
        return tuple(
            Dispatch(key=Key(group=group, member=member), step=self._opened)
            for group in range(first, first + self._groups)
            for member in range(self._size)
        )

    def commit(self, step: int) -> None:
        if step != self._opened or step == self._committed:
            raise InvariantViolated(
                f"step {step} is committed while step {self._opened} is open", where="admission"
            )
        self._committed = step


class Retry:
    """Whether a failed attempt is tried again: infra and unknown faults are, up to ``retries`` times."""

    def __init__(self, retries: int) -> None:
        self._retries = retries

    def again(self, ended: Ended) -> Key | None:
        """The next attempt's key, or None when there is to be none."""
        if ended.valid or ended.fault not in ("infra", "unknown") or ended.key.attempt >= self._retries:
            return None
        return msgspec.structs.replace(ended.key, attempt=ended.key.attempt + 1)


class Filtering:
    """Which groups are worth training: those with two valid members or more (one, in groups of one)."""

    def __init__(self, group_size: int) -> None:
        self._least = min(2, group_size)

    def refusal(self, valid: int) -> str:
        """Why a group with this many valid members is dropped; empty when it is kept."""
        return "" if valid >= self._least else f"{valid} valid members, {self._least} needed"


class Batching:
    """Which members, groups and steps are complete. A member is, when its last attempt has ended."""

    def __init__(self, *, groups_per_step: int, group_size: int) -> None:
        self._groups = groups_per_step
        self._size = group_size
        self._members: dict[int, dict[int, Key | None]] = {}
        self._done: dict[int, list[GroupDone]] = {}

    def member(self, key: Key, valid: bool) -> tuple[Key, ...] | None:
        """Note a member's end; the valid members, by number, once the group is complete."""
        members = self._members.setdefault(key.group, {})
        members[key.member] = key if valid else None
        if len(members) < self._size:
            return None
        del self._members[key.group]
        return tuple(sorted(k for k in members.values() if k is not None))

    def group(self, done: GroupDone) -> StepDone | None:
        """Note a complete group; the step once all its groups are."""
        groups = self._done.setdefault(done.step, [])
        groups.append(done)
        if len(groups) < self._groups:
            return None
        kept = sorted((g for g in groups if g.kept), key=lambda g: g.group)
        return StepDone(step=done.step, kept=tuple(kept))

    def take(self, step: int) -> list[GroupDone]:
        """The groups of a complete step, which is forgotten."""
        if len(self._done.get(step, ())) != self._groups:
            raise InvariantViolated(f"step {step} is committed but not complete", where="batching")
        return self._done.pop(step)

    def clear(self) -> None:
        """Forget what is not committed."""
        self._members.clear()
        self._done.clear()


class Account:
    """Which attempts are running or waiting, and how many ended how."""

    def __init__(self) -> None:
        self._dispatched = 0
        self._ended: dict[Final, int] = dict.fromkeys(
            ("trained", "filtered", "stale", "failed", "cancelled"), 0
        )
        self.running: dict[Key, int] = {}
        self.waiting: dict[Key, int] = {}

    def dispatch(self, dispatch: Dispatch) -> None:
        self._dispatched += 1
        self.running[dispatch.key] = dispatch.step

    def finish(self, key: Key) -> None:
        self.waiting[key] = self.running.pop(key)

    def settle(self, key: Key, state: Final, reason: str = "") -> Settled:
        (self.running if key in self.running else self.waiting).pop(key)
        self._ended[state] += 1
        return Settled(key=key, state=state, reason=reason)

    def counts(self) -> Counts:
        return Counts(
            dispatched=self._dispatched, in_flight=len(self.running) + len(self.waiting), **self._ended
        )


class Decisions:
    """The synchronous loop's mind: ``open`` a step, tell it every event with ``on``, do what it answers."""

    def __init__(self, *, groups_per_step: int, group_size: int, retries: int, committed: int = 0) -> None:
        self._admission = Admission(
            groups_per_step=groups_per_step, group_size=group_size, committed=committed
        )
        self._retry = Retry(retries)
        self._batching = Batching(groups_per_step=groups_per_step, group_size=group_size)
        self._filtering = Filtering(group_size)
        self._account = Account()

    def open(self) -> tuple[Dispatch, ...]:
        """Start the next step. Raises InvariantViolated while the last one is not committed."""
        dispatches = self._admission.open()
        for dispatch in dispatches:
            self._account.dispatch(dispatch)
        return dispatches

    def on(self, event: Event) -> tuple[Action, ...]:
        """What follows from ``event``; nothing, when its attempt has ended before."""
        if isinstance(event, Committed):
            return self._commit(event)
        step = self._account.running.get(event.key)
        if step is None:
            return ()
        if isinstance(event, Cancelled):
            settled = self._account.settle(event.key, "cancelled", event.reason)
            return (settled, *self._member(event.key, step, valid=False))
        if event.valid:
            self._account.finish(event.key)
            return self._member(event.key, step, valid=True)
        return self._invalid(event, step)

    def cancel_all(self, reason: str) -> tuple[Settled, ...]:
        """End everything in flight, waiting rollouts too: the run stops and this step will not be trained."""
        self._batching.clear()
        in_flight = [*self._account.running, *self._account.waiting]
        return tuple(self._account.settle(key, "cancelled", reason) for key in in_flight)

    @property
    def running(self) -> tuple[Key, ...]:
        """Attempts dispatched and not ended, in order of dispatch."""
        return tuple(self._account.running)

    def counts(self) -> Counts:
        """The account now. Raises InvariantViolated when the identity does not hold."""
        return self._account.counts().check("decisions")

    def _invalid(self, event: Ended, step: int) -> tuple[Action, ...]:
        if event.fault in ("none", "policy"):
            settled = self._account.settle(event.key, "filtered", event.reason or "no score")
            return (settled, *self._member(event.key, step, valid=False))
        settled = self._account.settle(event.key, "failed", event.reason or f"{event.fault} fault")
        again = self._retry.again(event)
        if again is None:
            return (settled, *self._member(event.key, step, valid=False))
        dispatch = Dispatch(key=again, step=step)
        self._account.dispatch(dispatch)
        return (settled, dispatch)

    def _member(self, key: Key, step: int, *, valid: bool) -> tuple[Action, ...]:
        members = self._batching.member(key, valid)
        if members is None:
            return ()
        refusal = self._filtering.refusal(len(members))
        done = GroupDone(group=key.group, step=step, kept=not refusal, members=members, reason=refusal)
        complete = self._batching.group(done)
        return (done,) if complete is None else (done, complete)

    def _commit(self, event: Committed) -> tuple[Action, ...]:
        groups = self._batching.take(event.step)
        self._admission.commit(event.step)
        settled = []
        for group in sorted(groups, key=lambda g: g.group):
            for key in group.members:
                if group.kept and key.group_id not in event.untrained:
                    settled.append(self._account.settle(key, "trained"))
                else:
                    reason = group.reason or "no advantage"
                    settled.append(self._account.settle(key, "filtered", reason))
        return tuple(settled)

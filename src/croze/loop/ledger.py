"""The ledger: what became of every rollout, which steps are committed. Headers only, never tokens or text.

``SqliteLedger`` keeps it in one file (WAL). Every call is one transaction, well under a millisecond, so that
one asyncio thread can make them in line; only those that end a step or a run wait for the disk.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from croze.errors import InfraFault, InvariantViolated
from croze.loop.decisions import Counts, Final, Key
from croze.types import RolloutState

FORMAT = 1
"""Kept in SQLite's user_version; a ledger of another format is refused."""


class Dispatched(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that starts: attempt ``key``, for ``step``, on the task with this id."""

    key: Key
    step: int
    task_id: str


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout that ended: waiting for its step ("finished"), or in a final state that no step gives it.

    Lengths are tokens; ``score`` is None where the outcome is not valid; ``weights_id`` made its last token.
    """

    key: Key
    state: Literal["finished", "filtered", "stale", "failed", "cancelled"] = "finished"
    reason: str = ""
    prompt_tokens: int = 0
    generated_tokens: int = 0
    score: float | None = None
    weights_id: str = ""


class StepCommit(msgspec.Struct, frozen=True, kw_only=True):
    """A committed step: the weights it made, the mean score over valid rollouts (None without any) and
    whatever else the loop wants to find again (plain data)."""

    step: int
    weights_id: str
    reward_mean: float | None = None
    info: dict[str, Any] = msgspec.field(default_factory=dict)


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as the ledger has it. ``settled_step`` is the step whose commit settled it, if one did."""

    rollout_id: str
    group_id: str
    member: int
    attempt: int
    step: int
    task_id: str
    state: RolloutState
    reason: str
    prompt_tokens: int
    generated_tokens: int
    score: float | None
    weights_id: str
    settled_step: int | None


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """A resume: when (Unix seconds), the step it went on from, and what of later steps was taken back."""

    at: float
    from_step: int
    steps: int
    rollouts: int


class Ledger(Protocol):
    """What the loop needs of a ledger. Every call is atomic, and repeating one changes nothing."""

    def dispatch(self, rows: Iterable[Dispatched]) -> None:
        """Note rollouts as running; those already there stay as they are."""
        ...

    def finish(self, rows: Iterable[Finished]) -> None:
        """Note how running rollouts ended; those already ended stay as they are."""
        ...

    def settle(self, commit: StepCommit, states: Mapping[str, Final]) -> None:
        """Commit a step and, in the same transaction, give rollouts their final states. Durable on return.

        Raises InvariantViolated, and changes nothing, when a rollout is unknown or already final, when a
        member would be trained twice, or when the step is already committed differently.
        """
        ...

    def cancel_in_flight(self, reason: str) -> int:
        """Cancel all that is running or finished; how many."""
        ...

    def counts(self) -> Counts:
        """The account of all rollouts. Raises InvariantViolated when it does not add up."""
        ...

    def steps(self) -> list[StepCommit]:
        """Committed steps, oldest first."""
        ...

    def rollouts(self, step: int | None = None) -> list[Entry]:
        """Rollouts in order of dispatch, of one step or of all."""
        ...

    def cut(self, step: int, at: float) -> Resumed:
        """Take back all that came after ``step``, and what is in flight: the run goes on from there. Durable on
        return; it is noted, with the Unix time ``at``.

        Raises InvariantViolated when ``step`` (above 0) is not committed.
        """
        ...

    def resumes(self) -> list[Resumed]:
        """Every resume, oldest first."""
        ...

    def close(self) -> None: ...


_SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
    n INTEGER PRIMARY KEY,
    rollout_id TEXT NOT NULL UNIQUE,
    group_id TEXT NOT NULL,
    member INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    step INTEGER NOT NULL,
    task_id TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'running' CHECK (state IN
        ('running', 'finished', 'trained', 'filtered', 'stale', 'failed', 'cancelled')),
    reason TEXT NOT NULL DEFAULT '',
    prompt_tokens INTEGER NOT NULL DEFAULT 0,
    generated_tokens INTEGER NOT NULL DEFAULT 0,
    score REAL,
    weights_id TEXT NOT NULL DEFAULT '',
    settled_step INTEGER REFERENCES steps (step),
    UNIQUE (group_id, member, attempt)
);
CREATE INDEX IF NOT EXISTS rollouts_by_step ON rollouts (step);
CREATE UNIQUE INDEX IF NOT EXISTS trained_once ON rollouts (group_id, member) WHERE state = 'trained';
CREATE TRIGGER IF NOT EXISTS final_is_final BEFORE UPDATE OF state ON rollouts
    WHEN OLD.state NOT IN ('running', 'finished')
    BEGIN SELECT RAISE (ABORT, 'a final state never changes'); END;
CREATE TABLE IF NOT EXISTS steps (
    step INTEGER PRIMARY KEY,
    weights_id TEXT NOT NULL,
    reward_mean REAL,
    info TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS resumes (
    at REAL NOT NULL,
    from_step INTEGER NOT NULL,
    steps INTEGER NOT NULL,
    rollouts INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS account (
    state TEXT PRIMARY KEY,
    count INTEGER NOT NULL
) WITHOUT ROWID;
INSERT OR IGNORE INTO account VALUES ('dispatched', 0), ('running', 0), ('finished', 0), ('trained', 0),
    ('filtered', 0), ('stale', 0), ('failed', 0), ('cancelled', 0);
CREATE TRIGGER IF NOT EXISTS count_dispatch AFTER INSERT ON rollouts BEGIN
    UPDATE account SET count = count + 1 WHERE state IN ('dispatched', NEW.state);
END;
CREATE TRIGGER IF NOT EXISTS count_change AFTER UPDATE OF state ON rollouts WHEN OLD.state <> NEW.state BEGIN
    UPDATE account SET count = count - 1 WHERE state = OLD.state;
    UPDATE account SET count = count + 1 WHERE state = NEW.state;
END;
CREATE TRIGGER IF NOT EXISTS count_removal AFTER DELETE ON rollouts BEGIN
    UPDATE account SET count = count - 1 WHERE state IN ('dispatched', OLD.state);
END;
"""

_FINISH = """
UPDATE rollouts SET state = ?, reason = ?, prompt_tokens = ?, generated_tokens = ?, score = ?, weights_id = ?
WHERE rollout_id = ? AND state = 'running'
"""


class SqliteLedger:
    """The ledger in one SQLite file. Used from the thread that made it; other processes may read the file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            raise _unusable(error, "opened", path) from error
        try:
            self._open()
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise _unusable(error, "opened", path) from error
        except InfraFault:
            self._db.close()
            raise

    def _open(self) -> None:
        for pragma in (
            "journal_mode = WAL",
            "synchronous = NORMAL",
            "foreign_keys = ON",
            "busy_timeout = 5000",
        ):
            self._db.execute(f"PRAGMA {pragma}")
        (found,) = self._db.execute("PRAGMA user_version").fetchone()
        if found not in (0, FORMAT):
            raise InfraFault(
                f"the ledger has format {found}, this croze reads {FORMAT}",
                where=str(self._path),
                fix="use the croze that wrote it, or another run.dir",
            )
        self._db.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version = {FORMAT}; COMMIT;")

    def dispatch(self, rows: Iterable[Dispatched]) -> None:
        values = [
            (r.key.rollout_id, r.key.group_id, r.key.member, r.key.attempt, r.step, r.task_id) for r in rows
        ]
        with self._transaction():
            self._db.executemany(
                "INSERT INTO rollouts (rollout_id, group_id, member, attempt, step, task_id)"
                " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
                values,
            )

    def finish(self, rows: Iterable[Finished]) -> None:
        values = [
            (r.state, r.reason, r.prompt_tokens, r.generated_tokens, r.score, r.weights_id, r.key.rollout_id)
            for r in rows
        ]
        with self._transaction():
            self._db.executemany(_FINISH, values)

    def settle(self, commit: StepCommit, states: Mapping[str, Final]) -> None:
        before = self._step(commit.step)
        if before is not None:
            self._same(before, commit, states)
            return
        values = [(state, commit.step, rollout_id) for rollout_id, state in states.items()]
        info = msgspec.json.encode(commit.info).decode()
        with self._transaction(durable=True):
            self._db.execute(
                "INSERT INTO steps VALUES (?, ?, ?, ?)",
                (commit.step, commit.weights_id, commit.reward_mean, info),
            )
            done = self._db.executemany(
                "UPDATE rollouts SET state = ?, settled_step = ?"
                " WHERE rollout_id = ? AND state IN ('running', 'finished')",
                values,
            )
            if done.rowcount != len(values) and values:
                raise InvariantViolated(
                    f"step {commit.step} settles {len(values)} rollouts, {done.rowcount} of them in flight",
                    where=str(self._path),
                )

    def cancel_in_flight(self, reason: str) -> int:
        with self._transaction(durable=True):
            done = self._db.execute(
                "UPDATE rollouts SET state = 'cancelled', reason = ? WHERE state IN ('running', 'finished')",
                (reason,),
            )
        return done.rowcount

    def counts(self) -> Counts:
        count: dict[str, int] = dict(self._read("SELECT state, count FROM account"))
        in_flight = count.pop("running") + count.pop("finished")
        return Counts(in_flight=in_flight, **count).check(str(self._path))

    def steps(self) -> list[StepCommit]:
        found = self._read("SELECT step, weights_id, reward_mean, info FROM steps ORDER BY step")
        return [_commit(row) for row in found]

    def rollouts(self, step: int | None = None) -> list[Entry]:
        names = ", ".join(Entry.__struct_fields__)
        found = self._read(f"SELECT {names} FROM rollouts WHERE step = coalesce(?, step) ORDER BY n", step)
        return [Entry(**dict(zip(Entry.__struct_fields__, row, strict=True))) for row in found]

    def cut(self, step: int, at: float) -> Resumed:
        if step > 0 and self._step(step) is None:
            raise InvariantViolated(
                f"the run cannot go on from step {step}: it is not committed", where=str(self._path)
            )
        with self._transaction(durable=True):
            rollouts = self._db.execute(
                "DELETE FROM rollouts WHERE step > ? OR settled_step > ? OR state IN ('running', 'finished')",
                (step, step),
            )
            steps = self._db.execute("DELETE FROM steps WHERE step > ?", (step,))
            resumed = Resumed(at=at, from_step=step, steps=steps.rowcount, rollouts=rollouts.rowcount)
            self._db.execute("INSERT INTO resumes VALUES (?, ?, ?, ?)", msgspec.structs.astuple(resumed))
        return resumed

    def resumes(self) -> list[Resumed]:
        found = self._read("SELECT at, from_step, steps, rollouts FROM resumes ORDER BY at")
        return [Resumed(**dict(zip(Resumed.__struct_fields__, row, strict=True))) for row in found]

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[None]:
        """All or nothing. ``durable``: on the disk before it returns, not merely safe from our own death."""
        self._db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._db.execute("COMMIT")
        except sqlite3.IntegrityError as error:
            raise InvariantViolated(f"the ledger refuses: {error}", where=str(self._path)) from error
        except sqlite3.Error as error:
            raise _unusable(error, "written", self._path) from error
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _read(self, query: str, *values: Any) -> list[Any]:
        try:
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise _unusable(error, "read", self._path) from error

    def _step(self, step: int) -> StepCommit | None:
        found = self._read("SELECT step, weights_id, reward_mean, info FROM steps WHERE step = ?", step)
        return _commit(found[0]) if found else None

    def _same(self, before: StepCommit, commit: StepCommit, states: Mapping[str, Final]) -> None:
        settled = dict(
            self._read("SELECT rollout_id, state FROM rollouts WHERE settled_step = ?", commit.step)
        )
        if before.weights_id != commit.weights_id or settled != dict(states):
            raise InvariantViolated(
                f"step {commit.step} is already committed with weights {before.weights_id} and"
                f" {len(settled)} rollouts, now {commit.weights_id} and {len(states)} are given",
                where=str(self._path),
            )


def _unusable(error: sqlite3.Error, what: str, path: Path) -> InfraFault:
    """A fault that says what to do; sqlite's words alone do not."""
    told = str(error)
    if "full" in told:
        fix = f"free space on the disk, then croze resume {path.parent}"
    elif "malformed" in told or "not a database" in told:
        fix = (
            "put back ledger.sqlite, and ledger.sqlite-wal beside it, from a copy; without them the run cannot go on,"
            f" and its models under {path.parent / 'checkpoints'} can be used as they are"
        )
    elif "locked" in told or "busy" in told:
        fix = "end the program that holds it open"
    else:
        fix = "see that it is a file which this user may write, on a local disk"
    return InfraFault(f"the ledger cannot be {what}: {error}", where=str(path), fix=fix)


def _commit(row: tuple[int, str, float | None, str]) -> StepCommit:
    step, weights_id, reward_mean, info = row
    return StepCommit(
        step=step, weights_id=weights_id, reward_mean=reward_mean, info=msgspec.json.decode(info)
    )

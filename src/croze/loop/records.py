"""What a run folder has on record of its steps, read back into the loop's own types. No torch here.

Nothing in the folder is written, claimed or executed: the run may be going on, and its task file need not be there.
"""

from __future__ import annotations

import dataclasses
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from croze.errors import CheckFailed, InfraFault, UsageError
from croze.loop.decisions import Filtering
from croze.loop.folder import read_config
from croze.loop.ledger import Entry, SqliteLedger, StepCommit
from croze.loop.load import apply_keys
from croze.run import Run
from croze.trace.metrics import read_jsonl
from croze.trace.tables import table_batches
from croze.types import Group, Outcome, Rollout, Task, Turn, WeightsId, WeightsSpan

TRIES = 20
"""Copies of a ledger begun while its run writes it, before it is given up."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is not what it should be. ``where``: the figure, rollout or step; ``note``: what it says."""

    what: str
    where: str
    recorded: Any
    replayed: Any
    note: str = ""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A committed step as the run wrote it down.

    ``event``: its line in metrics.jsonl. ``groups`` were trained on; ``rollouts``: every attempt, in order of
    arrival. ``advantages`` and ``gaps`` by rollout id, None for what was not trained or measured. ``texts``: of
    each token, where that was kept and asked for. ``odd``: where trace and ledger tell different things.
    """

    step: int
    weights_id: str
    event: dict[str, Any]
    groups: tuple[Group, ...]
    rollouts: tuple[Rollout, ...]
    advantages: dict[str, float | None]
    gaps: dict[str, float | None]
    texts: dict[str, list[str]]
    entries: dict[str, Entry]
    odd: tuple[Difference, ...]


class Records:
    """The records of a run folder, as they are when this is made. Raises UsageError when the folder is no run."""

    def __init__(self, path: Path) -> None:
        self.path, self.config = path, read_config(path)
        self.run = _run(path, self.config)
        self.events = _events(path / "metrics.jsonl")
        self.commits: dict[int, StepCommit] = {}
        self.entries: dict[int, list[Entry]] = {}
        if (path / "ledger.sqlite").exists():
            self._read_ledger(path / "ledger.sqlite")

    @property
    def last(self) -> int:
        """The newest step that is committed and told; 0 before the first."""
        return max(self.events.keys() & self.commits.keys(), default=0)

    def check(self, step: int) -> None:
        """Raise UsageError unless ``step`` has been committed and its tokens were kept."""
        where, last = str(self.path), self.last
        if not self.run.trace.tokens:
            raise UsageError(
                "the run kept no tokens, so no step can be made again",
                where=where,
                fix="train with trace.tokens=true",
            )
        if step < 1 or step > self.run.steps:
            raise UsageError(
                f"there is no step {step} in a run of {self.run.steps} steps", where=where, fix=_have(last)
            )
        if step > last:
            raise UsageError(f"step {step} is not committed yet", where=where, fix=_have(last))

    def steps(self, first: int, last: int) -> Iterator[Recorded]:
        """Steps ``first`` to ``last``, the last with its tokens' texts. Raises CheckFailed for one not whole."""
        rows: dict[int, dict[str, dict[str, Any]]] = {step: {} for step in range(first, last + 1)}
        for batch in table_batches(self.path / "trace" / "rollouts", "rollouts"):
            for row in batch.to_pylist() if _any_of(batch, rows) else ():
                if row["step"] in rows:
                    rows[row["step"]][row["rollout_id"]] = row
        wanted = {name: step == last for step, named in rows.items() for name in named}
        tokens = _read_tokens(self.path / "trace" / "tokens", wanted)
        for step, named in rows.items():
            yield self._recorded(step, named, tokens)

    def _recorded(
        self, step: int, rows: dict[str, dict[str, Any]], tokens: Mapping[str, _Tokens]
    ) -> Recorded:
        entries = {e.rollout_id: e for e in self.entries.get(step, ())}
        lost = sorted((entries.keys() - (rows.keys() & tokens.keys())) | (rows.keys() - entries.keys()))
        if step not in self.commits or step not in self.events or lost or not entries:
            told = f", among them {lost[0]}" if lost else ""
            raise CheckFailed(
                f"step {step} is not whole on record: {len(lost)} of {len(entries)} rollouts{told} are missing "
                f"from the trace or the ledger",
                where=str(self.path),
                fix="a later step may be replayed from a checkpoint in between",
            )
        odd = [d for name, row in rows.items() for d in _odd(row, entries[name], tokens[name])]
        rollouts = tuple(_rollout(row, entries[name], tokens[name]) for name, row in rows.items())
        return Recorded(
            step=step,
            weights_id=self.commits[step].weights_id,
            event=self.events[step],
            groups=_groups(rollouts, Filtering(self.run.group_size)),
            rollouts=rollouts,
            advantages={name: row["advantage"] for name, row in rows.items()},
            gaps={name: row["max_gap"] for name, row in rows.items()},
            texts={name: text for name in rows if (text := tokens[name].text) is not None},
            entries=entries,
            odd=tuple(odd),
        )

    def _read_ledger(self, path: Path) -> None:
        try:
            with _copied(path) as ledger:
                self.commits = {commit.step: commit for commit in ledger.steps()}
                for entry in ledger.rollouts():
                    self.entries.setdefault(entry.step, []).append(entry)
        except (sqlite3.Error, msgspec.MsgspecError, InfraFault) as error:
            told = error.message if isinstance(error, InfraFault) else f"the ledger cannot be read: {error}"
            raise InfraFault(told, where=str(path), fix="restore the file from a copy") from error


class _Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``tokens``."""

    ids_T: np.ndarray
    logprobs_T: np.ndarray
    mask_T: np.ndarray
    turns: tuple[Turn, ...]
    weights: tuple[WeightsSpan, ...]
    text: list[str] | None


def _run(path: Path, config: Mapping[str, Any]) -> Run:
    """The run's options as they were. Its tasks and reward are not there: nothing of the user's is executed."""
    run = apply_keys(Run(model="recorded", tasks=(), reward=_no_reward), dict(config["keys"]))
    return dataclasses.replace(run, dir=str(path), file=config["file"])


def _no_reward() -> float:
    raise AssertionError("a replay judges nothing")


def _events(path: Path) -> dict[int, dict[str, Any]]:
    try:
        return {event["step"]: event for event in read_jsonl(path) if event.get("event") == "step"}
    except (msgspec.MsgspecError, KeyError, AttributeError) as error:
        raise CheckFailed(f"metrics.jsonl has a line that no run wrote: {error}", where=str(path)) from error


@contextmanager
def _copied(path: Path) -> Iterator[SqliteLedger]:
    """A snapshot of a ledger: reading SQLite's files in place would write beside them.

    What is appended to the log meanwhile is ignored by SQLite; only the database itself must not have changed.
    """
    log = path.with_name(f"{path.name}-wal")
    with tempfile.TemporaryDirectory(prefix="croze-ledger-") as scratch:
        copy = Path(scratch) / path.name
        for _ in range(TRIES):
            before = path.stat()
            shutil.copyfile(path, copy)
            if log.exists():
                shutil.copyfile(log, copy.with_name(log.name))
            after = path.stat()
            if (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size):
                break
        else:
            raise InfraFault("the ledger changes too fast to be read", where=str(path))
        ledger = SqliteLedger(copy)
        try:
            yield ledger
        finally:
            ledger.close()


def _any_of(batch: Any, steps: Mapping[int, Any]) -> bool:
    return any(step in steps for step in batch.column("step").unique().to_pylist())


def _read_tokens(folder: Path, wanted: Mapping[str, bool]) -> dict[str, _Tokens]:
    """The token records of ``wanted`` rollouts; with their texts, where it says so."""
    found: dict[str, _Tokens] = {}
    for batch in table_batches(folder, "tokens"):
        for at, name in enumerate(batch.column("rollout_id").to_pylist()):
            if name in wanted:
                row = {column: batch.column(column)[at] for column in batch.schema.names}
                found[name] = _Tokens(
                    ids_T=_array(row["token_id"], np.int32),
                    logprobs_T=_array(row["logprob"], np.float32),
                    mask_T=_array(row["mask"], bool),
                    turns=tuple(msgspec.convert(row["producers"].as_py(), list[Turn])),
                    weights=tuple(msgspec.convert(row["weights"].as_py(), list[WeightsSpan])),
                    text=row["text"].as_py() if wanted[name] else None,
                )
    return found


def _array(scalar: Any, dtype: Any) -> np.ndarray:
    """A list's values; null becomes nan."""
    return np.array(scalar.values.to_numpy(zero_copy_only=False), dtype)


def _rollout(row: Mapping[str, Any], entry: Entry, tokens: _Tokens) -> Rollout:
    score = None if entry.score is None else row["score"]
    outcome = Outcome(
        score=0.0 if score is None else score,
        valid=score is not None,
        fault="none" if score is not None and row["fault"] in ("infra", "unknown") else row["fault"],
        message=row["message"],
    )
    return Rollout(
        id=row["rollout_id"],
        group_id=row["group_id"],
        member=row["member"],
        attempt=row["attempt"],
        task=Task(id=row["task_id"], prompt=row["prompt"]),
        step=row["step"],
        prompt_tokens=row["prompt_tokens"],
        ids_T=tokens.ids_T,
        logprobs_T=tokens.logprobs_T,
        mask_T=tokens.mask_T,
        turns=tokens.turns,
        weights=tokens.weights,
        finish=row["finish"],
        reply=row["reply"],
        outcome=outcome,
    )


def _odd(row: Mapping[str, Any], entry: Entry, tokens: _Tokens) -> Iterator[Difference]:
    """Where the trace's rows of a rollout and the ledger's disagree."""
    served = tokens.weights[-1].weights_id if tokens.weights else WeightsId("")
    told = {
        "score": (row["score"], entry.score),
        "validity": (row["valid"], entry.score is not None),
        "prompt_tokens": (row["prompt_tokens"], entry.prompt_tokens),
        "generated_tokens": (int(tokens.mask_T.sum()), entry.generated_tokens),
        "weights_id": (served, entry.weights_id),
        "group": (row["group_id"], entry.group_id),
    }
    for what, (traced, kept) in told.items():
        if traced != kept:
            note = "the ledger has another: the record was changed"
            yield Difference(what=what, where=entry.rollout_id, recorded=traced, replayed=kept, note=note)


def _groups(rollouts: Sequence[Rollout], filtering: Filtering) -> tuple[Group, ...]:
    """The groups that the loop kept: of each member its last attempt, of each group its valid members."""
    members: dict[str, dict[int, Rollout]] = {}
    for rollout in sorted(rollouts, key=lambda r: r.attempt):
        members.setdefault(rollout.group_id, {})[rollout.member] = rollout
    groups = []
    for name, latest in members.items():
        valid = tuple(r for _, r in sorted(latest.items()) if r.outcome is not None and r.outcome.valid)
        if valid and not filtering.refusal(len(valid)):
            groups.append(Group(id=name, task=valid[0].task, step=valid[0].step, rollouts=valid))
    return tuple(groups)


def _have(last: int) -> str:
    return f"steps 1 to {last} are on record" if last else "wait for its first step"

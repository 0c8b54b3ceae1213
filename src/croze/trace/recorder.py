"""Writing a trace: spans with what enabled them and the work they did, rollouts, and every token."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack

import msgspec
import numpy as np

from croze.clock import Clock, RealClock
from croze.trace.concurrency import Interval, mean_concurrency
from croze.trace.tables import TABLES, TableWriter
from croze.types import Rollout

EnablerType = Literal["data", "resource", "gate", "version"]
"""Why a span could start when it did: its input came, a slot came free, a gate opened, new weights came."""

_INCARNATION_BITS = 40


class RolloutRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the table ``rollouts``; an attempt that died before it had tokens leaves most of it empty.

    Times are the clock's seconds: ``t_start`` when the engine had room for it, ``t_end`` at its last token.
    ``score`` is None unless valid; ``parts`` are those of the score, as JSON; ``turn_parts`` one dict per turn
    where the reward gave them. ``prompt`` is text, or chat messages as JSON. ``max_gap`` is the largest
    |trainer's - sampler's| log-prob (nats) over its trained tokens, measured before the step's first update:
    None for what was not computed then. ``advantage`` is None for what was not trained.
    """

    rollout_id: str
    group_id: str
    member: int
    attempt: int
    step: int
    task_id: str
    prompt: str
    reply: str | None = None
    score: float | None = None
    valid: bool = False
    fault: str = "none"
    message: str = ""
    parts: str = "{}"
    turn_parts: tuple[dict[str, float], ...] = ()
    finish: str | None = None
    turns: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    t_start: float | None = None
    t_end: float | None = None
    weights_id_first: str | None = None
    weights_id_last: str | None = None
    max_gap: float | None = None
    advantage: float | None = None

    @classmethod
    def of(
        cls, rollout: Rollout, *, advantage: float | None = None, max_gap: float | None = None
    ) -> RolloutRow:
        """What a rollout's row says."""
        outcome, prompt, spans = rollout.outcome, rollout.task.prompt, rollout.weights
        return cls(
            rollout_id=rollout.id,
            group_id=rollout.group_id,
            member=rollout.member,
            attempt=rollout.attempt,
            step=rollout.step,
            task_id=rollout.task.id,
            prompt=prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode(),
            reply=rollout.reply,
            score=outcome.score if outcome is not None and outcome.valid else None,
            valid=outcome is not None and outcome.valid,
            fault=outcome.fault if outcome is not None else "none",
            message=outcome.message if outcome is not None else "",
            parts=msgspec.json.encode(outcome.parts if outcome is not None else {}).decode(),
            turn_parts=outcome.turns if outcome is not None else (),
            finish=rollout.finish,
            turns=sum(turn.producer == "model" for turn in rollout.turns),
            prompt_tokens=rollout.prompt_tokens,
            generated_tokens=rollout.generated,
            t_start=rollout.t_start,
            t_end=rollout.t_end,
            weights_id_first=spans[0].weights_id if spans else None,
            weights_id_last=spans[-1].weights_id if spans else None,
            max_gap=max_gap,
            advantage=advantage,
        )


class Span(msgspec.Struct, kw_only=True):
    """A piece of work of a stave; the fields are the columns of ``spans`` (times in the clock's seconds).

    ``enabler_span_id`` is the span whose end let this one start; ``t_request`` is when it could have started,
    had nothing been in its way: what it waited for a slot or for room is t_start - t_request. ``concurrency``
    is the mean number of pieces, itself included, that shared the stave from ``t_start`` to ``t_end``.
    ``rollout_id`` is the rollout worked on, or the first of ``rollouts``. Work: ``tokens`` sampled (decode) or
    computed (train); ``bytes`` of weights published (sync). ``ok`` is False where it failed or was broken off.
    """

    span_id: int
    stave: str
    role: str = "controller"
    t_request: float | None = None
    t_start: float = 0.0
    t_end: float = 0.0
    enabler_span_id: int | None = None
    enabler_type: EnablerType | None = None
    step: int | None = None
    rollout_id: str | None = None
    tokens: int = 0
    bytes: int = 0
    rollouts: int = 0
    concurrency: float | None = None
    ok: bool = True

    def work(
        self, *, tokens: int = 0, bytes: int = 0, rollouts: int = 0, concurrency: float | None = None
    ) -> None:
        """Add work done."""
        self.tokens += tokens
        self.bytes += bytes
        self.rollouts += rollouts
        if concurrency is not None:
            self.concurrency = concurrency


class Begun(TypedDict, total=False):
    """What is known of a piece of work when it starts. ``requested``: the clock's seconds when it could have started,
    by default when its enabler ended."""

    enabler: Span | int | None
    enabler_type: EnablerType | None
    step: int | None
    rollout_id: str | None
    role: str
    requested: float | None


class Recorder:
    """The trace of one run, appended under ``folder``; rows reach its files at ``flush`` (once a step).

    Span ids are unique over all recorders that ever wrote to the folder. Used from one thread. Where nothing can be
    written any more ``flush`` raises InfraFault, and the run ends and can be resumed: a trace is whole or cut.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tokens: bool = True,
        spell: Callable[[int], str] | None = None,
        clock: Clock | None = None,
        wall: float | None = None,
    ) -> None:
        """``spell`` gives the text of one token id, for rollouts that come without theirs.
        ``wall``: the Unix time now (default: the machine's), where the clock's seconds are anchored."""
        self._clock = clock or RealClock()
        self._offset = (time.time() if wall is None else wall) - self._clock.now()
        self._keep_tokens = tokens
        self._spell = None if spell is None else functools.cache(spell)
        metadata = {"croze.format": "1", "croze.wall_minus_clock": repr(self._offset)}
        self._writers: dict[str, TableWriter] = {}
        try:
            for table in TABLES:
                self._writers[table] = TableWriter(folder / table, table, metadata)
        except BaseException:
            self._close_files()
            raise
        self._next_id = self._writers["spans"].number << _INCARNATION_BITS
        self._spans: list[Span] = []
        self._open: dict[int, Span] = {}
        self._flushed: list[Span] = []
        self._rollouts: list[RolloutRow] = []
        self._tokens: list[tuple[Rollout, Sequence[str] | None]] = []

    @contextmanager
    def span(self, stave: str, **how: Unpack[Begun]) -> Iterator[Span]:
        """Time a piece of work of a stave (decode, tool, sandbox, reward, train, sync, save, eval).

        Call ``work`` on what it gives. An exception passes through and is noted as not ok.
        """
        span = self.begin(stave, **how)
        done = False
        try:
            yield span
            done = True
        finally:
            self.end(span, ok=span.ok and done)

    def begin(self, stave: str, **how: Unpack[Begun]) -> Span:
        """A piece of work starts now; give what this returns to ``end``."""
        now, enabler = self._clock.now(), how.get("enabler")
        requested = how.get("requested")
        if requested is None:
            requested = now
            if isinstance(enabler, Span) and enabler.span_id not in self._open:
                requested = enabler.t_end
        span = Span(
            span_id=self._new_id(),
            stave=stave,
            role=how.get("role", "controller"),
            t_request=requested,
            t_start=now,
            enabler_span_id=_span_id(enabler),
            enabler_type=how.get("enabler_type"),
            step=how.get("step"),
            rollout_id=how.get("rollout_id"),
        )
        self._open[span.span_id] = span
        return span

    def end(self, span: Span, *, ok: bool = True) -> None:
        """What ``begin`` gave ends now."""
        del self._open[span.span_id]
        span.t_end, span.ok = self._clock.now(), ok
        self._spans.append(span)

    def rollout(
        self,
        rollout: Rollout,
        *,
        pieces: Sequence[str] | None = None,
        advantage: float | None = None,
        max_gap: float | None = None,
    ) -> None:
        """A rollout that has tokens, judged or not. ``pieces``: the text of each of its ids_T."""
        if pieces is not None and len(pieces) != len(rollout.ids_T):
            raise ValueError(f"{len(pieces)} pieces of text for {len(rollout.ids_T)} tokens")
        self.row(RolloutRow.of(rollout, advantage=advantage, max_gap=max_gap))
        if self._keep_tokens:
            if pieces is None and self._spell is not None:
                pieces = [self._spell(token) for token in rollout.ids_T.tolist()]
            self._tokens.append((rollout, pieces))

    def row(self, row: RolloutRow) -> None:
        """A row of ``rollouts`` as it is: an attempt that has no tokens."""
        self._rollouts.append(row)

    def flush(self) -> None:
        """Append what was noted since the last flush; readers and crashes find it from here on."""
        if self._spans:
            spans, self._spans = self._spans, []
            self._count_beside(spans)
            self._writers["spans"].append(self._columns(spans, ("t_request", "t_start", "t_end")))
        if self._rollouts:
            rows, self._rollouts = self._rollouts, []
            self._writers["rollouts"].append(self._columns(rows, ("t_start", "t_end")))
        if self._tokens:
            tokens, self._tokens = self._tokens, []
            self._writers["tokens"].append(_token_columns(tokens))

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._close_files()

    def _close_files(self) -> None:
        with ExitStack() as files:  # all of them, though one fails
            for writer in self._writers.values():
                files.callback(writer.close)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _count_beside(self, spans: list[Span]) -> None:
        """Fill ``concurrency`` where nobody told it, from all that ran at the same time on the same stave."""
        now = self._clock.now()
        untold: dict[str, list[Span]] = {}
        for span in spans:
            if span.concurrency is None:
                untold.setdefault(span.stave, []).append(span)
        told = [*self._flushed, *(s for s in spans if s.concurrency is not None)]
        for stave, pieces in untold.items():
            beside = [_interval(s) for s in told if s.stave == stave]
            beside += [(s.t_start, max(now, s.t_start)) for s in self._open.values() if s.stave == stave]
            found = mean_concurrency([_interval(s) for s in pieces], beside)
            for span, concurrency in zip(pieces, found, strict=True):
                span.concurrency = concurrency
        since = min((s.t_start for s in self._open.values()), default=now)
        self._flushed = [s for s in (*self._flushed, *spans) if s.t_end > since]

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _columns(self, rows: Sequence[Span | RolloutRow], times: Sequence[str]) -> list[list[Any]]:
        columns = {name: [getattr(row, name) for row in rows] for name in rows[0].__struct_fields__}
        for name in times:
            columns[name] = [None if t is None else t + self._offset for t in columns[name]]
        return list(columns.values())


def _interval(span: Span) -> Interval:
    return span.t_start, max(span.t_start, span.t_end)


def _span_id(enabler: Span | int | None) -> int | None:
    return enabler.span_id if isinstance(enabler, Span) else enabler


def _token_columns(rows: list[tuple[Rollout, Sequence[str] | None]]) -> list[Any]:
    """The columns of ``tokens``, whole arrays at a time: a step may have a million tokens."""
    import pyarrow as pa

    rollouts = [rollout for rollout, _ in rows]
    offsets = np.cumsum([0, *(len(r.ids_T) for r in rollouts)], dtype=np.int32)
    logprobs = np.concatenate([r.logprobs_T for r in rollouts]).astype(np.float32)
    ids = np.concatenate([r.ids_T for r in rollouts]).astype(np.int32)
    mask = np.concatenate([r.mask_T for r in rollouts]).astype(bool)
    return [
        [r.id for r in rollouts],
        pa.ListArray.from_arrays(offsets, pa.array(ids)),
        [None if pieces is None else list(pieces) for _, pieces in rows],
        pa.ListArray.from_arrays(offsets, pa.array(logprobs, from_pandas=True)),
        pa.ListArray.from_arrays(offsets, pa.array(mask)),
        [[{"producer": t.producer, "start": t.start, "end": t.end} for t in r.turns] for r in rollouts],
        [[{"weights_id": w.weights_id, "start": w.start, "end": w.end} for w in r.weights] for r in rollouts],
    ]

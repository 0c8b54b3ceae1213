"""What a run should be told that no error tells it: that nothing has been learned for steps, and the likely cause."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import msgspec

from croze.loop.collect import Collected
from croze.loop.evaluation import PASS
from croze.loop.figures import Learned, valid_scores
from croze.reward.locate import place
from croze.run import Run
from croze.types import Rollout

PATIENCE = 3
"""Steps in a row that show the same before it is told."""
CUT = 0.95
"""Share of a step's replies that, ended by their length alone, show that replies are not ended by the model."""


class Evidence(msgspec.Struct, frozen=True, kw_only=True):
    """What one step shows, or several. ``lowest`` and ``highest``: of the ``scored`` replies, else 0.

    ``compared``: groups of two siblings or more, of which ``alike`` have one reply only. ``taught``: some reply had
    an advantage that is not 0.
    """

    rollouts: int
    scored: int
    cut: int
    compared: int
    alike: int
    lowest: float
    highest: float
    taught: bool


class Warned(msgspec.Struct, frozen=True, kw_only=True):
    """A likely cause, told as an error is: stable ``kind``, what, where, what to do."""

    kind: str
    message: str
    where: str
    fix: str


def evidence(rollouts: Sequence[Rollout], *, taught: bool) -> Evidence:
    """What a step's judged rollouts show."""
    replies: dict[str, list[str]] = defaultdict(list)
    for rollout in rollouts:
        replies[rollout.group_id].append(rollout.reply)
    compared = [said for said in replies.values() if len(said) > 1]
    scores = valid_scores(rollouts)
    return Evidence(
        rollouts=len(rollouts),
        scored=len(scores),
        cut=sum(r.finish in ("length", "context") for r in rollouts),
        compared=len(compared),
        alike=sum(len(set(said)) == 1 for said in compared),
        lowest=min(scores, default=0.0),
        highest=max(scores, default=0.0),
        taught=taught,
    )


def together(steps: Sequence[Evidence]) -> Evidence:
    """Several steps as one."""
    scored = [s for s in steps if s.scored]
    return Evidence(
        rollouts=sum(s.rollouts for s in steps),
        scored=sum(s.scored for s in steps),
        cut=sum(s.cut for s in steps),
        compared=sum(s.compared for s in steps),
        alike=sum(s.alike for s in steps),
        lowest=min((s.lowest for s in scored), default=0.0),
        highest=max((s.highest for s in scored), default=0.0),
        taught=any(s.taught for s in steps),
    )


class Signals:
    """Watches a run step by step; says each cause once."""

    def __init__(self, run: Run) -> None:
        self._run, self._reward = run, place(run.reward)
        self._steps: deque[Evidence] = deque(maxlen=PATIENCE)
        self._told: set[str] = set()

    def after(self, collected: Collected, learned: Learned) -> list[dict[str, Any]]:
        """The warnings, as events, that a step gives rise to."""
        taught = any(advantage != 0 for advantage in learned.advantages.values())
        warned = self.see(evidence(collected.rollouts, taught=taught))
        if warned is None:
            return []
        return [{"event": "warning", "step": collected.step, **msgspec.structs.asdict(warned)}]

    def see(self, step: Evidence) -> Warned | None:
        """Take in one more step; what is to be told of the last ``PATIENCE``, unless it was told before."""
        self._steps.append(step)
        warned = self._cause() if len(self._steps) == PATIENCE else None
        if warned is None or warned.kind in self._told:
            return None
        self._told.add(warned.kind)
        return warned

    def _cause(self) -> Warned | None:
        seen = together(self._steps)
        if all(s.cut >= CUT * s.rollouts > 0 for s in self._steps):
            return self._never_ends(seen)
        return None if seen.taught else self._no_signal(seen)

    def _never_ends(self, seen: Evidence) -> Warned:
        sampling = self._run.sampling
        share = f"{seen.cut} of {seen.rollouts} replies in {PATIENCE} steps were cut off"
        if not seen.taught:
            share += ", and there was nothing to learn from them"
        if not sampling.stop:
            return Warned(
                kind="replies.cut",
                message=f"{share}: the model did not end them within sampling.max_tokens={sampling.max_tokens}",
                where="sampling.max_tokens",
                fix=f"raise sampling.max_tokens, or set sampling.stop to what ends an answer; {self._look()}",
            )
        escaped = any("\\" in stop for stop in sampling.stop)
        return Warned(
            kind="replies.cut",
            message=f"{share}: none of the stop strings {', '.join(map(repr, sampling.stop))} was reached within"
            f" sampling.max_tokens={sampling.max_tokens}",
            where="sampling.stop",
            fix=("a backslash is one here: for a line's end write it in the task file; " if escaped else "")
            + f"choose what replies hold where the answer ends, or raise sampling.max_tokens; {self._look()}",
        )

    def _no_signal(self, seen: Evidence) -> Warned:
        nothing = f"nothing to learn from in {PATIENCE} steps"
        if seen.scored == 0:
            return Warned(
                kind="no_signal.unscored",
                message=f"{nothing}: no reply got a score",
                where=self._reward,
                fix=f"see why in {self._run.dir}/faults.jsonl: a reward that returns None leaves the reply out",
            )
        if seen.lowest >= PASS:
            return Warned(
                kind="no_signal.solved",
                message=f"{nothing}: every reply is right, its score {PASS:g} or more; the tasks are too easy",
                where="tasks",
                fix="give harder tasks, or stop here: the model can do these",
            )
        if seen.compared and seen.alike == seen.compared:
            return Warned(
                kind="no_signal.identical",
                message=f"{nothing}: siblings all say the same",
                where="sampling.temperature",
                fix=f"raise sampling.temperature (now {self._run.sampling.temperature:g}); {self._look()}",
            )
        if seen.lowest == seen.highest:
            return self._constant(nothing, seen.highest)
        return Warned(
            kind="no_signal.by_task",
            message=f"{nothing}: siblings always score alike, though tasks do not; each is always done or never",
            where="tasks",
            fix="give tasks that the model does at times, raise group_size, or grade the reward's steps",
        )

    def _constant(self, nothing: str, score: float) -> Warned:
        if score <= 0:
            return Warned(
                kind="no_signal.zero",
                message=f"{nothing}: every reply scores {score:g}; the tasks are too hard, or replies do not have the"
                " form that the reward reads",
                where=self._reward,
                fix=f"{self._look()}; give easier tasks, say the form in the prompt, or reward a part of the way",
            )
        return Warned(
            kind="no_signal.constant",
            message=f"{nothing}: replies differ, but every one scores {score:g}; the reward may not look at the reply",
            where=self._reward,
            fix=f"see that it reads `reply`; {self._look()}",
        )

    def _look(self) -> str:
        return f"read them: croze trace {self._run.dir}"

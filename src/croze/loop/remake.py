"""A recorded step made again: the weights before it, then its learning, from records alone."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from croze.errors import CheckpointFault, ModelNotFound
from croze.loop import build
from croze.loop.checkpoints import MANIFEST, Checkpoint, Checkpoints, verify
from croze.loop.figures import Learned
from croze.loop.folder import numerics_at
from croze.loop.learning import Learning
from croze.loop.records import Recorded, Records
from croze.loop.shares import Looking, Share, Watched
from croze.models import numerics
from croze.models.source import resolve
from croze.run import Run
from croze.sync.identity import Identity
from croze.train import algorithms
from croze.train.protocol import Trainer
from croze.types import Rollout, Sample, WeightsId

OnEvent = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """Where a remake starts: the step whose weights these are, the checkpoint they come from (None: the model
    itself) and those that had to be passed over, with the reason."""

    step: int
    weights_id: WeightsId
    checkpoint: str | None
    passed_over: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remade:
    """A step made again. ``served``: the ids of the weights that sampled the first step that was made again;
    ``between``: the weights ids of the steps from ``before`` to it. ``logprobs``: of each rollout's suffix, under the
    weights before the step, as the trainer computes them [S]. ``doubt``: why this machine's arithmetic may not give the
    same twice; "" where it does."""

    recorded: Recorded
    before: Before
    served: frozenset[WeightsId]
    between: dict[int, WeightsId]
    learned: Learned
    weights_id: WeightsId
    shares: list[Share]
    logprobs: dict[str, np.ndarray]
    numerics: dict[str, Any]
    doubt: str
    spell: Callable[[int], str]


async def remake(
    records: Records, step: int, *, most: int, chosen: str | None, model: str | None, tell: OnEvent
) -> Remade:
    """Make ``step`` again. ``most`` and ``chosen``: see ``Looking``; ``model``: where the model lies now.

    Raises ModelNotFound, CheckpointMismatch and the errors of an algorithm that meets a record it cannot use.
    """
    run = _as_it_was(records, step, model)
    algorithm = Watched(algorithms.build(run.algo, run.sampling, minibatches=run.optim.minibatches))
    made = await asyncio.to_thread(build.build_model, run)
    try:
        trainer = await asyncio.to_thread(build.build_trainer, run, made, algorithm)
        again = _Remaking(
            records, made, trainer, algorithm, Identity(trainer.frozen(), build.weights_recipe(run))
        )
        return await again.step(step, most=most, chosen=chosen, tell=tell)
    finally:
        made.thread.close()


class _Remaking:
    """One replay's parts."""

    def __init__(
        self, records: Records, model: build.Model, trainer: Trainer, algorithm: Watched, identity: Identity
    ) -> None:
        self.records, self.model, self.trainer = records, model, trainer
        self.algorithm, self.identity, self.thread = algorithm, identity, model.thread

    async def step(self, step: int, *, most: int, chosen: str | None, tell: OnEvent) -> Remade:
        before = await self.before(step)
        tell({"event": "from", "step": before.step, "checkpoint": before.checkpoint})
        learning, between, served = Learning(self.trainer, self.algorithm, self.thread), {}, frozenset()
        for recorded in self.records.steps(before.step + 1, step):
            served = served or frozenset(w.weights_id for r in recorded.rollouts for w in r.weights)
            if recorded.step < step:
                await learning.learn(recorded.groups, recorded.step)
                between[recorded.step] = await self.publish()
                tell({"event": "remade", "step": recorded.step, "weights_id": between[recorded.step]})
                continue
            logprobs = await self.logprobs(recorded.rollouts)
            learning.look = look = Looking(self.trainer, self.algorithm, most=most, chosen=chosen)
            self.algorithm.watching = True
            learned = await learning.learn(recorded.groups, step)
            return Remade(
                recorded=recorded,
                before=before,
                served=served,
                between=between,
                learned=learned,
                weights_id=await self.publish(),
                shares=look.shares,
                logprobs=logprobs,
                numerics=build.numerics_told(self.model),
                doubt=numerics.why_inexact(self.model.recipe, "a replay"),
                spell=lambda token: self.model.tokenizer.decode([token], special=True),
            )
        raise AssertionError("records end with the step they were asked for")

    async def before(self, step: int) -> Before:
        """The newest whole checkpoint of the run's own history before ``step``, else the model as it began."""
        passed_over: dict[str, str] = {}
        for checkpoint in self._checkpoints(step, passed_over):
            try:
                await self.thread.run(self.trainer.load, checkpoint.path / "trainer")
            except CheckpointFault as fault:  # the live run may have removed it meanwhile
                passed_over[checkpoint.path.name] = fault.message
                continue
            return Before(
                step=checkpoint.step,
                weights_id=await self.publish(),
                checkpoint=str(checkpoint.path),
                passed_over=passed_over,
            )
        return Before(step=0, weights_id=await self.publish(), checkpoint=None, passed_over=passed_over)

    def _checkpoints(self, step: int, passed_over: dict[str, str]) -> Iterator[Checkpoint]:
        for path in reversed(Checkpoints(self.records.path / "checkpoints").all()):
            number = int(path.name.removeprefix("step_"))
            if number >= step:
                continue
            found = verify(path)
            if not isinstance(found, Checkpoint):
                if (path / MANIFEST).exists():  # else the live run has just removed it
                    passed_over[path.name] = found.why
            elif number not in self.records.commits:
                passed_over[path.name] = f"the ledger has no step {number}"
            elif self.records.commits[number].weights_id != found.manifest.weights_id:
                passed_over[path.name] = f"the ledger has other weights at step {number}"
            else:
                yield found

    async def publish(self) -> WeightsId:
        """The id of the trainer's weights as they are; forward passes use them from here on."""
        weights_id = await self.thread.run(lambda: self.identity.of(self.trainer.export()))
        await self.thread.run(self.trainer.publish, weights_id)
        return weights_id

    async def logprobs(self, rollouts: Sequence[Rollout]) -> dict[str, np.ndarray]:
        sampled = [r for r in rollouts if r.mask_T.any()]
        found = await self.thread.run(self.trainer.logprobs, [_bare_sample(r) for r in sampled])
        return {r.id: logprobs_S for r, logprobs_S in zip(sampled, found, strict=True)}


def _as_it_was(records: Records, step: int, model: str | None) -> Run:
    """The run with the arithmetic it had at ``step``, whatever "auto" would choose here, and its model where it
    can be had."""
    run, then = records.run, numerics_at(records.config, step)
    engine = run.engine
    if isinstance(then.get("threads"), int):
        engine = dataclasses.replace(engine, threads=then["threads"])
    if then.get("dtype") in ("bfloat16", "float32"):
        engine = dataclasses.replace(engine, dtype=then["dtype"])
    if engine.device.startswith("cuda") and not torch.cuda.is_available():
        engine = dataclasses.replace(engine, device="cpu")
    return dataclasses.replace(run, engine=engine, model=_found(run.model, records, model))


def _found(declared: str, records: Records, given: str | None) -> str:
    """The model by what is given, by its declared name, or where the run had its files."""
    if given is not None:
        resolve(given)
        return given
    try:
        resolve(declared)
        return declared
    except ModelNotFound as error:
        path = records.config.get("model", {}).get("path", "")
        if path and Path(path).is_dir():
            return path
        raise ModelNotFound(
            error.message, where=error.where, fix="say where the model lies now: --model PATH"
        ) from error


def _bare_sample(rollout: Rollout) -> Sample:
    """A rollout's tokens, trained or not, to have their log-probs computed."""
    cut = rollout.prompt_tokens
    nothing_S = np.zeros(len(rollout.ids_T) - cut, np.float32)
    return Sample(
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        prompt_P=rollout.ids_T[:cut],
        ids_S=rollout.ids_T[cut:],
        mask_S=rollout.mask_T[cut:],
        logprobs_S=nothing_S,
        advantages_S=nothing_S,
        weights_S=nothing_S,
    )

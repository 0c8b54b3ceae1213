"""The verbs of the loop: ``train`` and ``evaluate`` a declared run."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from croze.clock import RealClock
from croze.env.tasks import TaskSource
from croze.errors import ConfigError, Interrupted, TasksError
from croze.inference.torch_engine import TorchEngine
from croze.loop import build
from croze.loop.collect import Collector
from croze.loop.controller import Controller
from croze.loop.decisions import Decisions
from croze.loop.evaluation import Evaluation
from croze.loop.ledger import SqliteLedger
from croze.reward.call import check_columns, inspect_reward
from croze.reward.judge import Judge
from croze.run import Run
from croze.sandbox.protocol import Limits
from croze.sync.identity import Identity
from croze.trace.metrics import JsonLines
from croze.trace.recorder import Recorder
from croze.train import algorithms
from croze.train.protocol import Algorithm
from croze.train.save import save_model
from croze.train.trainer import TorchTrainer
from croze.types import Task, WeightsId

T = TypeVar("T")
OnEvent = Callable[[dict[str, Any]], None]
EVAL_TASKS = 64
"""Held-out tasks of an evaluation that names no number."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A finished training: its run folder, the last weights' id, and a model folder that others can load."""

    run_dir: Path
    weights_id: WeightsId
    model_dir: Path


def train(run: Run, *, on_event: OnEvent | None = None) -> Result:
    """Train a declared run to its last step. Events (dicts) go to ``on_event`` as they happen.

    Raises UsageError and its kinds for a wrong declaration, before anything heavy starts; InfraFault when the
    machinery fails; Interrupted on Ctrl-C.
    """
    listen = on_event or _silent
    source, tasks = build.held_out(run, run.loop.eval_tasks)
    check_columns(inspect_reward(run.reward), source.columns)
    Limits.of(run.sandbox)  # raises ConfigError for limits that do not fit together
    algorithm = algorithms.build(run.algo, run.sampling, minibatches=run.optim.minibatches)
    _check_groups(run)
    run = build.make_folder(run)
    return _run(_train(run, source, tasks, algorithm, listen))


def _check_groups(run: Run) -> None:
    """Refuse shapes of a step that could never learn."""
    if run.group_size == 1 and run.algo.name != "reinforce++":
        raise ConfigError(
            f"algo.name={run.algo.name} compares siblings, and group_size=1 gives it none",
            where="group_size",
            fix="set group_size to 4 or more, or algo.name=reinforce++",
        )
    if run.optim.minibatches > run.groups_per_step:
        raise ConfigError(
            f"optim.minibatches={run.optim.minibatches} cannot be cut from groups_per_step={run.groups_per_step}",
            where="optim.minibatches",
            fix="groups are never split: lower the one or raise the other",
        )


async def _train(
    run: Run, source: TaskSource, tasks: list[Task], algorithm: Algorithm, listen: OnEvent
) -> Result:
    """Open every part, run the controller to its end, save the model, close what was opened, last first."""
    async with AsyncExitStack() as parts:
        judge = await parts.enter_async_context(
            Judge(run.reward, options=run.reward_options, sandbox=run.sandbox)
        )
        model = await asyncio.to_thread(build.build_model, run)
        parts.callback(model.thread.close)
        build.write_config(run, model.files, model.recipe)
        trainer = await asyncio.to_thread(build.build_trainer, run, model, algorithm)
        engine = build.build_engine(run, model, trainer.weights)
        parts.push_async_callback(engine.close)
        controller = _controller(run, model, engine, trainer, algorithm, judge, source, tasks, parts, listen)
        listen(_start(run, model))
        weights_id = await controller.train()
        model_dir = Path(run.dir) / "checkpoints" / f"step_{run.steps:06d}" / "model"
        await model.thread.run(save_model, trainer, model.files, model_dir)
    listen({"event": "done", "run_dir": run.dir, "weights_id": weights_id})
    return Result(run_dir=Path(run.dir), weights_id=weights_id, model_dir=model_dir)


def _controller(
    run: Run,
    model: build.Model,
    engine: TorchEngine,
    trainer: TorchTrainer,
    algorithm: Algorithm,
    judge: Judge,
    source: TaskSource,
    tasks: list[Task],
    parts: AsyncExitStack,
    listen: OnEvent,
) -> Controller:
    """The controller over a run folder's files, which ``parts`` closes."""
    folder, clock = Path(run.dir), RealClock()
    ledger = SqliteLedger(folder / "ledger.sqlite")
    parts.callback(ledger.close)
    recorder = parts.enter_context(Recorder(folder / "trace", tokens=run.trace.tokens, clock=clock))
    metrics = parts.enter_context(JsonLines(folder / "metrics.jsonl"))
    faults = parts.enter_context(JsonLines(folder / "faults.jsonl"))
    collector = Collector(
        decisions=Decisions(
            groups_per_step=run.groups_per_step, group_size=run.group_size, retries=run.loop.retries
        ),
        ledger=ledger,
        tasks=source.stream(run.seed, without=tasks),
        generator=build.build_generator(run, model, engine, clock, held_out=False),
        judge=judge,
        recorder=recorder,
        faults=faults,
        clock=clock,
    )
    apart = build.build_generator(run, model, engine, clock, held_out=True)
    return Controller(
        run,
        engine=engine,
        trainer=trainer,
        algorithm=algorithm,
        collector=collector,
        evaluation=Evaluation(tasks, apart, judge) if tasks else None,
        identity=Identity(trainer.frozen(), build.weights_recipe(run)),
        thread=model.thread,
        ledger=ledger,
        recorder=recorder,
        metrics=metrics,
        clock=clock,
        on_event=listen,
    )


def evaluate(
    run: Run, *, tasks: int | None = None, samples: int | None = None, on_event: OnEvent | None = None
) -> dict[str, Any]:
    """Measure a run's model on ``tasks`` held-out tasks (default loop.eval_tasks, else EVAL_TASKS), ``samples`` each.

    A rollout passes with a score of 1 or more. Returns {"event": "eval", "weights_id", "pass_at_1", "low",
    "high", "pass_at_K", "low_at_K", "high_at_K", "reward_mean", "tasks", "samples", "invalid", ...}.
    """
    try:
        source, held_out = build.held_out(run, tasks or run.loop.eval_tasks or EVAL_TASKS)
    except TasksError as error:
        raise TasksError(error.message, where=error.where, fix="ask for fewer with --tasks N") from error
    check_columns(inspect_reward(run.reward), source.columns)
    Limits.of(run.sandbox)  # raises ConfigError for limits that do not fit together
    return _run(_evaluate(run, held_out, samples or 1, on_event or _silent))


async def _evaluate(run: Run, tasks: list[Task], samples: int, listen: OnEvent) -> dict[str, Any]:
    async with AsyncExitStack() as parts:
        judge = await parts.enter_async_context(
            Judge(run.reward, options=run.reward_options, sandbox=run.sandbox)
        )
        model = await asyncio.to_thread(build.build_model, run)
        parts.callback(model.thread.close)
        weights = build.read_weights(run, model)
        engine = build.build_engine(run, model, weights)
        parts.push_async_callback(engine.close)
        await engine.prepare(weights.weights_id, ())
        await engine.commit(weights.weights_id)
        generator = build.build_generator(run, model, engine, RealClock(), held_out=True)
        measured = await Evaluation(tasks, generator, judge, samples=samples).measure(0)
    return {"event": "eval", "model": run.model, "weights_id": weights.weights_id, **measured}


def _start(run: Run, model: build.Model) -> dict[str, Any]:
    return {
        "event": "start",
        "run_dir": run.dir,
        "steps": run.steps,
        "model": model.files.name,
        "source": model.files.source,
        "parameters": model.arch.parameters,
        "dtype": str(model.recipe.dtype).removeprefix("torch."),
        "exact": model.recipe.exact,
        "numerics": model.recipe.note,
    }


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run to the end; Ctrl-C and SIGTERM become ``Interrupted`` once what was open has been closed."""

    async def watched() -> T:
        task = asyncio.current_task()
        if threading.current_thread() is threading.main_thread() and task is not None:
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await work

    try:
        return asyncio.run(watched())
    except asyncio.CancelledError:
        raise Interrupted(
            "stopped from outside before the end",
            fix="the trace and the ledger keep what was done; weights are saved when a run ends",
        ) from None


def _silent(_: dict[str, Any]) -> None:
    """Nobody listens."""

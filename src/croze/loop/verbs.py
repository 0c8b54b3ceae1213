"""The verbs of the loop: ``train`` and ``evaluate`` a declared run."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from croze.clock import RealClock
from croze.errors import Interrupted
from croze.loop import build
from croze.loop.collect import Collector
from croze.loop.controller import Controller
from croze.loop.decisions import Decisions
from croze.loop.evaluation import Evaluation
from croze.loop.ledger import SqliteLedger
from croze.reward.call import check_columns, inspect_reward
from croze.reward.judge import Judge
from croze.run import Run
from croze.sync.identity import Identity
from croze.trace.metrics import JsonLines
from croze.trace.recorder import Recorder
from croze.train import algorithms
from croze.train.save import save_model
from croze.types import WeightsId

T = TypeVar("T")
OnEvent = Callable[[dict[str, Any]], None]


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
    algorithm = algorithms.build(run.algo, run.sampling, minibatches=run.optim.minibatches)
    run = build.make_folder(run)
    return _run(_train(run, source, tasks, algorithm, listen))


async def _train(run: Run, source, held_out, algorithm, listen: OnEvent) -> Result:
    folder, clock = Path(run.dir), RealClock()
    with ExitStack() as files:
        async with AsyncExitStack() as parts:
            judge = await parts.enter_async_context(
                Judge(run.reward, options=run.reward_options, sandbox=run.sandbox)
            )
            model = await asyncio.to_thread(build.build_model, run)
            files.callback(model.thread.close)
            build.write_config(run, model.files, model.recipe)
            trainer = await asyncio.to_thread(build.build_trainer, run, model, algorithm)
            engine = build.build_engine(run, model, trainer.weights)
            parts.push_async_callback(engine.close)
            ledger = SqliteLedger(folder / "ledger.sqlite")
            files.callback(ledger.close)
            recorder = files.enter_context(Recorder(folder / "trace", tokens=run.trace.tokens, clock=clock))
            metrics = files.enter_context(JsonLines(folder / "metrics.jsonl"))
            faults = files.enter_context(JsonLines(folder / "faults.jsonl"))
            collector = Collector(
                decisions=Decisions(
                    groups_per_step=run.groups_per_step,
                    group_size=run.group_size,
                    retries=run.loop.retries,
                ),
                ledger=ledger,
                tasks=source.stream(run.seed, without=held_out),
                generator=build.build_generator(run, model, engine, clock, held_out=False),
                judge=judge,
                recorder=recorder,
                faults=faults,
                clock=clock,
            )
            apart = build.build_generator(run, model, engine, clock, held_out=True)
            controller = Controller(
                run,
                engine=engine,
                trainer=trainer,
                algorithm=algorithm,
                collector=collector,
                evaluation=Evaluation(held_out, apart, judge) if held_out else None,
                identity=Identity(trainer.frozen(), build.weights_recipe(run)),
                thread=model.thread,
                ledger=ledger,
                recorder=recorder,
                metrics=metrics,
                clock=clock,
                on_event=listen,
            )
            listen(_start(run, model))
            weights_id = await controller.train()
            model_dir = folder / "checkpoints" / f"step_{run.steps:06d}" / "model"
            await model.thread.run(save_model, trainer, model.files, model_dir)
            listen({"event": "done", "run_dir": str(folder), "weights_id": weights_id})
            return Result(run_dir=folder, weights_id=weights_id, model_dir=model_dir)


def evaluate(
    run: Run, *, tasks: int | None = None, samples: int | None = None, on_event: OnEvent | None = None
) -> dict[str, Any]:
    """Measure a run's model on ``tasks`` held-out tasks (default loop.eval_tasks, else 64), ``samples`` each.

    Returns {"event": "eval", "pass_at_1", "low", "high", "pass_at_K", "reward_mean", ...}.
    """
    source, held_out = build.held_out(run, tasks or run.loop.eval_tasks or 64)
    check_columns(inspect_reward(run.reward), source.columns)
    return _run(_evaluate(run, held_out, samples or 1, on_event or _silent))


async def _evaluate(run: Run, held_out, samples: int, listen: OnEvent) -> dict[str, Any]:
    with ExitStack() as files:
        async with AsyncExitStack() as parts:
            judge = await parts.enter_async_context(
                Judge(run.reward, options=run.reward_options, sandbox=run.sandbox)
            )
            model = await asyncio.to_thread(build.build_model, run)
            files.callback(model.thread.close)
            weights = build.read_weights(run, model)
            engine = build.build_engine(run, model, weights)
            parts.push_async_callback(engine.close)
            await engine.prepare(weights.weights_id, ())
            await engine.commit(weights.weights_id)
            generator = build.build_generator(run, model, engine, RealClock(), held_out=True)
            measured = await Evaluation(held_out, generator, judge, samples=samples).measure(0)
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
            "stopped by Ctrl-C", where="train", fix="the run folder keeps what was done"
        ) from None


def _silent(_: dict[str, Any]) -> None:
    """Nobody listens."""

"""Measuring: pass@k of a declared run's model on held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from croze import plugins
from croze.clock import RealClock
from croze.errors import TasksError
from croze.loop import build, declaration
from croze.loop.evaluation import Evaluation
from croze.loop.interrupt import run_cancellable
from croze.loop.look import Look
from croze.reward.judge import Judge
from croze.run import Run
from croze.types import Task

OnEvent = Callable[[dict[str, Any]], None]
EVAL_TASKS = 64
"""Held-out tasks of an evaluation that names no number."""


def evaluate(
    run: Run, *, tasks: int | None = None, samples: int | None = None, on_event: OnEvent | None = None
) -> dict[str, Any]:
    """Measure a run's model on ``tasks`` held-out tasks (default loop.eval_tasks, else EVAL_TASKS), ``samples`` each.

    A rollout passes with a score of 1 or more. Returns {"event": "eval", "weights_id", "pass_at_1", "low",
    "high", "pass_at_K", "low_at_K", "high_at_K", "reward_mean", "tasks", "samples", "invalid", ...}.
    """
    try:
        _, held_out = build.held_out(run, tasks or run.loop.eval_tasks or EVAL_TASKS)
    except TasksError as error:
        raise TasksError(error.message, where=error.where, fix="ask for fewer with --tasks N") from error
    plugins.check_keys(run.keys())
    declaration.check_reward(run)
    return run_cancellable(_evaluate(run, held_out, samples or 1, on_event or _silent))


async def _evaluate(run: Run, tasks: list[Task], samples: int, listen: OnEvent) -> dict[str, Any]:
    async with AsyncExitStack() as parts:
        judge = await parts.enter_async_context(
            Judge(run.reward, options=run.reward_options, sandbox=run.sandbox)
        )
        model = await asyncio.to_thread(build.build_model, run)
        parts.callback(model.thread.close)
        look = Look(model.tokenizer, model.arch.context, judge.spec)
        for task in tasks:
            look.at(task, build.eval_source(run).place)
        weights = build.read_weights(run, model)
        engine = build.build_engine(run, model, weights)
        parts.push_async_callback(engine.close)
        await engine.prepare(weights.weights_id, build.served_tensors(run, model))
        await engine.commit(weights.weights_id)
        generator = build.build_generator(run, model, engine, RealClock(), held_out=True)
        measured = await Evaluation(tasks, generator, judge, samples=samples).measure(0)
    return {"event": "eval", "model": run.model, "weights_id": weights.weights_id, **measured}


def _silent(_: dict[str, Any]) -> None:
    """Nobody listens."""

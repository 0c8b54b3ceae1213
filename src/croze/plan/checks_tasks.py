"""Tasks as training will meet them: rows that parse, prompts that fit, enough of them to hold some out."""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence

import msgspec

from croze.env.tasks import TaskSource, as_tasks
from croze.errors import CrozeError, DeclarationError, TasksError
from croze.plan.checks import Context, Report, deadline
from croze.types import Task

SAMPLE = 64
"""Tasks looked at closely."""
TWICE = 16
"""Tasks drawn a second time, to see whether they are the same."""
LONGEST = 16
"""Beside them, the longest ones of all that were read."""
MOST_ROWS = 10_000
READ_S = 2.0
"""Rows are read until there are so many, or so much time has passed."""
SLOWEST_S, SLOWEST_HUB_S = 30.0, 600.0
"""Longest a source may take to give its first rows; one of the hub may have to be fetched."""
REPEATED = 0.5
"""Share of repeated prompts above which it is worth a word."""


def look_at_tasks(context: Context, report: Report) -> None:
    """Read rows in the order of training, hold some out where the run will."""
    run = context.run
    source = as_tasks(run.tasks)
    with deadline(longest_wait(source), "reading the first tasks", source.name):
        rows = _read(source, run.seed, context)
        context.source = source
        prompts = {_digest(task) for task in context.tasks[:SAMPLE]}
        again = [task for _, task in zip(context.tasks[:TWICE], source.stream(run.seed), strict=False)]
        steady = again == context.tasks[: len(again)]
        if run.loop.eval_tasks:
            _hold_out(context, source)
    if not steady:
        report.warn(
            "tasks.random",
            "for the same seed it gives other tasks the second time",
            where=source.name,
            fix="draw from random.Random(seed) alone: a resumed run must find the tasks it was given before",
        )
    looked = min(rows, SAMPLE)
    if looked - len(prompts) > REPEATED * looked:
        report.warn(
            "tasks.duplicates",
            f"of {looked} tasks only {len(prompts)} have prompts of their own",
            where=source.name,
            fix="remove what is there twice: a repeated task is weighted twice",
        )
    if rows < run.groups_per_step:
        report.warn(
            "tasks.few",
            f"a step takes {run.groups_per_step} tasks, and an epoch has {rows}",
            where=source.name,
            fix="give more tasks, or lower groups_per_step",
        )
    if not report.findings:
        columns = ", ".join(source.columns) or "none"
        report.ok(f"{rows} rows read and sound; columns: {columns}", where=source.name)


def longest_wait(source: TaskSource) -> float:
    """Seconds that a source may take to give its first rows."""
    return SLOWEST_HUB_S if source.name.startswith("hf:") else SLOWEST_S


def _read(source: TaskSource, seed: int, context: Context) -> int:
    """Fill ``context.tasks``; how many rows of the first epoch were read."""
    began, rows = time.monotonic(), 0
    longest: list[tuple[int, int, Task]] = []
    for task in source.stream(seed):
        if not task.id.startswith("0."):
            break
        rows += 1
        if rows <= SAMPLE:
            context.tasks.append(task)
        else:
            entry = (_length(task), rows, task)
            (heapq.heappush if len(longest) < LONGEST else heapq.heappushpop)(longest, entry)
        if rows >= MOST_ROWS or time.monotonic() - began > READ_S:
            break
    context.tasks += [task for _, _, task in sorted(longest, reverse=True)]
    return rows


def _hold_out(context: Context, source: TaskSource) -> None:
    """Raises TasksError where too few tasks would be left on either side."""
    run = context.run
    apart = source if run.eval_tasks is None else as_tasks(run.eval_tasks)
    held = apart.holdout(run.loop.eval_tasks, run.seed)
    context.tasks[SAMPLE:SAMPLE] = held[:LONGEST]
    if run.eval_tasks is None:
        next(source.stream(run.seed, without=held))


def _length(task: Task) -> int:
    """Characters of a prompt, roughly: enough to find the longest."""
    if isinstance(task.prompt, str):
        return len(task.prompt)
    return sum(len(str(message.get("content", ""))) for message in task.prompt)


def _digest(task: Task) -> bytes:
    return msgspec.json.encode(task.prompt)


def look_at_prompts(context: Context, report: Report) -> None:
    """Every sampled prompt through the model's tokenizer: how long, and does a reply fit behind it."""
    assert context.tokenizer is not None and context.arch is not None and context.source is not None
    lengths: list[int] = []
    refused: list[tuple[Task, CrozeError]] = []
    for task in context.tasks:
        try:
            lengths.append(len(context.tokenizer.render(task.prompt)))
        except CrozeError as error:
            refused.append((task, error))
            lengths.append(0)
    if refused:
        (task, error), count = refused[0], len(refused)
        more = f" (and {count - 1} more of {len(lengths)} tasks)" if count > 1 else ""
        kind = TasksError.kind if isinstance(error, DeclarationError) else error.kind  # as train tells it
        report.fail(kind, error.message + more, where=_place(task, context.source), fix=error.fix)
    context.longest_prompt = max(lengths)
    _hold_to_context(context, lengths, report)
    if not report.findings:
        report.ok(f"{len(lengths)} prompts, tokens: {_spread(lengths)}")


def _hold_to_context(context: Context, lengths: Sequence[int], report: Report) -> None:
    assert context.arch is not None and context.source is not None
    limit, max_tokens = context.arch.context, context.run.sampling.max_tokens
    longest = max(lengths)
    task = context.tasks[lengths.index(longest)]
    count = sum(n >= limit for n in lengths)
    if count:
        report.fail(
            "tasks",
            f"the prompt has {longest} tokens, the model's context {limit}; so it is with {count} of"
            f" {len(lengths)} tasks looked at",
            where=_place(task, context.source),
            fix="shorten the prompt, drop such tasks, or choose a model with a longer context",
        )
    elif longest + max_tokens > limit:
        tight = sum(n + max_tokens > limit for n in lengths)
        report.warn(
            "tasks.long_prompt",
            f"the prompt has {longest} tokens: of sampling.max_tokens={max_tokens} only {limit - longest} fit into"
            f" the context of {limit}; {tight} of {len(lengths)} tasks are such (tokens: {_spread(lengths)})",
            where=_place(task, context.source),
            fix=f"shorten the prompt, or set sampling.max_tokens to {limit - longest}",
        )


def _spread(lengths: Sequence[int]) -> str:
    ordered = sorted(lengths)
    middle, high = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"min {ordered[0]}, median {middle}, p95 {high}, max {ordered[-1]}"


def _place(task: Task, source: TaskSource) -> str:
    return f"{source.place(task)} (task {task.id})"

"""The declaration itself: values and where they come from, options that must fit together, the shape of a step."""

from __future__ import annotations

from typing import Any

from croze import plugins
from croze.errors import ConfigError
from croze.loop import declaration
from croze.plan import machine
from croze.plan.checks import Context, Report
from croze.reward.call import check_columns, check_task, inspect_reward
from croze.reward.locate import locate
from croze.run import Run, provenance
from croze.sandbox.protocol import Limits


def look_at_values(context: Context, report: Report) -> None:
    """Which keys differ from their defaults, and who said so (invariant 8)."""
    changed = [
        f"{key}={_told(value)} ({source})"
        for key, (value, source) in provenance(context.run).items()
        if source != "default"
    ]
    report.ok(", ".join(changed), where=context.run.file or None)


def look_at_declaration(context: Context, report: Report) -> None:
    """Everything that can be refused without tasks or a model."""
    run = context.run
    with report.part():
        inspect_reward(run.reward)
        locate(run.reward)
    with report.part():
        Limits.of(run.sandbox)
    for group, key in plugins.KEYS.items():
        with report.part():
            name = run.keys()[key]
            if name != plugins.AUTO and key != "algo.name":  # that one is built below
                plugins.check(group, name)
    with report.part():
        declaration.check_minibatches(run)
    with report.part():
        _check_algorithm(run)
    if 0 < run.steps <= run.optim.warmup_steps:
        report.warn(
            "declaration.warmup",
            f"the run of {run.steps} steps ends before its warm-up of {run.optim.warmup_steps} does",
            where="optim.warmup_steps",
            fix=f"set optim.warmup_steps below {run.steps}",
        )
    if not report.findings:
        report.ok("types, options, limits and the reward's signature fit together")


def _check_algorithm(run: Run) -> None:
    from croze.train import algorithms  # torch

    algorithm = algorithms.build(run.algo, run.sampling, minibatches=run.optim.minibatches)
    declaration.check_siblings(run, algorithm.rule.advantages.min_valid)


def look_at_columns(context: Context, report: Report) -> None:
    """What the reward asks for by name, against the columns that tasks have, row by row."""
    spec = inspect_reward(context.run.reward)
    assert context.source is not None
    check_columns(spec, context.source.columns)
    for task in context.tasks:
        check_task(spec, task)
    wants = ", ".join(spec.wants) or "nothing"
    report.ok(f"{spec.name} asks for {wants}" + (" and every column" if spec.everything else ""))


def look_at_shape(context: Context, report: Report) -> None:
    """Groups, rows and memory of a step against what the engine can hold at once."""
    run = context.run
    assert context.arch is not None
    context_tokens, max_tokens = context.arch.context, run.sampling.max_tokens
    if run.engine.name in (plugins.AUTO, "torch"):
        _look_at_kv(context, report)
    if max_tokens >= context_tokens:
        report.warn(
            "shape.context",
            f"sampling.max_tokens={max_tokens} is not less than the model's context of {context_tokens} tokens",
            where="sampling.max_tokens",
            fix=f"set sampling.max_tokens below {context_tokens}; replies end where the context does",
        )
    if run.group_size > run.engine.max_rows:
        report.warn(
            "shape.rows",
            f"a group of {run.group_size} is decoded in parts: engine.max_rows={run.engine.max_rows}",
            where="engine.max_rows",
            fix=f"set engine.max_rows to {run.group_size} or more",
        )
    if run.groups_per_step % run.optim.minibatches:
        report.warn(
            "shape.minibatches",
            f"groups_per_step={run.groups_per_step} is cut unevenly by optim.minibatches={run.optim.minibatches}",
            where="optim.minibatches",
            fix="choose a divisor: updates then weigh the same number of groups",
        )
    if not report.findings:
        updates, groups = run.optim.minibatches, run.groups_per_step // run.optim.minibatches
        cut = "one update" if updates == 1 else f"{updates} updates of {groups}"
        report.ok(f"{run.groups_per_step} groups of {run.group_size} rollouts a step, {cut}")


def _look_at_kv(context: Context, report: Report) -> None:
    import torch

    from croze.inference.cache import KVCache
    from croze.models.numerics import Recipe, default_dtype

    run, arch = context.run, context.arch
    assert arch is not None
    named = run.engine.dtype
    dtype = default_dtype(machine.device(run)) if named == "auto" else getattr(torch, named)
    limit = run.engine.kv_memory_mib << 20
    cache = KVCache(arch, Recipe(dtype=dtype), limit)
    room = max(1, min(run.sampling.max_tokens, arch.context - context.longest_prompt))
    one = cache.smallest(context.longest_prompt, 1, room)
    group = cache.smallest(context.longest_prompt, min(run.group_size, run.engine.max_rows), room)
    fix = "raise engine.kv_memory_mib, or lower sampling.max_tokens"
    if one > limit:
        raise ConfigError(
            f"one rollout needs {_mib(one)} MiB of KV memory, engine.kv_memory_mib is {run.engine.kv_memory_mib}",
            where="engine.kv_memory_mib",
            fix=fix,
        )
    if group > limit:
        report.warn(
            "shape.kv",
            f"a group needs {_mib(group)} MiB of KV memory, engine.kv_memory_mib is {run.engine.kv_memory_mib}:"
            " siblings are decoded in parts",
            where="engine.kv_memory_mib",
            fix=fix,
        )


def _mib(count: int) -> int:
    return -(-count >> 20)


def _told(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)

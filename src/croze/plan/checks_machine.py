"""Whether this machine bears the run: isolation, cores and limits, memory, disk."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from pathlib import Path

from croze.plan import disk, machine
from croze.plan.checks import Context, Report, finish
from croze.reward.call import inspect_reward
from croze.run import Run
from croze.sandbox.drivers import open_driver

TIGHT = 0.85
"""Share of the memory above which an estimate is worth a word."""
LEAST_SHM = 64 << 20
FILES_PER_CALL = 16
"""Open files of one reward call with its sandbox, about."""
FILES = 256
"""Those of everything else."""


def look_at_isolation(context: Context, report: Report) -> None:
    """Which driver a reward's sandboxes would have, after it has started one."""
    run = context.run
    if not inspect_reward(run.reward).needs_sandbox:
        report.ok("the reward asks for no sandbox")
        return

    async def open_and_close() -> tuple[str, str, tuple[str, ...]]:
        driver = await open_driver(run.sandbox.driver, allow_unsafe=run.sandbox.allow_unsafe)
        await driver.close()
        return driver.name, driver.tier, driver.missing

    name, tier, missing = finish(open_and_close())
    if tier == "unsafe":
        report.warn(
            "sandbox.unsafe",
            f"model-written code will run without isolation, as this user (driver {name})",
            where="sandbox.allow_unsafe",
            fix="install bubblewrap and allow user namespaces, then leave sandbox.allow_unsafe out",
        )
    else:
        without = f"; this machine gives no {', '.join(missing)}" if missing else ""
        report.ok(f"driver {name}, tier {tier}{without}")


def look_at_machine(context: Context, report: Report) -> None:
    """Cores, arithmetic, shared memory and open files."""
    from croze.models.numerics import default_dtype

    run, cores = context.run, machine.cores()
    if run.engine.threads > cores:
        report.warn(
            "machine.threads",
            f"engine.threads={run.engine.threads}, and this process may use {cores} cores",
            where="engine.threads",
            fix=f"set engine.threads to {cores} or less: threads that share a core wait for each other",
        )
    _look_at_shm(report)
    _look_at_open_files(run, report)
    if not report.findings:
        device = machine.device(run)
        dtype = (
            str(default_dtype(device)).removeprefix("torch.")
            if run.engine.dtype == "auto"
            else run.engine.dtype
        )
        threads = run.engine.threads or cores
        report.ok(f"{platform.machine()}, {cores} cores, {threads} threads; arithmetic {dtype} on {device}")


def _look_at_shm(report: Report) -> None:
    shm = Path("/dev/shm")
    if shm.is_dir() and shutil.disk_usage(shm).free < LEAST_SHM:
        report.warn(
            "machine.shm",
            f"/dev/shm has {shutil.disk_usage(shm).free >> 20} MiB free",
            where="/dev/shm",
            fix="give the container more shared memory (docker run --shm-size=1g)",
        )


def _look_at_open_files(run: Run, report: Report) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES + FILES_PER_CALL * run.reward_options.concurrency
    if soft != resource.RLIM_INFINITY and soft < needed:
        report.warn(
            "machine.files",
            f"a process may open {soft} files, {needed} may be needed",
            where="ulimit -n",
            fix=f"ulimit -n {needed}"
            if hard == resource.RLIM_INFINITY or hard >= needed
            else "lower reward.concurrency, or raise the hard limit of open files",
        )


def look_at_memory(context: Context, report: Report) -> None:
    """The estimated peak against what the device, and beside it the host, have left."""
    from croze.plan.memory import estimate

    run, arch = context.run, context.arch
    assert arch is not None
    found = estimate(run, arch, prompt_tokens=max(1, context.longest_prompt), bare=context.bare)
    available = _available(found.device)
    parts = ", ".join(f"{name} {_mib(size)}" for name, size in found.parts.items() if size >> 20)
    beside = ", ".join(f"{name} {_mib(size)}" for name, size in found.beside.items())
    told = (
        f"peak about {_mib(found.peak)} MiB in {found.when} ({parts}); {_mib(available)} MiB are free on"
        f" {found.device}; at most beside it: {beside}"
    )
    if found.peak > available:
        report.fail("memory", told, where=found.device, fix=_lighter(run))
    elif found.peak > TIGHT * available:
        report.warn("memory.tight", told, where=found.device, fix=_lighter(run))
    else:
        report.ok(told)


def _available(device: str) -> int:
    if not device.startswith("cuda"):
        return machine.memory_available()
    import torch

    return torch.cuda.mem_get_info(device)[0]


def _lighter(run: Run) -> str:
    """The options that would save most, of those that are not taken yet."""
    ways = []
    if not run.lora.rank:
        ways.append("train an adapter (lora.rank=16)")
    if not run.optim.checkpointing:
        ways.append("set optim.checkpointing=true")
    ways += ["lower optim.tokens_per_microbatch", "lower engine.kv_memory_mib", "choose a smaller model"]
    return ", ".join(ways[:3]) + f", or {ways[3]}"


def look_at_disk(context: Context, report: Report) -> None:
    """Checkpoints and trace against the free space under the run folder, and whether that can be written."""
    run = context.run
    assert context.arch is not None
    folder = Path(run.dir or "runs")
    if run.dir and (folder / "config.json").exists():
        report.fail(
            "usage",
            f"{folder} already holds a run",
            where="run.dir",
            fix=f"croze resume {folder}, or choose another run.dir",
        )
        return
    place = machine.existing(folder)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        report.fail(
            "usage",
            f"{folder} cannot be made: {place} cannot be written",
            where="run.dir",
            fix="choose another run.dir",
        )
        return
    needed, free = disk.estimate(run, context.arch), machine.free_bytes(folder)
    told = (
        f"checkpoints {_mib(needed.checkpoints)} MiB ({_mib(needed.checkpoint)} each), trace at most"
        f" {_mib(needed.trace)} MiB, {_mib(free)} MiB are free"
    )
    fix = "free some space, or set run.dir to a folder on another disk"
    if needed.checkpoints > free:
        report.fail("disk", told, where=str(place), fix=fix)
    elif needed.checkpoints + needed.trace > free:
        report.warn("disk.tight", told, where=str(place), fix=fix + "; trace.tokens=false keeps no tokens")
    else:
        report.ok(told)


def _mib(count: int) -> int:
    return -(-count >> 20)

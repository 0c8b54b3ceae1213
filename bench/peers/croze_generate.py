"""croze's engine: prompts x siblings, ``--new`` tokens each, with the log-prob of every sampled token.

``max_gap`` is the largest difference between a sampled log-prob and the trainer's own for the same token.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import numpy as np
import torch
from common import cpu_s, emit, gemm_gflops, random_prompts
from croze_parts import DTYPES, declared, engine_of

import croze
from croze.inference.protocol import Engine, Request, SamplingParams


async def reply(engine: Engine, request: Request) -> list[tuple[np.ndarray, np.ndarray]]:
    """(ids, log-probs) of each sibling."""
    ids: list[list[np.ndarray]] = [[] for _ in request.keys]
    logprobs: list[list[np.ndarray]] = [[] for _ in request.keys]
    async for chunk in engine.generate(request):
        ids[chunk.sibling].append(chunk.ids_T)
        logprobs[chunk.sibling].append(chunk.logprobs_T)
    return [(np.concatenate(i), np.concatenate(p)) for i, p in zip(ids, logprobs, strict=True)]


def requests(args: argparse.Namespace, repeat: int) -> list[Request]:
    prompts = random_prompts(args.groups, args.prompt, repeat)
    return [
        Request(
            id=f"{repeat}-{group}",
            prompt_P=np.array(prompt, np.int32),
            keys=tuple(range(group * args.siblings, (group + 1) * args.siblings)),
            params=SamplingParams(max_tokens=args.new, seed=repeat),
        )
        for group, prompt in enumerate(prompts)
    ]


async def measure(args: argparse.Namespace) -> None:
    rows = args.groups * args.siblings
    engine, model = await engine_of(declared(args.model, args.dtype, rows, invariant=args.invariant))
    limit, exact = await model.thread.run(gemm_gflops, model.recipe.dtype), model.recipe.exact
    emit("ready", croze=croze.__version__, torch=torch.__version__, gemm=limit, exact=exact)
    for repeat in range(args.repeats + 1):  # the first warms up
        asked = requests(args, repeat)
        before = cpu_s()
        replies = await asyncio.gather(*(reply(engine, request) for request in asked))
        used = cpu_s() - before
        assert all(len(ids) == args.new for group in replies for ids, _ in group)
        if repeat:
            gap = await largest_gap(engine, asked, replies)
            emit("repeat", tokens=args.groups * args.siblings * args.new, cpu_s=used, max_gap=gap)
    await engine.close()
    model.thread.close()


async def largest_gap(engine: Engine, asked: list[Request], replies: list) -> float:
    """Over each group's first sibling: enough to see whether the two paths agree."""
    gap = 0.0
    for request, group in zip(asked, replies, strict=True):
        ids, logprobs = group[0]
        gap = max(gap, float(np.abs(await engine.score(request.prompt_P, ids) - logprobs).max()))
    return gap


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--invariant", action="store_true", help="engine.invariant=true")
    for name, value in (("groups", 4), ("siblings", 8), ("prompt", 41), ("new", 64), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asyncio.run(measure(parser.parse_args()))


main()

"""croze's trainer: whole optimizer steps of a full fine-tune on samples that share nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

import common
import numpy as np
import torch
from common import cpu_s, emit, gemm_gflops
from croze_parts import DTYPES, declared

import croze
from croze.loop.build import build_model, build_trainer
from croze.train.algorithms import build
from croze.train.trainer import TorchTrainer
from croze.types import Batch, Sample


def batch(step: int, samples: int, tokens: int) -> Batch:
    """``samples`` sequences in which every one of ``tokens`` computed positions predicts a trained token."""
    stream = np.random.default_rng(step)
    made = []
    for i in range(samples):
        made.append(
            Sample(
                rollout_id=f"{step}-{i}",
                group_id=f"{step}-{i}",
                prompt_P=stream.integers(100, 20_000, 1).astype(np.int32),
                ids_S=stream.integers(100, 20_000, tokens).astype(np.int32),
                mask_S=np.ones(tokens, bool),
                logprobs_S=np.full(tokens, -10.0, np.float32),
                advantages_S=stream.normal(size=tokens).astype(np.float32),
                weights_S=np.full(tokens, 1 / (samples * tokens), np.float32),
            )
        )
    return Batch(step=step, samples=tuple(made))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--invariant", action="store_true", help="engine.invariant=true")
    for name, value in (("samples", 4), ("tokens", 128), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    run = declared(args.model, args.dtype, invariant=args.invariant)
    model = build_model(run)
    trainer = build_trainer(run, model, build(run.algo, run.sampling))
    model.thread.run_now(measure, args, trainer)
    model.thread.close()


def measure(args: argparse.Namespace, trainer: TorchTrainer) -> None:
    limits = {name: gemm_gflops(dtype) for name, dtype in common.DTYPES.items()}
    emit(
        "ready",
        croze=croze.__version__,
        torch=torch.__version__,
        gemm=limits,
        parameters=trainer.weights.arch.parameters,
    )
    for step in range(args.steps + 1):  # the first warms up
        work = batch(step, args.samples, args.tokens)
        before = cpu_s()
        stats = trainer.forward_backward(work)
        middle = cpu_s()
        trainer.step(step + 1)
        used = cpu_s() - before
        assert stats.tokens_computed == stats.tokens_trained == args.samples * args.tokens
        if step:
            emit("step", tokens=stats.tokens_trained, cpu_s=used, without_optimizer=middle - before)
    limits = {name: max(limits[name], gemm_gflops(dtype)) for name, dtype in common.DTYPES.items()}
    emit("limits", gemm=limits)


main()

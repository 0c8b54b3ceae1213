"""TRL's GRPOTrainer on the task of examples/calc.py: one line a step, for the bench to measure around."""

from __future__ import annotations

import argparse
import ast
import json
import operator
from pathlib import Path

import torch
import transformers
import trl
from common import DTYPES, emit, gemm_gflops
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


def value(node: ast.AST) -> float:
    """Arithmetic only; ValueError for anything else."""
    if isinstance(node, ast.Expression):
        return value(node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value(node.operand)
    raise ValueError("not arithmetic")


def correct(completions, answer, **_) -> list[float | None]:
    """1.0 for an expression of the right value, 0.1 for one that has a value, else 0."""
    return [
        score(messages[-1]["content"], wanted) for messages, wanted in zip(completions, answer, strict=True)
    ]


def score(reply: str, wanted: str) -> float:
    try:
        got = value(ast.parse(reply.strip(), mode="eval"))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return 0.0
    return 1.0 if got == float(wanted) else 0.1


class Steps(TrainerCallback):
    """Tells the bench that a step has ended."""

    def on_log(self, args, state, control, logs=None, **_) -> None:
        if logs and "reward" in logs:
            emit(
                "step",
                step=state.global_step,
                reward_mean=float(logs["reward"]),
                zero_variance=float(logs["frac_reward_zero_std"]),
                completion_length=float(logs["completions/mean_length"]),
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--tasks", type=Path, required=True, help="JSON lines with prompt and answer")
    parser.add_argument("--out", required=True)
    parser.add_argument(
        "--dtype", choices=DTYPES, required=True, help="bf16: autocast over fp32 weights, its default"
    )
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--microbatch", type=int, default=32)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--lr", type=float, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    emit(
        "ready",
        trl=trl.__version__,
        transformers=transformers.__version__,
        torch=torch.__version__,
        gemm=gemm_gflops(DTYPES[args.dtype]),
    )
    rows = [json.loads(line) for line in args.tasks.read_text().splitlines()]
    config = GRPOConfig(
        output_dir=args.out,
        use_cpu=True,
        bf16=args.dtype == "bf16",
        model_init_kwargs={"dtype": "float32"},
        gradient_checkpointing=args.checkpointing,
        per_device_train_batch_size=args.microbatch,
        gradient_accumulation_steps=32 // args.microbatch,
        num_generations=8,
        max_completion_length=12,
        temperature=1.0,
        learning_rate=args.lr,
        lr_scheduler_type="constant",
        max_steps=args.steps,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=correct,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Steps()],
    )
    trainer.train()
    emit("done")


main()

"""Measure pass@k on held-out tasks: of a task file's model, or of the newest weights of a run.

croze eval calc.py --tasks 64
croze eval runs/calc-7f3a --samples 8
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from croze.cli.output import Output, number
from croze.cli.progress import progress
from croze.config import parse_words
from croze.loop.load import load_run, load_trained


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="FILE|RUN", help="a task file or a run folder")
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides")
    parser.add_argument(
        "--tasks", type=positive, metavar="N", help="held-out tasks (default: loop.eval_tasks, else 64)"
    )
    parser.add_argument("--samples", type=positive, metavar="K", help="rollouts per task (default: 1)")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only the result")


def run(arguments: argparse.Namespace, output: Output) -> None:
    words = parse_words(arguments.words)
    target = Path(arguments.target)
    declared = (load_trained(target) if target.is_dir() else load_run(target)).override(words)
    from croze.loop.verbs import evaluate

    with progress(output, quiet=arguments.quiet) as show:
        result = evaluate(declared, tasks=arguments.tasks, samples=arguments.samples, on_event=show)
    if output.json:
        output.record(result)
    else:
        output.text(describe(result))


def positive(text: str) -> int:
    """An argument that counts things."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def describe(result: dict[str, Any]) -> str:
    """An evaluation as a line a person reads."""
    interval = f"[{number(result['low'])}, {number(result['high'])}]"
    line = f"pass@1 {number(result['pass_at_1'])} {interval}"
    k = result.get("k", 1)
    if k > 1:
        interval = f"[{number(result[f'low_at_{k}'])}, {number(result[f'high_at_{k}'])}]"
        line += f"  pass@{k} {number(result[f'pass_at_{k}'])} {interval}"
    return (
        f"{line}  reward {number(result.get('reward_mean'))}  {result['tasks']} tasks x {result['samples']}"
    )

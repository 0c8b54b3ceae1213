"""Measure pass@k on held-out tasks: of a task file's model, or of the newest weights of a run.

croze eval calc.py --tasks 64
croze eval runs/calc-7f3a --samples 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

from croze.cli.load import load_folder, load_run
from croze.cli.output import Output
from croze.cli.progress import progress
from croze.config import parse_words


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="FILE|RUN", help="a task file or a run folder")
    parser.add_argument("words", nargs="*", metavar="key=value", help="overrides")
    parser.add_argument(
        "--tasks", type=positive, metavar="N", help="held-out tasks (default: loop.eval_tasks)"
    )
    parser.add_argument("--samples", type=positive, metavar="K", help="rollouts per task (default: 1)")
    parser.add_argument("-q", "--quiet", action="store_true", help="print only the result")


def run(arguments: argparse.Namespace, output: Output) -> None:
    words = parse_words(arguments.words)
    target = Path(arguments.target)
    declared = (load_folder(target) if target.is_dir() else load_run(target)).override(words)
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


def describe(result: dict) -> str:
    """An evaluation as a line a person reads."""
    line = f"pass@1 {result['pass_at_1']:.3f} [{result['low']:.3f}, {result['high']:.3f}]"
    k = result.get("k", 1)
    if k > 1 and f"pass_at_{k}" in result:
        line += f"  pass@{k} {result[f'pass_at_{k}']:.3f}"
    return line + f"  {result.get('tasks', '?')} tasks x {result.get('samples', '?')} samples"

"""examples/calc.py judged as TRL's side judges here: in the reward process, by a parser, without a sandbox."""

import runpy
from pathlib import Path

import croze as cz
from croze.reward.expression import evaluate

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "calc.py"))


def correct(reply: str, answer: str) -> float:
    value = evaluate(reply)
    return 0.0 if value is None else 1.0 if value == int(answer) else 0.1


run = cz.Run(model=EXAMPLE["run"].model, tasks=EXAMPLE["run"].tasks, reward=correct)

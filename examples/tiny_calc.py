"""Teach a 0.8M-parameter model to write a calculation down. About a minute on a laptop: croze train tiny_calc.py"""

import random
from collections.abc import Iterator

import croze as cz
from croze.reward.expression import evaluate

SIGN = {"plus": "+", "minus": "-", "times": "*"}


def problems(seed: int) -> Iterator[dict[str, str]]:
    rng = random.Random(seed)
    while True:
        a, b, c = rng.randint(2, 30), rng.randint(2, 30), rng.randint(2, 9)
        first = {f"add {a} and {b}": a + b, f"subtract {a} from {b}": b - a, f"multiply {a} by {b}": a * b}
        words, then = rng.choice(list(first)), rng.choice(list(SIGN))
        yield {"prompt": f"{words}, {then} {c}=", "answer": str(evaluate(f"({first[words]}){SIGN[then]}{c}"))}


def correct(reply: str, answer: str) -> float:
    value = evaluate(reply)  # a parser, not eval: the model's text is never run
    return 1.0 if str(value) == answer else 0.1 * (value is not None)


run = cz.Run(
    name="tiny-calc",
    model="tiny-calc",
    tasks=cz.tasks(problems),
    reward=correct,
    steps=60,
    groups_per_step=8,
    group_size=8,
    sampling=cz.Sampling(max_tokens=12),
    optim=cz.Optim(lr=3e-4),
)

"""Teach a 0.8M-parameter model to write a calculation down. A minute on a laptop: croze train tiny_calc.py"""

import random
from collections.abc import Iterator

import croze as cz
from croze.reward.expression import evaluate

FIRST = [
    ("add {a} and {b}", "{a}+{b}"),
    ("subtract {a} from {b}", "{b}-{a}"),
    ("multiply {a} by {b}", "{a}*{b}"),
]
THEN = [("plus {c}", "+{c}"), ("minus {c}", "-{c}"), ("times {c}", "*{c}")]


def problems(seed: int) -> Iterator[dict[str, str]]:
    rng = random.Random(seed)
    while True:
        numbers = {"a": rng.randint(2, 30), "b": rng.randint(2, 30), "c": rng.randint(2, 9)}
        words, first = rng.choice(FIRST)
        more, second = rng.choice(THEN)
        solution = f"({first}){second}".format(**numbers)
        yield {"prompt": f"{words}, {more}=".format(**numbers), "answer": str(evaluate(solution))}


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

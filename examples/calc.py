"""Teach a 135M-parameter model to call a calculator: its reply is Python, run in a sandbox. croze train calc.py"""

import random
from collections.abc import Iterator

import croze as cz

SHOTS = [
    {"role": "system", "content": "Reply with Python."},
    {"role": "user", "content": "add 3 and 4, times 2"},
    {"role": "assistant", "content": "(3 + 4) * 2"},
    {"role": "user", "content": "9 times 2"},
    {"role": "assistant", "content": "9 * 2"},
]


def problems(seed: int) -> Iterator[dict]:
    rng = random.Random(seed)
    while True:
        a, b, c = rng.randint(2, 30), rng.randint(2, 30), rng.randint(2, 9)
        question = {"role": "user", "content": f"add {a} and {b}, times {c}"}
        yield {"prompt": [*SHOTS, question], "answer": str((a + b) * c)}


async def correct(reply: str, answer: str, sandbox: cz.Sandbox) -> float:
    result = await sandbox.exec_python(f"print({reply})")  # the model's own code runs isolated
    return 1.0 if result.text.strip() == answer else 0.1 * (result.exit_code == 0)


run = cz.Run(
    model="smollm2-135m-instruct",
    tasks=cz.tasks(problems),
    reward=correct,
    steps=30,
    groups_per_step=4,
    group_size=8,
    sampling=cz.Sampling(max_tokens=12),
    optim=cz.Optim(lr=2e-5),
)

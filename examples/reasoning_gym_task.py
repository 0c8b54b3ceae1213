"""Train on a reasoning-gym dataset, graded by its own scorer: pip install 'croze[gym]', then croze train this file."""

import re
from collections.abc import Iterator

import reasoning_gym

import croze as cz

DATASET = "chain_sum"
DIFFICULTY = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
SHOTS = [
    {"role": "user", "content": "State the final answer to the following arithmetic problem: 2 + 3 ="},
    {"role": "assistant", "content": "5"},
]


def problems(seed: int) -> Iterator[dict]:
    for entry in reasoning_gym.create_dataset(DATASET, size=500, seed=seed, **DIFFICULTY):
        question = {"role": "user", "content": entry["question"]}
        yield {"prompt": [*SHOTS, question], "entry": entry}


def graded(reply: str, entry: dict) -> dict[str, float]:
    number = re.search(r"-?\d+", reply)
    score = reasoning_gym.get_score_answer_fn(DATASET)(number.group() if number else "", entry)
    return {"right": float(score), "short": 0.1 * (len(reply.strip()) <= 3)}


run = cz.Run(
    model="smollm2-135m-instruct",
    tasks=cz.tasks(problems),
    reward=graded,
    steps=40,
    groups_per_step=8,
    group_size=8,
    sampling=cz.Sampling(max_tokens=6),
    optim=cz.Optim(lr=1e-5),
)

"""Two steps of a training on prompts of random letters: MODEL RUN_DIR LETTERS KEY=VALUE..."""

from __future__ import annotations

import functools
import json
import random
import sys
from collections.abc import Iterator

import croze as cz
from croze.types import Rollout


def prompts(seed: int, letters: int) -> Iterator[dict[str, str]]:
    """Random letters with spaces between, so that prompts share no beginning."""
    rng = random.Random(seed)
    while True:
        yield {"prompt": " ".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=letters))}


def uneven(rollout: Rollout) -> float:
    """Siblings differ in it, whatever the model says."""
    return float(int(rollout.ids_T.sum()) % 7)


def declared(model: str, folder: str, letters: int, words: list[str]) -> cz.Run:
    tasks = cz.tasks(functools.partial(prompts, letters=letters))
    run = cz.Run(model=model, tasks=tasks, reward=uneven, steps=2, dir=folder)
    return run.override(dict(word.split("=", 1) for word in words))


def main() -> None:
    model, folder, letters, *words = sys.argv[1:]
    run = declared(model, folder, int(letters), words)
    cz.train(run, on_event=lambda event: print(json.dumps(event, default=str), flush=True))


if __name__ == "__main__":
    main()

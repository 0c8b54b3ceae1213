"""Does the loop learn, or did one seed? examples/tiny_calc.py under ten seeds: reward curves and when they reach 0.9.

python bench/seeds.py [--seeds 10] [--steps 60] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "tiny_calc.py"
WINDOW, GOAL = 5, 0.9
MARKS = "▁▂▃▄▅▆▇█"


def curve(seed: int, steps: int) -> tuple[list[float], float]:
    """Rewards of a run, and its wall seconds, start-up included."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"seed={seed}", f"steps={steps}", "engine.threads=1", f"run.dir={folder}/run"]
        start = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "croze", "train", str(EXAMPLE), "--json", *words],
            capture_output=True,
            text=True,
            check=True,
        )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    return [e["reward_mean"] for e in events if e["event"] == "step"], time.monotonic() - start


def reached(rewards: list[float]) -> int | None:
    """The first step at which the mean of the last WINDOW rewards is GOAL."""
    for end in range(WINDOW, len(rewards) + 1):
        if sum(rewards[end - WINDOW : end]) / WINDOW >= GOAL:
            return end
    return None


def spark(rewards: list[float]) -> str:
    """A curve in characters, two steps each, from 0 to 1."""
    pairs = [sum(rewards[i : i + 2]) / len(rewards[i : i + 2]) for i in range(0, len(rewards), 2)]
    return "".join(MARKS[min(len(MARKS) - 1, int(p * len(MARKS)))] for p in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows = []
    names = (
        "seed",
        f"first {WINDOW}",
        f"{WINDOW}-step mean ≥ {GOAL} at step",
        f"last {WINDOW}",
        "s",
        "curve",
    )
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}")
    for seed in range(chosen.seeds):
        rewards, seconds = curve(seed, chosen.steps)
        first, last = sum(rewards[:WINDOW]) / WINDOW, sum(rewards[-WINDOW:]) / WINDOW
        rows.append({"seed": seed, "rewards": rewards, "seconds": seconds, "reached": reached(rewards)})
        print(
            f"| {seed} | {first:.2f} | {reached(rewards) or '-'} | {last:.2f} | {seconds:.0f} | {spark(rewards)} |",
            flush=True,
        )
    print(f"\n{sum(r['reached'] is not None for r in rows)} of {len(rows)} seeds reach {GOAL}.")
    if chosen.json:
        chosen.json.write_text(json.dumps({"bench": "seeds", "rows": rows}))


if __name__ == "__main__":
    main()

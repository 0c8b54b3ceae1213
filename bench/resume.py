"""What a kill costs and a checkpoint takes: the tiny example killed and resumed, and saves of a 135M-parameter model.

python bench/resume.py [--only kills|saves] [--json FILE]
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import machine, parser, report, save, table

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny_calc.py"
DYING = ROOT / "tests" / "dying.py"
STEPS, EVERY = 12, 5
SAVED = 3
"""Saves of the large model that are measured, each during a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """SIGKILL to the process group ``when`` ("before" or "after") the ``nth`` call of ``at``; ``name`` for people."""

    name: str
    at: str
    when: str
    nth: int


KILLS = (
    Kill(name="declared, nothing loaded", at="croze.loop.folder:RunFolder.write", when="after", nth=1),
    Kill(name="model being built", at="croze.loop.build:build_model", when="before", nth=1),
    Kill(name="first rollouts under way", at="croze.loop.ledger:SqliteLedger.dispatch", when="after", nth=1),
    Kill(
        name="step 8, half generated",
        at="croze.loop.ledger:SqliteLedger.finish",
        when="after",
        nth=7 * 64 + 32,
    ),
    Kill(name="step 8, all generated", at="croze.loop.learning:Learning.learn", when="before", nth=8),
    Kill(name="step 8, before the update", at="croze.train.optimizer:AdamW.step", when="before", nth=8),
    Kill(name="step 8, after the update", at="croze.train.optimizer:AdamW.step", when="after", nth=8),
    Kill(name="step 8, published", at="croze.sync.identity:Identity.of", when="after", nth=9),
    Kill(name="step 8, committed", at="croze.loop.ledger:SqliteLedger.settle", when="after", nth=8),
    Kill(name="step 10, to be saved", at="croze.train.state:StateSnapshot.write", when="before", nth=2),
    Kill(
        name="step 10, state written", at="croze.train.state:StateSnapshot.write", when="after", nth=2
    ),
    Kill(name="step 10, no manifest yet", at="croze.loop.checkpoints:_write_durably", when="before", nth=2),
    Kill(name="step 10, not yet renamed", at="croze.loop.checkpoints:_write_durably", when="after", nth=2),
    Kill(name="last save", at="croze.loop.checkpoints:_write_durably", when="before", nth=3),
    Kill(name="done, not told", at="croze.loop.training:result", when="before", nth=1),
)


def croze(*words: str, kill: Kill | None = None) -> tuple[list[dict[str, Any]], float]:
    """The events of ``croze WORDS --json``, and its wall seconds; with ``kill`` it must die of that."""
    start = [sys.executable, "-m", "croze"]
    if kill is not None:
        start = [sys.executable, str(DYING), kill.at, kill.when, str(kill.nth), "SIGKILL"]
    began = time.monotonic()
    done = subprocess.run(
        [*start, *words, "--json"],
        capture_output=True,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    wanted = 0 if kill is None else -signal.SIGKILL
    if done.returncode != wanted:
        raise SystemExit(f"croze {words[0]} ended with {done.returncode}, not {wanted}: {done.stderr[-2000:]}")
    return [json.loads(line) for line in done.stdout.splitlines()], time.monotonic() - began


def kills() -> list[dict[str, Any]]:
    """Each kill and its resume against a run that was left alone. Seconds lost: both parts together, less that run."""
    words = ("train", str(EXAMPLE), f"steps={STEPS}", f"loop.checkpoint_every={EVERY}", "engine.threads=1")
    with tempfile.TemporaryDirectory() as folder:
        whole, alone_s = croze(*words, f"run.dir={folder}/whole")
        rows = []
        for number, kill in enumerate(KILLS):
            run = f"{folder}/{number}"
            _, killed_s = croze(*words, f"run.dir={run}", kill=kill)
            events, resumed_s = croze("resume", run)
            again = [e["again_steps"] for e in events if e["event"] == "resume"]
            rows.append(
                {
                    "killed": kill.name,
                    "same weights id": "yes" if events[-1]["weights_id"] == whole[-1]["weights_id"] else "NO",
                    "steps made again": again[0] if again else 0,
                    "s lost": killed_s + resumed_s - alone_s,
                }
            )
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def saves() -> list[dict[str, Any]]:
    """A checkpoint of the 135M-parameter model after every step: what each holds up, and takes beside the next."""
    words = ("model=smollm2-135m-instruct", "groups_per_step=2", "group_size=4", "engine.threads=1")
    with tempfile.TemporaryDirectory() as folder:
        events, _ = croze(
            "train",
            str(EXAMPLE),
            f"run.dir={folder}/run",
            f"steps={SAVED + 1}",
            "loop.checkpoint_every=1",
            *words,
        )
    steps = {e["step"]: e for e in events if e["event"] == "step"}
    told = {e["step"]: e for e in events if e["event"] == "save"}
    return [
        {
            "after step": step,
            "MB": told[step]["bytes"] / 1e6,
            "s to write": told[step]["seconds"],
            "s to begin": told[step]["blocked_s"],
            "s the update waited": steps[step + 1]["save_wait_s"],
            "s training stood still": told[step]["blocked_s"] + steps[step + 1]["save_wait_s"],
            "s of the step beside": steps[step + 1]["step_s"],
        }
        for step in range(1, SAVED + 1)
    ]


def columns(rows: Sequence[dict[str, Any]]) -> list[str]:
    return list(rows[0]) if rows else []


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", choices=("kills", "saves"))
    chosen, started = options.parse_args(), machine()
    killed = kills() if chosen.only != "saves" else []
    saved = saves() if chosen.only != "kills" else []
    report("resume", started, columns(killed or saved), killed or saved)
    if killed and saved:
        table(columns(saved), saved)
    save(chosen.json, "resume", started, {"kills": killed, "saves": saved})


if __name__ == "__main__":
    main()

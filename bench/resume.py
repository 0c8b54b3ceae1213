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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness import machine, parser, report, save, table

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny_calc.py"
DYING = ROOT / "tests" / "dying.py"
STEPS, EVERY = 12, 5
SAVED = 3
"""Saves of the large model that are measured, each during a step."""


class Kill(NamedTuple):
    """SIGKILL to the process group ``when`` ("before" or "after") the ``nth`` call of ``at``, in the course of
    ``step``; ``name`` for people."""

    name: str
    step: int
    when: str
    at: str
    nth: int


KILLS = (
    Kill("declared, nothing loaded", 0, "after", "croze.loop.folder:RunFolder.write", 1),
    Kill("model being built", 0, "before", "croze.loop.build:build_model", 1),
    Kill("first rollouts under way", 1, "after", "croze.loop.ledger:SqliteLedger.dispatch", 1),
    Kill("half generated", 8, "after", "croze.loop.ledger:SqliteLedger.finish", 7 * 64 + 32),
    Kill("all generated", 8, "before", "croze.loop.learning:Learning.learn", 8),
    Kill("before the update", 8, "before", "croze.train.optimizer:AdamW.step", 8),
    Kill("after the update", 8, "after", "croze.train.optimizer:AdamW.step", 8),
    Kill("published", 8, "after", "croze.sync.identity:Identity.of", 9),
    Kill("committed", 8, "after", "croze.loop.ledger:SqliteLedger.settle", 8),
    Kill("to be saved", 10, "before", "croze.train.state:StateSnapshot.write", 2),
    Kill("state written, no model", 10, "after", "croze.train.state:StateSnapshot.write", 2),
    Kill("no manifest yet", 10, "before", "croze.loop.checkpoints:_write_durably", 2),
    Kill("not yet renamed", 10, "after", "croze.loop.checkpoints:_write_durably", 2),
    Kill("in the last save", 12, "before", "croze.loop.checkpoints:_write_durably", 3),
    Kill("done, not told", 12, "before", "croze.loop.training:result", 1),
)


def croze(*words: str, kill: Kill | None = None) -> tuple[list[dict[str, Any]], float]:
    """The events of ``croze WORDS --json``, and the CPU seconds it took; with ``kill`` it must die of that."""
    start = [sys.executable, "-m", "croze"]
    if kill is not None:
        start = [sys.executable, str(DYING), kill.at, kill.when, str(kill.nth), "SIGKILL"]
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*start, *words, "--json"],
            stdout=out,
            stderr=errors,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wanted = 0 if kill is None else -signal.SIGKILL
        if process.returncode != wanted:
            said = os.pread(errors.fileno(), 1 << 20, 0).decode()[-2000:]
            raise SystemExit(f"croze {words[0]} ended with {process.returncode}, not {wanted}: {said}")
        out.seek(0)
        return [json.loads(line) for line in out], used.ru_utime + used.ru_stime


def kills() -> list[dict[str, Any]]:
    """Each kill and its resume against a run that was left alone. To be where it was: CPU seconds of the second
    process, its start included, less those of the steps that come after the one that was killed."""
    words = ("train", str(EXAMPLE), f"steps={STEPS}", f"loop.checkpoint_every={EVERY}", "engine.threads=1")
    with tempfile.TemporaryDirectory() as folder:
        whole, _ = croze(*words, f"run.dir={folder}/whole")
        rows = []
        for number, kill in enumerate(KILLS):
            run = f"{folder}/{number}"
            croze(*words, f"run.dir={run}", kill=kill)
            events, cpu_s = croze("resume", run)
            again = [e["again_steps"] for e in events if e["event"] == "resume"]
            later = [e["cpu_s"] for e in events if e["event"] == "step" and e["step"] > kill.step]
            rows.append(
                {
                    "killed in step": kill.step,
                    "when": kill.name,
                    "same weights id": "yes" if events[-1]["weights_id"] == whole[-1]["weights_id"] else "NO",
                    "whole steps made again": again[0] if again else 0,
                    "CPU-s to be where it was": cpu_s - sum(later),
                }
            )
    return rows


def saves() -> list[dict[str, Any]]:
    """A checkpoint of the 135M-parameter model every other step: what each holds up, and takes beside the next."""
    with tempfile.TemporaryDirectory() as folder:
        events, _ = croze(
            "train",
            str(ROOT / "examples" / "calc.py"),
            f"run.dir={folder}/run",
            f"steps={2 * SAVED + 1}",
            "loop.checkpoint_every=2",
            "engine.threads=1",
            "sandbox.allow_unsafe=true",
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
        for step in range(2, 2 * SAVED + 1, 2)
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

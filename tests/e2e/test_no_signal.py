"""A run that learns nothing, or whose replies never end, says so once, with the likely cause."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bad_inputs import rewarded, train

ENDS = ("sampling.max_tokens=40",)
CASES = {
    "all zero": ("return 0.0", ENDS, "no_signal.zero", "reward bad (", "croze trace run"),
    "all right": ("return 1.0", ENDS, "no_signal.solved", "tasks", "harder tasks"),
    "all alike": ("return 0.3", ENDS, "no_signal.constant", "reward bad (", "`reply`"),
    "no scores": ("return None", ENDS, "no_signal.unscored", "reward bad (", "run/faults.jsonl"),
    "by task": ("return n % 2", ENDS, "no_signal.by_task", "tasks", "group_size"),
    "one reply": ("return 0.0", (*ENDS, "sampling.temperature=0.001"), "no_signal.identical", "temperature", "raise"),
    "too short": ("return 0.0", ("sampling.max_tokens=2",), "replies.cut", "max_tokens", "raise sampling.max_tokens"),
    "stop": ("return 0.0", ("sampling.max_tokens=2", "sampling.stop=END"), "replies.cut", "sampling.stop", "hold"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_nothing_to_learn_from_is_told_once_with_its_cause(tmp_path: Path, name: str):
    body, words, kind, where, fix = CASES[name]
    answer = train(tmp_path, rewarded(body, "reply, n"), "run.dir=run", "steps=5", *words)
    assert answer.code == 0, (answer.events, answer.stderr)
    (told,) = answer.warnings()
    assert (told["kind"], told["step"]) == (kind, 3)
    assert where in told["where"] and fix in told["fix"] and "3 steps" in told["message"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "faults.jsonl").read_text().splitlines()]
    assert [line for line in lines if line.get("event") == "warning"] == [told]


def test_a_run_that_learns_is_told_nothing(tmp_path: Path):
    answer = train(tmp_path, rewarded("return len(reply) % 2"), "steps=5", "group_size=8", *ENDS)
    assert answer.code == 0 and answer.warnings() == []
    assert any(step["groups_trained"] for step in answer.steps())


def test_a_person_reads_it_as_they_read_an_error(tmp_path: Path):
    (tmp_path / "task.py").write_text(rewarded("return 0.0", "reply"))
    words = ["train", "task.py", "steps=3", "sampling.max_tokens=40"]
    done = subprocess.run(
        [sys.executable, "-m", "croze.cli.main", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0
    at = done.stdout.index("warning[no_signal.zero]: nothing to learn from in 3 steps: every reply scores 0;")
    assert "\n  where: reward bad (" in done.stdout[at:] and "\n  do:    read them: croze" in done.stdout[at:]

"""Every example trains a few steps through the command line, as a user would run it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))
PINNED = {
    "step",
    "reward_mean",
    "reward_std",
    "kl_rollout",
    "tokens",
    "tokens_per_cpu_s",
    "step_s",
    "phase_s",
    "valid",
    "infra_faults",
    "weights_id",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_trains(example: Path, tmp_path: Path) -> None:
    words = [
        "steps=2",
        "groups_per_step=2",
        "group_size=4",
        "engine.threads=1",
        f"run.dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "croze", "train", str(example), "--json", *words],
        capture_output=True,
        text=True,
        timeout=400,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    steps = [e for e in events if e["event"] == "step"]
    assert [e["step"] for e in steps] == [1, 2]
    for event in steps:
        assert event.keys() >= PINNED
        assert event["phase_s"].keys() == {"generate", "reward", "train", "sync", "save"}
        assert event["valid"] == 1.0 and event["infra_faults"] == 0
        assert event["max_logprob_gap"] in (None, 0.0), "sampler and trainer must agree bit for bit"
    assert events[-1] == {
        "event": "done",
        "run_dir": str(tmp_path / "run"),
        "weights_id": steps[-1]["weights_id"],
    }


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_short(example: Path) -> None:
    lines = [line for line in example.read_text().splitlines() if line.strip()]
    assert len(lines) <= 40

"""A whole run of the tiny model through the command line: train, eval, trace, interrupt."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

CROZE = [sys.executable, "-m", "croze.cli.main"]
FILE = """
import random
import croze as cz

def problems(seed):
    rng = random.Random(seed)
    while True:
        a, b, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
        yield {"prompt": f"add {a} and {b}, times {c}", "answer": str((a + b) * c)}

def right(reply: str, answer: str) -> float:
    print("from the reward")
    return len(reply) % 3 / 2

run = cz.Run(model="tiny-calc", tasks=cz.tasks(problems), reward=right, steps=2, group_size=4, groups_per_step=2)
"""
STEP_KEYS = {
    "event", "step", "reward_mean", "reward_std", "kl_rollout", "tokens", "tokens_per_cpu_s", "step_s", "phase_s",
    "valid", "infra_faults", "weights_id",
}  # fmt: skip


def croze(*words: str, cwd: Path) -> list[dict]:
    done = subprocess.run([*CROZE, *words, "--json"], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, list[dict]]:
    folder = tmp_path_factory.mktemp("cli-run")
    (folder / "tiny.py").write_text(FILE)
    return folder, croze(
        "train", "tiny.py", "run.dir=here", "loop.eval_tasks=3", "sampling.max_tokens=8", cwd=folder
    )


def test_train_tells_what_is_pinned(trained):
    folder, events = trained
    assert [e["event"] for e in events] == ["start", "eval", "step", "step", "eval", "save", "done"]
    for step in (e for e in events if e["event"] == "step"):
        assert step.keys() >= STEP_KEYS
        assert step["phase_s"].keys() == {"generate", "reward", "train", "sync", "save"}
        assert step["valid"] == 1.0 and step["infra_faults"] == 0
    assert events[-1].keys() == {"event", "run_dir", "weights_id"}
    assert events[-1]["weights_id"] == events[3]["weights_id"]
    kept = [json.loads(line) for line in (folder / "here" / "metrics.jsonl").read_text().splitlines()]
    assert [e for e in kept if e["event"] == "step"] == [e for e in events if e["event"] == "step"]


def test_eval_measures_the_newest_weights_of_the_folder(trained):
    folder, events = trained
    (result,) = croze("eval", "here", "--tasks", "3", "--samples", "2", cwd=folder)
    assert (result["event"], result["tasks"], result["samples"], result["k"]) == ("eval", 3, 2, 2)
    assert 0 <= result["low"] <= result["pass_at_1"] <= result["high"] <= 1
    assert result["weights_id"] == events[-1]["weights_id"]


def test_trace_shows_the_run(trained):
    folder, events = trained
    rows = croze("trace", "here", cwd=folder)
    assert len(rows) == 16 and {r["step"] for r in rows} == {1, 2}
    assert sum(r["generated_tokens"] for r in rows) == sum(
        e["tokens"] for e in events if e["event"] == "step"
    )
    tokens = croze("trace", "here", rows[0]["rollout_id"], "--tokens", cwd=folder)
    said = "".join(t["text"] for t in tokens if t["producer"] == "model")
    assert said.startswith(rows[0]["reply"]) and sum(t["mask"] for t in tokens) == rows[0]["generated_tokens"]
    (orphans,) = croze(
        "trace", "here", "--sql",
        "SELECT count(*) AS n FROM spans WHERE enabler_span_id NOT IN (SELECT span_id FROM spans)", cwd=folder,
    )  # fmt: skip
    assert orphans == {"n": 0}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_so_and_leaves_no_process(trained, tmp_path, number):
    (tmp_path / "tiny.py").write_text(FILE)
    words = [*CROZE, "train", "tiny.py", "steps=100000", "run.dir=stopped", "--json"]
    with subprocess.Popen(
        words,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "step":
                break
        process.send_signal(number)
        last = json.loads(process.stdout.read().splitlines()[-1])
        assert process.wait(20) == 4
    assert (last["event"], last["kind"]) == ("error", "interrupted")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)

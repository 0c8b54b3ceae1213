"""``croze stop``: the run that is meant and no other process, in order or at once."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from croze.cli import stop
from croze.loop.status import status
from run_folders import claimed, held, interrupted, saved

CROZE = [sys.executable, "-m", "croze.cli.main"]
FILE = """
import croze as cz

def problems(seed):
    while True:
        yield {"prompt": "add 2 and 3, times 4=", "answer": "20"}

def right(reply: str, answer: str) -> float:
    return len(reply) % 3 / 2

run = cz.Run(model="tiny-calc", tasks=cz.tasks(problems), reward=right, steps=10_000, group_size=4, groups_per_step=1)
"""


def croze(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CROZE, *words], cwd=cwd, capture_output=True, text=True, timeout=120)


def state(path: Path) -> str:
    found = status(path)
    assert found is not None
    return found.state


def test_a_training_run_saves_and_says_how_to_go_on(tmp_path):
    (tmp_path / "task.py").write_text(FILE)
    words = ["train", "task.py", "--json", "run.dir=runs/one", "engine.threads=1", "engine.self_check=false"]
    with subprocess.Popen([*CROZE, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if json.loads(line)["event"] == "step":
                break
        done = croze("stop", "one", "--json", cwd=tmp_path)
        assert process.wait(60) == 4
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["pid"] == process.pid and told["signals"] == ["SIGINT"] and told["state"] == "interrupted"
    assert told["resume"] == "croze resume runs/one"
    assert told["step"] == told["checkpoint"] >= 1 and told["steps"] == 10_000
    done = croze("stop", "one", cwd=tmp_path)
    assert done.returncode == 0
    step = told["step"]
    said = f"it was not running: interrupted, step {step} of 10000, saved at step {step}"
    assert done.stdout == f"{said}\n  croze resume runs/one\n"


@pytest.fixture
def run_folder(tmp_path) -> Path:
    return tmp_path / "runs" / "calc-7f3a"


def test_the_only_one_that_runs(tmp_path, run_folder):
    interrupted(tmp_path / "runs" / "other")
    with held(run_folder) as process:
        done = croze("stop", cwd=tmp_path)
        assert done.returncode == 0 and process.wait(10) == 4
    lines = done.stdout.splitlines()
    assert (
        lines[0] == f"asking process {process.pid} to save and end; waiting at most 300 s for runs/calc-7f3a"
    )
    assert lines[1] == "stopped: interrupted, step 0 of 9"
    assert "cz.resume('runs/calc-7f3a', run)" in lines[2], "it was made in Python"
    done = croze("stop", cwd=tmp_path)
    assert done.returncode == 2 and "nothing is running under runs/" in done.stderr


def test_of_two_one_must_be_named(tmp_path, run_folder):
    with held(run_folder) as one, held(tmp_path / "runs" / "calc-8") as two:
        done = croze("stop", cwd=tmp_path)
        assert done.returncode == 2 and "calc-7f3a" in done.stderr and "calc-8" in done.stderr
        assert croze("stop", "calc", cwd=tmp_path).returncode == 2
        assert one.poll() is None and two.poll() is None


def test_nothing_that_runs_is_as_it_was_wanted(tmp_path, run_folder):
    saved(interrupted(run_folder), 9)
    done = croze("stop", "calc", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert (
        done.returncode == 0
        and told["state"] == "finished"
        and told["resume"] is None
        and told["pid"] is None
    )


def test_a_folder_that_is_no_run(tmp_path):
    (tmp_path / "folder").mkdir()
    for words in (["absent"], ["folder"], ["folder", "--timeout", "0"], ["folder", "--timeout", "nan"]):
        assert croze("stop", *words, cwd=tmp_path).returncode == 2


def test_one_that_does_not_listen(tmp_path, run_folder):
    with held(run_folder, SIGINT="hear") as process:
        done = croze("stop", "calc", "--timeout", "0.3", "--json", cwd=tmp_path)
        error = json.loads(done.stdout)
        assert done.returncode == 3 and error["kind"] == "wait" and "--now" in error["fix"]
        assert process.poll() is None and state(run_folder) == "running"
        done = croze("stop", "calc", "--now", "--timeout", "1.2", "--json", cwd=tmp_path)
        told = json.loads(done.stdout)
        assert done.returncode == 0 and process.wait(5) == -signal.SIGKILL
        assert told["signals"][:2] == ["SIGINT", "SIGINT"] and told["signals"][-1] == "SIGKILL"
        assert told["state"] == "dead" and told["resume"]


def test_one_that_was_started_in_the_background(tmp_path, run_folder):
    """A shell without job control has it ignore SIGINT."""
    with held(run_folder, SIGINT="ignore", SIGTERM="leave") as process:
        told = json.loads(croze("stop", "calc", "--json", cwd=tmp_path).stdout)
        assert told["signals"] == ["SIGTERM"] and process.wait(5) == 4


def test_a_number_that_was_given_to_another_is_never_signalled(tmp_path, run_folder):
    interrupted(run_folder)
    with subprocess.Popen(["sleep", "600"]) as other:
        try:
            signature = json.dumps({"pid": other.pid, "host": os.uname().nodename, "since": time.time()})
            with claimed(run_folder, signature):
                for words in ([], ["--now", "--timeout", "0.5"]):
                    done = croze("stop", "calc", *words, cwd=tmp_path)
                    assert done.returncode == 2 and "does not hold the run" in done.stderr
            assert other.poll() is None
        finally:
            other.kill()


@pytest.mark.parametrize("pid", [1, 0, -1, 2**22 + 1, 10**30])
def test_signatures_that_name_nobody(pid, tmp_path, run_folder):
    interrupted(run_folder)
    with claimed(run_folder, json.dumps({"pid": pid, "host": os.uname().nodename, "since": 1.0})) as process:
        done = croze("stop", "calc", "--timeout", "0.2", cwd=tmp_path)
        assert done.returncode in (0, 2, 3) and "Traceback" not in done.stderr
        assert process.poll() is None


def test_a_run_of_another_host(tmp_path, run_folder):
    interrupted(run_folder)
    with claimed(run_folder, json.dumps({"pid": os.getpid(), "host": "elsewhere", "since": 1.0})):
        done = croze("stop", "calc", cwd=tmp_path)
        assert (
            done.returncode == 2
            and "on elsewhere" in done.stderr
            and "do:    on elsewhere: croze" in done.stderr
        )


def test_a_handle_is_of_one_process_for_ever():
    with subprocess.Popen(["sleep", "600"]) as process, stop.Process(process.pid) as handle:
        assert handle.there and handle.ignores(signal.SIGINT) is False
        process.kill()
        process.wait()
        assert not handle.send(signal.SIGINT)
    with stop.Process(2**22 + 1) as nobody:
        assert not nobody.there

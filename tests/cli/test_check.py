"""``croze check`` as a user and a program meet it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from croze.loop.folder import RunFolder
from croze.run import Run

CROZE = [sys.executable, "-m", "croze.cli.main", "check"]
KEYS = {"check", "kind", "status", "message", "where", "fix"}
CHECKS = {
    "values",
    "declaration",
    "tasks",
    "columns",
    "isolation",
    "machine",
    "model",
    "tokenizer",
    "prompts",
}
CHECKS |= {"shape", "disk", "reward", "memory"}
FINE = """
import croze as cz
print("loaded")

def problems(seed):
    import random
    rng = random.Random(seed)
    while True:
        n = rng.randint(0, 9999)
        yield {"prompt": f"{n}+1=", "answer": str(n + 1)}

def right(reply, answer):
    print("called")
    return float(reply == answer)

run = cz.Run(model="tiny-calc", tasks=cz.tasks(problems), reward=right, steps=3)
"""


@pytest.fixture
def fine(tmp_path) -> Path:
    (tmp_path / "task.py").write_text(FINE)
    return tmp_path


def croze(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CROZE, *words], cwd=cwd, capture_output=True, text=True, timeout=100)


def findings(stdout: str) -> list[dict]:
    """It is one line: a list of findings, failures first."""
    (line,) = stdout.splitlines()
    found = json.loads(line)
    assert isinstance(found, list) and all(f.keys() == KEYS for f in found)
    order = [("fail", "warn", "ok").index(f["status"]) for f in found]
    assert order == sorted(order)
    assert all(f["message"] and f["kind"] for f in found)
    assert "Traceback" not in stdout
    return found


def test_a_run_that_is_fine(fine):
    done = croze("task.py", "--json", cwd=fine)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {f["check"] for f in findings(done.stdout)} == CHECKS
    assert not (fine / "runs").exists(), "nothing is started"


def test_text_is_a_table_with_failures_first(fine):
    done = croze("task.py", "group_size=1", "engine.threads=900", cwd=fine)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    lines = lines[lines.index("loaded") + 1 :]
    assert lines[0].startswith("FAIL  declaration") and lines[1].split()[0] == "where:"
    assert lines[2].split()[0] == "do:"
    assert lines[-1].endswith("1 failed")
    assert [line for line in lines if line.startswith("warn  machine")]


def test_a_users_exception_is_told_as_type_text_and_place(fine):
    (fine / "task.py").write_text(FINE.replace("n = rng", "n = {}[seed]; rng"))
    done = croze("task.py", "--json", cwd=fine)
    assert done.returncode == 1
    (failed,) = (f for f in findings(done.stdout) if f["status"] == "fail")
    assert (failed["check"], failed["kind"]) == ("tasks", "tasks")
    assert "KeyError: " in failed["message"] and failed["where"] == f"{fine / 'task.py'}:9"


def test_a_run_folder_and_strict(fine):
    file = fine / "task.py"
    run = Run(model="tiny-calc", tasks=[], reward=print, dir=str(fine / "run"), file=str(file))
    with RunFolder.create(run)[0]:
        done = croze("run", "--json", cwd=fine)
        assert done.returncode == 1 and "in use by process" in findings(done.stdout)[0]["message"]
    done = croze("run", "--json", cwd=fine)
    assert done.returncode == 0 and {f["status"] for f in findings(done.stdout)} == {"warn", "ok"}
    assert croze("run", "--strict", cwd=fine).returncode == 1
    file.write_text(FINE + "# changed")
    done = croze("run", "--json", cwd=fine)
    assert done.returncode == 1 and findings(done.stdout)[0]["check"] == "file"


@pytest.mark.parametrize(
    ("text", "kind", "said", "where"),
    [
        ("import croze as cz\n", "declaration", "declares no Run", "task.py"),
        (
            FINE + "other = cz.Run(model='m', tasks=[], reward=right)\n",
            "declaration",
            "several Runs",
            "task.py",
        ),
        ("x = 1\ny = 1 / 0\n", "declaration", "ZeroDivisionError: division by zero", "task.py:2"),
        ("def f(:\n", "declaration", "SyntaxError", "task.py:1"),
        (FINE.replace("steps=3", "stpes=3"), "declaration", "stpes", "task.py:16"),
        (FINE.replace("steps=3", "steps='3'"), "config", "steps", "task.py:16"),
        ("import no_such_module\n", "declaration", "no_such_module", "task.py:1"),
        (FINE.replace("reward=right", "reward=3"), "declaration", "must be a function", "task.py:16"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_one_failed_check_and_ends_with_2(tmp_path, text, kind, said, where):
    (tmp_path / "task.py").write_text(text)
    done = croze("task.py", "--json", cwd=tmp_path)
    assert done.returncode == 2
    (found,) = findings(done.stdout)
    assert (found["check"], found["kind"], found["status"]) == ("declaration", kind, "fail")
    assert said in found["message"] and where in found["where"]


def test_every_wrong_override_is_told(fine):
    done = croze("task.py", "steps=many", "optim.lrr=1", "group_size=4", "--json", cwd=fine)
    assert done.returncode == 2
    steps, rate = findings(done.stdout)
    assert steps["kind"] == rate["kind"] == "config"
    assert "wants a whole number" in steps["message"] and "'optim.lr'" in rate["fix"]


def test_a_missing_file_is_told(fine):
    done = croze("taks.py", "--json", cwd=fine)
    assert done.returncode == 2
    (found,) = findings(done.stdout)
    assert "no such task file" in found["message"] and "task.py" in found["fix"]


@pytest.mark.parametrize(
    "words", [[], ["task.py", "--no-such-option"], [".", "steps=3"], [".", "--rehearse"]]
)
def test_wrong_use_is_an_error_and_no_finding(fine, words):
    done = croze(*words, "--json", cwd=fine)
    assert done.returncode == 2
    assert json.loads(done.stdout)["kind"] == "usage"


def test_a_folder_that_is_no_run(fine):
    done = croze(".", "--json", cwd=fine)
    assert done.returncode == 2
    assert findings(done.stdout)[0]["check"] == "folder" and findings(done.stdout)[0]["status"] == "fail"

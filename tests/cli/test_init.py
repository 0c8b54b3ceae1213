"""``croze init``: task files that run as they are, and names that cannot be."""

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import croze as cz
from croze.cli import starters
from croze.cli.main import main
from croze.errors import CrozeError
from croze.loop.load import load_run

CROZE = [sys.executable, "-m", "croze.cli.main"]
ENVIRONMENTS = tuple(starters.STARTERS)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])  # a task file puts its folder there
    monkeypatch.chdir(tmp_path)
    return tmp_path


def croze(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CROZE, *words], cwd=cwd, capture_output=True, text=True, timeout=200)


def refused(capsys, *words: str) -> str:
    """What is said of a command that is wrong use."""
    assert main(["init", *words]) == 2
    return capsys.readouterr().err


SMALL = {
    "steps": "2",
    "groups_per_step": "2",
    "group_size": "4",
    "loop.eval_tasks": "2",
    "engine.threads": "1",
}


def test_what_it_writes_checks_and_trains_at_once(tmp_path):
    done = croze("init", "my-sums", "--env", "tool", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["  croze check my-sums.py", "  croze train my-sums.py steps=2"]
    done = croze("check", "my-sums.py", "--json", cwd=tmp_path)
    assert_sound(json.loads(done.stdout))
    words = [f"{key}={value}" for key, value in SMALL.items()]
    done = croze("train", "my-sums.py", *words, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [e["valid"] for e in events if e["event"] == "step"] == [1.0, 1.0]


def test_code_checks_and_trains_too(here):
    """math: the pages on concepts begin with it (tests/test_docs.py)."""
    assert main(["init", "sums", "--env", "code"]) == 0
    run = load_run("sums.py").override(SMALL)
    assert_sound(msgspec.to_builtins(cz.check(run)))
    events: list[dict] = []
    cz.train(run, on_event=events.append)
    assert [e["valid"] for e in events if e["event"] == "step"] == [1.0, 1.0]


def assert_sound(findings: list[dict]) -> None:
    assert [f for f in findings if f["status"] == "fail"] == []
    about_the_file = ("declaration", "tasks", "columns", "prompts", "reward")
    assert [f for f in findings if f["status"] == "warn" and f["check"] in about_the_file] == []


@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("model", [starters.TINY, "smollm2-135m-instruct"])
def test_it_is_written_as_the_house_writes(environment, model, here):
    (here / "task.py").write_text(starters.write(environment, model, "task"))
    run = load_run("task.py")
    assert run.model == model and run.name == "task"
    first = next(iter(run.tasks.stream(0)))
    assert isinstance(first.prompt, str) == (model == starters.TINY)
    for words in (["format", "--check"], ["check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, "--config", ROOT / "pyproject.toml", "task.py"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("model", ['a"b', "a\\b", "ORG/größe", "a'b", "{x}", "a\\", "%s", "NAME", "$1"])
def test_any_models_name_is_a_literal(model, here):
    assert main(["init", "odd", "--model", model]) == 0
    assert load_run("odd.py").model == model


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a b", "a/", ".hidden", "a\nb", "x" * 200, "a\udcff", "tab\t", "a;b", "😀", "/"]
)
def test_odd_names_are_refused_with_one_that_would_do(name, here, capsys):
    error = refused(capsys, name)
    assert "cannot name a task file" in error and "do:    use letters" in error
    assert list(here.iterdir()) == []
    better = error.split("croze init ")[1].split()[0]
    assert main(["init", better]) == 0 and (here / f"{better}.py").exists()


@pytest.mark.parametrize("name", ["random", "math", "code", "croze", "torch", "numpy", "sys", "random.py"])
def test_a_name_that_would_hide_a_module_is_refused(name, here, capsys):
    error = refused(capsys, name)
    assert "would hide the Python module" in error and f"croze init my_{name.removesuffix('.py')}" in error
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "folder", "link to a file", "link to nothing"])
def test_what_is_there_is_never_changed(kind, here, capsys):
    path, other = here / "calc.py", here / "other.txt"
    match kind:
        case "file":
            path.write_text("mine")
        case "folder":
            path.mkdir()
        case "link to a file":
            other.write_text("mine")
            path.symlink_to(other)
        case "link to nothing":
            path.symlink_to(other)
    before = sorted(os.listdir(here))
    for name in ("calc", "calc.py"):
        assert "is there already" in refused(capsys, name)
    assert sorted(os.listdir(here)) == before
    assert not path.is_file() or path.read_text() == "mine"


def test_folders(here, capsys):
    assert "there is no folder sub" in (error := refused(capsys, "sub/calc")) and "mkdir -p sub" in error
    (here / "sub").mkdir()
    assert main(["init", "sub/calc"]) == 0 and (here / "sub" / "calc.py").exists()
    assert "croze check sub/calc.py" in capsys.readouterr().out
    (here / "file").touch()
    assert "cannot be written: Not a directory" in refused(capsys, "file/calc")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(here, capsys):
    here.chmod(0o500)
    try:
        assert "cannot be written: Permission denied" in refused(capsys, "calc")
    finally:
        here.chmod(0o700)


def test_a_full_disk_leaves_nothing(here):
    from croze.cli import init

    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with pytest.raises(CrozeError):
        init._write(Path("/dev/full/calc.py"), "text")
    assert list(here.iterdir()) == []


def test_as_json(here):
    done = croze("init", "calc", "--env", "tool", "--json", cwd=here)
    assert json.loads(done.stdout) == {
        "event": "init",
        "file": "calc.py",
        "env": "tool",
        "model": "tiny-calc",
        "next": ["croze check calc.py", "croze train calc.py steps=2"],
    }
    done = croze("init", "calc", "--json", cwd=here)
    assert done.returncode == 2 and json.loads(done.stdout)["kind"] == "usage"


@pytest.mark.parametrize(
    "words", [["calc", "--env", "cooking"], ["calc", "--model", ""], ["calc", "--model", "a\x1bb"]]
)
def test_wrong_words(words, here, capsys):
    assert main(["init", *words]) == 2
    assert "\x1b" not in capsys.readouterr().err and list(here.iterdir()) == []

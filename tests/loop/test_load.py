"""Task files as people write them: exactly one Run comes out, or an error that says what and where."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

import croze as cz
from croze.config import Optim, Sampling
from croze.errors import ConfigError, CrozeError, DeclarationError, Interrupted, UsageError
from croze.loop.load import apply_keys, find_run_folder, load_run, load_trained
from croze.run import Run

GOOD = """
import croze as cz

def right(reply: str, answer: int) -> float:
    return float(reply == str(answer))

run = cz.Run(model="tiny-calc", tasks=[{"prompt": "1+1", "answer": 2}], reward=right)
"""


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))

    def write(text: str, name: str = "calc.py") -> Path:
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


def test_the_run_is_named_after_its_file(write):
    path = write(GOOD)
    run = load_run(path)
    assert (run.name, run.file, run.model) == ("calc", str(path), "tiny-calc")
    assert load_run(write(GOOD.replace("cz.Run(", "cz.Run(name='mine', "), "other.py")).name == "mine"


def test_the_file_is_a_module_not_the_main_program(write):
    path = write(GOOD + "\nassert __name__ != '__main__'\nif __name__ == '__main__': raise SystemExit(3)\n")
    run = load_run(path)
    assert sys.modules[run.reward.__module__].__file__ == str(path)
    assert not (path.parent / "__pycache__").exists()


def test_a_file_beside_it_can_be_imported(write):
    write("LIMIT = 7", "beside_calc.py")
    assert (
        load_run(
            write(
                "import beside_calc\n"
                + GOOD
                + "run = cz.Run(model='m', tasks=[], reward=right, steps=beside_calc.LIMIT)"
            )
        ).steps
        == 7
    )


def test_a_second_name_for_one_run_is_no_second_run(write):
    assert load_run(write(GOOD + "best = run\n")).name == "calc"


BAD = {
    "none": ("import croze", "no Run", None),
    "several": (GOOD + "other = cz.Run(model='m', tasks=[], reward=right)", "run, other", None),
    "syntax": ("x = 1\ndef f(:\n", "SyntaxError", 2),
    "exception": ("x = 1\ny = x / 0\n", "ZeroDivisionError: division by zero", 2),
    "in a function": ("def f():\n    raise KeyError('k')\n\nf()\n", "KeyError: 'k'", 2),
    "deep in a library": ("import json\n\njson.loads('{')\n", "JSONDecodeError", 3),
    "missing module": ("import no_such_module_anywhere\n", "no_such_module_anywhere", 1),
    "exit": ("import sys\nsys.exit(0)\n", "SystemExit", 2),
    "null": ("x = 1\0", "", None),
    "empty": ("", "no Run", None),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_a_declaration_error_with_its_line(write, case):
    text, words, line = BAD[case]
    path = write(text)
    with pytest.raises(DeclarationError) as caught:
        load_run(path)
    assert words in caught.value.message
    assert caught.value.where == (f"{path}:{line}" if line else str(path))


def test_an_error_of_croze_keeps_its_kind_and_gains_a_line(write):
    path = write("import croze as cz\n\nrun = cz.Run(model='m', tasks=[], reward=print, steps=-1)\n")
    with pytest.raises(ConfigError) as caught:
        load_run(path)
    assert caught.value.where == f"{path}:3 (steps)"


def test_text_that_is_not_utf8_is_an_error(tmp_path):
    (tmp_path / "t.py").write_bytes(b"x = '\xff'\n")
    with pytest.raises(DeclarationError, match="SyntaxError"):
        load_run(tmp_path / "t.py")


def test_an_interrupt_while_loading_says_where_the_file_was(write):
    with pytest.raises(Interrupted) as caught:
        load_run(write("x = 1\nraise KeyboardInterrupt"))
    assert caught.value.where is not None and caught.value.where.endswith(".py:2")


def test_paths_that_are_no_task_file(write, tmp_path):
    write(GOOD)
    for path, words in (
        (tmp_path / "clac.py", "did you mean 'calc.py'?"),
        (tmp_path, "folder"),
        (write("x", "notes.txt"), "Python"),
        (Path("steps=5"), "task file first"),
        (Path("/nowhere/at/all.py"), "no such task file"),
    ):
        with pytest.raises(DeclarationError) as caught:
            load_run(path)
        assert words in str(caught.value)


# ------------------------------------------------------------------------------------------------- folders


def make_folder(folder: Path, file: Path, saved=(1, 2, 10), **keys) -> Path:
    folder.mkdir(parents=True)
    run = dataclasses.replace(load_run(file), **keys)
    (folder / "config.json").write_text(json.dumps({"file": str(file), "keys": run.keys()}))
    for step in saved:
        checkpoint = folder / "checkpoints" / f"step_{step:06d}"
        (checkpoint / "model").mkdir(parents=True)
        (checkpoint / "manifest.json").touch()
    return folder


def test_a_run_folder_gives_its_run_with_its_keys_and_newest_model(write, tmp_path):
    changed = {
        "sampling": Sampling(temperature=0.5, stop=("\n", "a,b")),
        "optim": Optim(betas=(0.8, 0.95)),
        "steps": 7,
        "group_size": 3,
    }
    folder = make_folder(tmp_path / "runs" / "calc-1", write(GOOD), **changed)
    run = load_trained(folder)
    assert run.model == str(folder / "checkpoints" / "step_000010" / "model")
    assert {key: getattr(run, key) for key in changed} == changed


def test_keys_survive_a_way_through_json():
    run = Run(model="m", tasks=[], reward=print, dir="x", reward_options=cz.RewardOptions(timeout_s=3))
    fresh = Run(model="m", tasks=[], reward=print)
    assert apply_keys(fresh, json.loads(json.dumps(run.keys()))) == run
    for bad in (
        {"optim.lrr": 1},
        {"nothing.lr": 1},
        {"nothing": 1},
        {"optim.lr": "x"},
        {"": 1},
        {"file": "x"},
    ):
        with pytest.raises(ConfigError):
            apply_keys(fresh, bad)


def test_a_config_that_lost_keys_is_not_filled_with_defaults(write, tmp_path):
    folder = make_folder(tmp_path / "a", write(GOOD))
    config = json.loads((folder / "config.json").read_text())
    del config["keys"]["optim.lr"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DeclarationError, match=r"does not say what optim\.lr was"):
        load_trained(folder)


def test_folders_that_are_no_run(write, tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(DeclarationError, match="no run"):
        load_trained(tmp_path / "a")
    for text in ("{", "[]", "{}"):
        (tmp_path / "a" / "config.json").write_text(text)
        with pytest.raises(DeclarationError, match=r"cannot be read|does not declare"):
            load_trained(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text('{"file": "", "keys": {}}')
    with pytest.raises(DeclarationError, match="in Python"):
        load_trained(tmp_path / "a")
    with pytest.raises(DeclarationError, match="no checkpoint"):
        load_trained(make_folder(tmp_path / "b", write(GOOD), saved=()))


def test_a_run_is_found_by_path_name_or_its_beginning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("calc-1a", "calc-2b", "tiny-3c"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert find_run_folder("runs/calc-1a") == find_run_folder("calc-1a") == find_run_folder("calc-1")
    for word, words in (("calc", "calc-1a, calc-2b"), ("tiny-3d", "tiny-3c"), ("zzz", "no such run")):
        with pytest.raises(UsageError) as caught:
            find_run_folder(word)
        assert words in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(CrozeError, match="file"):
        find_run_folder("file")

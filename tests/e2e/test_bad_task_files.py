"""Wrong task files: what the user's own code raises is shown as theirs, with its line."""

from pathlib import Path

import pytest

from bad_inputs import Wrong, hold, rewarded, task_file, train

GOOD = task_file()
NO_TEXT = """class E(Exception):
    def __str__(self): raise ValueError
raise E
"""
ARGPARSE = """import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--data", required=True)
parser.parse_args()
"""
UNDER_MAIN = GOOD.replace("run = cz.Run", 'if __name__ == "__main__":\n  run = cz.Run')
IN_A_FUNCTION = GOOD.replace("run = cz.Run", "def make():\n  return cz.Run")
IN_A_LIST = GOOD.replace("run = cz.Run(", "runs = [cz.Run(") + "]"
TWO = GOOD + "other = cz.Run(model='x', tasks=TASKS, reward=right)\n"

NO_RUN = {
    "empty": ("", "declares no Run", "add run = cz.Run("),
    "no run": ("x = 1\n", "declares no Run", "at the top level"),
    "in a function": (IN_A_FUNCTION, "declares no Run", "not in a function"),
    "in a list": (IN_A_LIST, "declares no Run", "run = runs[...]"),
    "under main": (UNDER_MAIN, "declares no Run", "move the Run out of"),
    "two": (TWO, "several Runs: run, other", "keep one"),
}


@pytest.mark.parametrize("name", NO_RUN)
def test_not_one_run(tmp_path: Path, name: str):
    text, what, fix = NO_RUN[name]
    answer = train(tmp_path, text)
    hold(answer, Wrong("declaration", what, "task.py", fix))
    assert answer.left == []


RAISES = {
    "raises": ("x = 1\n\n1 / 0\n", 3, "ZeroDivisionError: division by zero", "python "),
    "in a function": ("def f():\n    [][1]\nf()\n", 2, "IndexError", "python "),
    "no text": (NO_TEXT, 3, "E: (its text", "python "),
    "surrogate": ("raise ValueError('\\ud800')\n", 1, "ValueError: ?", "python "),
    "no memory": ("raise MemoryError\n", 1, "MemoryError", "python "),
    "base exception": ("raise BaseException('odd')\n", 1, "BaseException: odd", "python "),
    "generator exit": ("raise GeneratorExit\n", 1, "GeneratorExit", "python "),
    "recursion": ("def f(): f()\nf()\n", 1, "RecursionError", "python "),
    "exit": ("import sys\nsys.exit(0)\n", 2, "SystemExit: 0", "imported, not run as a program"),
    "argv": ("import sys\nname = sys.argv[1]\n", 2, "IndexError", "no words of the command line"),
    "argparse": (ARGPARSE, 4, "SystemExit: 2", "no words of the command line"),
    "missing module": ("import not_to_be_had\n", 1, "not_to_be_had", "install what provides"),
    "misspelt name": ("tasks = 1\nprint(tsaks)\n", 2, "NameError", "did you mean 'tasks'"),
    "misspelt name of croze": ("import croze as cz\nrun = cz.Rnu()\n", 2, "Rnu", "did you mean 'Run'"),
    "syntax": ("x = 1\ndef f(:\n", 2, "SyntaxError", "look at: def f(:"),
    "indentation": ("def f():\npass\n", 2, "IndentationError", "look at: pass"),
}


@pytest.mark.parametrize("name", RAISES)
def test_files_that_raise(tmp_path: Path, name: str):
    text, line, what, fix = RAISES[name]
    answer = train(tmp_path, text)
    hold(answer, Wrong("declaration", what, f"task.py:{line}", fix))
    assert answer.left == []


GIVEN = {
    "stpes=3": ("declaration", "'stpes'", "did you mean 'steps'"),
    "optim=cz.Optim(lrr=3)": ("declaration", "'lrr'", "did you mean 'lr'"),
    "steps='3'": ("config", "steps wants a whole number, got '3'", "croze keys steps"),
    "steps=True": ("config", "steps wants a whole number, got True", "croze keys steps"),
    "seed=2**70": ("config", "seed must be between 0 and", "croze keys seed"),
    "optim=cz.Optim(lr='3')": ("config", "optim.lr wants a number, got '3'", "croze keys optim.lr"),
    "optim=cz.Optim(lr=float('nan'))": ("config", "optim.lr must be", "croze keys optim.lr"),
    "sampling=cz.Sampling(stop=['x'])": ("config", "a tuple of text", "croze keys sampling.stop"),
    "optim={'lr': 3}": ("config", "wants cz.Optim(...)", "write optim=cz.Optim(...)"),
    "reward_options=3": ("config", "wants cz.RewardOptions(...)", "write reward_options="),
    "model=pathlib.Path('m')": ("declaration", "must be text", "a directory"),
    "reward='right'": ("declaration", "must be a function, got str", "def right"),
}


@pytest.mark.parametrize("given", GIVEN)
def test_a_run_that_is_given_what_it_does_not_take(tmp_path: Path, given: str):
    kind, what, fix = GIVEN[given]
    usual = {"model": "'tiny-calc'", "tasks": "TASKS", "reward": "right"}
    words = [f"{key}={value}" for key, value in usual.items() if not given.startswith(f"{key}=")]
    text = GOOD + f"import pathlib\nother = cz.Run({', '.join([*words, given])})\n"
    answer = train(tmp_path, text)
    hold(answer, Wrong(kind, what, f"task.py:{len(text.splitlines())}", fix))
    assert answer.left == []


@pytest.mark.parametrize(
    ("call", "what"), [("'tiny-calc', [], print", "positional"), ("tasks=[], reward=print", "'model'")]
)
def test_a_run_that_is_called_wrongly(tmp_path: Path, call: str, what: str):
    answer = train(tmp_path, f"import croze as cz\nrun = cz.Run({call})\n")
    hold(answer, Wrong("declaration", what, "task.py:2", "name every argument"))


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"x = '\xff'\n", "SyntaxError"),
        (b"x = 1\0\n", "SyntaxError"),
        ("x = 1\n".encode("utf-16"), "SyntaxError"),
        (bytes(range(256)), "SyntaxError"),
        (b"# -*- coding: klingon -*-\n", "klingon"),
    ],
    ids=["latin", "zero", "utf-16", "binary", "encoding"],
)
def test_files_that_are_no_text(tmp_path: Path, data: bytes, what: str):
    hold(train(tmp_path, data), Wrong("declaration", what, "task.py", "UTF-8"))


def rewards(body: str, reward: str) -> str:
    return task_file(body + "\n", reward=reward)


INNER = rewards("def make():\n    def bad(reply): return 1.0\n    return bad", "make()")
METHOD = rewards("class A:\n    def bad(self, reply): return 1.0", "A().bad")
OBJECT = rewards("class A:\n    def __call__(self, reply): return 1.0", "A()")
CLASS = rewards("class A:\n    def __init__(self, reply): pass", "A")
PARTIAL = rewards("import functools\ndef bad(reply, k): return k", "functools.partial(bad, k=1)")
TAKEN = task_file(tasks="[{'prompt': '1=', 'answer': '1', 'reply': 'x'}]")
AT_TOP = "at the top level"
REWARDS = {
    "lambda": (rewards("", "lambda reply: 1.0"), "is a lambda", AT_TOP),
    "inner": (INNER, "defined inside", AT_TOP),
    "method": (METHOD, "type method", AT_TOP),
    "object": (OBJECT, "type A", AT_TOP),
    "class": (CLASS, "must be a function", AT_TOP),
    "partial": (PARTIAL, "type partial", AT_TOP),
    "built in": (rewards("", "len"), "by position", "called by name"),
    "*args": (rewarded("return 1.0", "*args"), "'args' by position", "called by name"),
    "positional": (rewarded("return 1.0", "reply, /"), "'reply' by position", "called by name"),
    "generator": (rewarded("yield 1.0"), "yields", "return the score"),
    "async generator": (rewarded("yield 1.0", "reply", kind="async def"), "yields", "return the score"),
    "missing column": (rewarded("return 1.0", "anwser"), "asks for 'anwser'", "did you mean 'answer'"),
    "no such column": (rewarded("return 1.0", "zzz"), "asks for 'zzz'", "tasks have answer, n"),
    "sandbox not awaited": (rewarded("return 1.0", "reply, sandbox"), "must await", "async def bad"),
    "column of croze's": (TAKEN, "the column 'reply'", "rename"),
}


@pytest.mark.parametrize("name", REWARDS)
def test_rewards_that_cannot_be_called(tmp_path: Path, name: str):
    text, what, fix = REWARDS[name]
    answer = train(tmp_path, text)
    hold(answer, Wrong("declaration", what, "reward", fix))
    assert answer.left == []
    assert name in ("object", "class", "partial", "built in") or "task.py:" in answer.error["where"]

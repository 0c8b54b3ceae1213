"""Wrong inputs through the command line: a task file with one thing wrong, and what a user is told of it."""

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from croze.cli.main import main
from croze.loop.usage import descendants

FILE = """
import os
import sys
import time

import croze as cz

TASKS = [{{"prompt": f"add {{n}} and 3=", "answer": str(n + 3), "n": n}} for n in range(2, 10)]


def right(reply, answer):
    return float(len(reply) % 2)


{body}
run = cz.Run(
    model="tiny-calc", tasks={tasks}, reward={reward}, steps=1, group_size=2, groups_per_step=2,
    sampling=cz.Sampling(max_tokens=4), engine=cz.EngineOptions(threads=1), loop=cz.LoopOptions(retries=0),
)
"""


@dataclass(frozen=True, slots=True)
class Wrong:
    """An error's kind and what its message, where and fix must hold. ``code``: the exit code."""

    kind: str
    what: str
    where: str
    fix: str
    code: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command did: exit code, the objects it printed, what it said on stderr, what it left in its folder."""

    code: int
    events: list[dict]
    stderr: str
    left: list[str]

    @property
    def error(self) -> dict:
        last = self.events[-1]
        assert last.keys() == {"event", "kind", "message", "where", "fix"} and last["event"] == "error", last
        return last

    def steps(self) -> list[dict]:
        return [e for e in self.events if e["event"] == "step"]

    def warnings(self) -> list[dict]:
        return [e for e in self.events if e["event"] == "warning"]


def task_file(body: str = "", *, tasks: str = "TASKS", reward: str = "right") -> str:
    return FILE.format(body=body, tasks=tasks, reward=reward)


def rewarded(body: str, signature: str = "reply, answer", *, kind: str = "def") -> str:
    """A file whose reward has this body."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return task_file(f"{kind} bad({signature}):\n{lines}\n\n", reward="bad")


def yielding(body: str) -> str:
    """A file whose tasks come from a function with this body."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return task_file(f"def problems(seed):\n{lines}\n\n", tasks="problems")


def croze(folder: Path, *words: str) -> Answer:
    """``croze WORDS --json`` with ``folder`` as working directory, in this process; it must leave no process."""
    before, running = set(os.listdir(folder)), set(descendants(os.getpid()))
    with _apart(folder) as (out, err):
        code = main([*words, "--json"])
    assert not set(descendants(os.getpid())) - running, "a process was left behind"
    lines = out.read_text().splitlines()
    left = sorted(set(os.listdir(folder)) - before - {"__pycache__", out.name, err.name})
    return Answer(code=code, events=[json.loads(line) for line in lines], stderr=err.read_text(), left=left)


def train(folder: Path, text: str | bytes, *words: str) -> Answer:
    """``croze train`` of a task file with this text."""
    (folder / "task.py").write_bytes(text if isinstance(text, bytes) else text.encode())
    return croze(folder, "train", "task.py", *words)


def hold(answer: Answer, wrong: Wrong) -> None:
    """The answer is the error that ``wrong`` describes: whole, on one line, without a traceback."""
    error = answer.error
    assert (answer.code, error["kind"]) == (wrong.code, wrong.kind), (answer.code, error, answer.stderr)
    assert wrong.what in error["message"], error
    assert error["where"] and wrong.where in error["where"], error
    assert error["fix"] and wrong.fix in error["fix"], error
    assert "Traceback" not in answer.stderr, answer.stderr


@contextlib.contextmanager
def _apart(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Own stdout, stderr, working directory, modules and signal handlers for a command in this process."""
    out, err = folder / ".stdout", folder / ".stderr"
    here, modules, path = os.getcwd(), set(sys.modules), list(sys.path)
    handler = signal.getsignal(signal.SIGTERM)
    saved = os.dup(1), os.dup(2)
    with out.open("wb") as stdout, err.open("wb") as stderr:
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        os.chdir(folder)
        try:
            # by number: what croze does to descriptor 1 is done to what is printed too
            with (
                open(1, "w", closefd=False) as said,
                open(2, "w", closefd=False, errors="replace") as warned,
                contextlib.redirect_stdout(said),
                contextlib.redirect_stderr(warned),
            ):
                yield out, err
        finally:
            for number, descriptor in zip((1, 2), saved, strict=True):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.chdir(here)
            sys.path[:] = path
            for name in set(sys.modules) - modules:
                if name.startswith("croze_task_"):
                    del sys.modules[name]
            signal.signal(signal.SIGTERM, handler)

"""Runs that are struck where they are told to be, and what is left of them.

``Nursery`` forks real ``croze`` processes from one that has torch loaded: a tenth of the start, else the same. A run
may be given a place in the code at which its process group gets a signal. ``python dying.py`` is the nursery;
``python dying.py AT WHEN NTH DOES WORDS...`` is ``croze WORDS``, struck there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

MARK = "CROZE_TEST_RUN"
HANG_S = 60.0
LOADED = (
    "croze.cli.resume",
    "croze.cli.train",
    "croze.inference.torch_engine",
    "croze.loop.training",
    "croze.trace.tables",
    "croze.train.algorithms.grpo",
    "pyarrow.ipc",
    "torch._dynamo",  # torch.optim does so: a second of its own
)
"""What a run imports before or after it has started; the nursery does so once."""
TIMES = ("tokens_per_cpu_s", "cpu_s", "step_s", "phase_s", "peak_mib", "save_wait_s")
"""What may differ between two runs that are the same."""

TASK = """
import random
import zlib

import croze as cz


def problems(seed):
    rng = random.Random(seed)
    while True:
        a, b, c = (rng.randint(2, 9) for _ in range(3))
        yield {"prompt": f"add {a} and {b}, times {c}=", "answer": str((a + b) * c)}


def judged(reply: str, answer: str) -> float:
    return zlib.crc32(f"{answer} {reply}".encode()) % 7 / 6


run = cz.Run(
    model="tiny-calc",
    tasks=cz.tasks(problems),
    reward=judged,
    steps=5,
    group_size=4,
    groups_per_step=2,
    sampling=cz.Sampling(max_tokens=5),
    optim=cz.Optim(lr=1e-3),
    engine=cz.EngineOptions(threads=1, self_check=False),
    loop=cz.LoopOptions(checkpoint_every=2),
)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What happens ``before`` or ``after`` the ``nth`` call of ``at`` ("module:qualified.name").

    ``does``: the name of a signal to the process group, or "hang": that call takes HANG_S longer.
    """

    at: str
    when: str = "before"
    nth: int = 1
    does: str = "SIGKILL"

    def __str__(self) -> str:
        return f"{self.does.removeprefix('SIG').lower()} {self.when} {self.at.rpartition(':')[2]} {self.nth}"


@dataclass(slots=True, kw_only=True)
class Process:
    """A forked croze. ``mark``: a word in its environment, and in that of all it starts."""

    nursery: Nursery
    pid: int
    mark: str
    out: Path
    code: int | None = field(default=None)

    def events(self) -> list[dict[str, Any]]:
        """The whole lines that it has printed."""
        return [json.loads(line) for line in self.out.read_bytes().split(b"\n")[:-1]]

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == kind]

    def until(self, holds: Callable[[Process], Any], within_s: float = 60.0) -> Any:
        """Wait until something holds of the living process; what it gave."""
        end = time.monotonic() + within_s
        while not (found := holds(self)):
            assert self.lives(), f"it ended before: {self.tail()}"
            assert time.monotonic() < end, f"it did not come to it: {self.tail()}"
            time.sleep(0.005)
        return found

    def lives(self) -> bool:
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return False
        return state not in "ZX"

    def signal(self, number: int, *, group: bool = False) -> None:
        (os.killpg if group else os.kill)(self.pid, number)

    def wait(self, within_s: float = 90.0) -> int:
        """Its exit code, negative for a signal; after a deadline it is killed."""
        if self.code is None:
            end = time.monotonic() + within_s
            while self.lives() and time.monotonic() < end:
                time.sleep(0.005)
            late = self.lives()
            if late:
                os.killpg(self.pid, signal.SIGKILL)
            self.code = int(self.nursery.ask(wait=self.pid))
            assert not late, f"it was still running after {within_s} s: {self.tail()}"
        return self.code

    def said(self) -> str:
        """What it wrote to stderr."""
        return self.out.with_name(f"{self.out.name}.err").read_text()

    def tail(self) -> str:
        return self.out.read_text()[-1500:] + self.said()[-1500:]


class Nursery:
    """Starts croze processes in ``folder``; ``close`` kills those that are left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._number = folder, 0
        self._started: list[Process] = []
        self._parent = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, *words: str, strike: Strike | None = None, cwd: Path | None = None) -> Process:
        """``croze WORDS --json`` in a session of its own."""
        self._number += 1
        out, mark = self.folder / f"out-{self._number}", uuid.uuid4().hex
        for path in (out, out.with_name(f"{out.name}.err")):
            path.touch()
        pid = self.ask(
            words=[*words, "--json"],
            cwd=str(cwd or self.folder),
            out=str(out),
            mark=mark,
            strike=strike and [strike.at, strike.when, strike.nth, strike.does],
        )
        self._started.append(Process(nursery=self, pid=pid, mark=mark, out=out))
        return self._started[-1]

    def run(self, *words: str, **how: Any) -> Process:
        """``start``, waited for."""
        process = self.start(*words, **how)
        process.wait()
        return process

    def ask(self, **what: Any) -> Any:
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(what).encode() + b"\n")
        self._parent.stdin.flush()
        assert select.select([self._parent.stdout], [], [], 90)[0], "the nursery does not answer"
        return json.loads(self._parent.stdout.readline())

    def close(self) -> None:
        for process in self._started:
            if process.code is None and process.lives():
                os.killpg(process.pid, signal.SIGKILL)
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.close()
        self._parent.wait(30)
        self._parent.stdout.close()


def alive(mark: str) -> list[str]:
    """Command lines of the processes whose environment has this mark."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text().replace("\0", " "))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
    return found


def gone_within(seconds: float, look: Callable[[], Iterable[str]]) -> list[str]:
    """What ``look`` still finds after ``seconds``, or nothing as soon as it finds nothing."""
    end = time.monotonic() + seconds
    while (found := list(look())) and time.monotonic() < end:
        time.sleep(0.02)
    return found


def facts(folder: Path) -> dict[str, Any]:
    """All that a finished run says of itself, times left out: equal for a run that never stopped."""
    from croze.loop.checkpoints import Checkpoint, Checkpoints, verify
    from croze.loop.ledger import SqliteLedger
    from croze.trace.metrics import read_jsonl
    from croze.trace.reader import TraceReader

    ledger = SqliteLedger(folder / "ledger.sqlite")
    try:
        told: dict[str, Any] = {
            "counts": ledger.counts(),
            "steps": ledger.steps(),
            "rollouts": {entry.rollout_id: entry for entry in ledger.rollouts()},
        }
    finally:
        ledger.close()
    told["metrics"] = [_timeless(line) for line in read_jsonl(folder / "metrics.jsonl")]
    with TraceReader(folder) as trace:
        rows = trace.query("SELECT * EXCLUDE (t_start, t_end) FROM rollouts ORDER BY rollout_id")
        told["trace"] = rows
        told["tokens"] = trace.query("SELECT * FROM token_lists ORDER BY rollout_id")
        spans = trace.query("SELECT span_id, enabler_span_id, stave, step FROM spans")
    told["spans"] = Counter((s["stave"], s["step"]) for s in spans if s["stave"] != "sync")
    assert len({row["rollout_id"] for row in rows}) == len(rows), "a rollout is there twice"
    ids = {span["span_id"] for span in spans}
    assert len(ids) == len(spans), "a span id is there twice"
    unknown = [s for s in spans if s["enabler_span_id"] is not None and s["enabler_span_id"] not in ids]
    assert not unknown, unknown
    told["checkpoints"] = {}
    for path in Checkpoints(folder / "checkpoints").all():
        found = verify(path)
        assert isinstance(found, Checkpoint), found
        assert published_id(path / "model") in (found.manifest.weights_id, None)
        told["checkpoints"][path.name] = found.manifest.weights_id
    told["files"] = sorted(p.name for p in folder.iterdir() if p.name != "faults.jsonl")
    told["saved"] = sorted(p.name for p in (folder / "checkpoints").iterdir())
    return told


def published_id(model: Path) -> str | None:
    """The weights id of a saved model's own tensors; None for an adapter, which is not the whole of them."""
    from safetensors.torch import load_file

    from croze.sync.identity import Identity

    file = model / "model.safetensors"
    return Identity().of(load_file(file).items()) if file.exists() else None


def _timeless(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key not in TIMES}


# ------------------------------------------------------------------------------------- inside the nursery


def _arm(at: str, when: str, nth: int, does: str) -> None:
    """Have something happen at the ``nth`` call of a function."""
    module, _, name = at.partition(":")
    owner: Any = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    inner, calls = getattr(owner, last), iter(range(1, sys.maxsize))

    @functools.wraps(inner)
    async def later(*args: Any, **words: Any) -> Any:
        now = next(calls) == nth
        _strike(does, now and when == "before")
        value = await inner(*args, **words)
        _strike(does, now and when == "after")
        return value

    @functools.wraps(inner)
    def at_once(*args: Any, **words: Any) -> Any:
        now = next(calls) == nth
        _strike(does, now and when == "before")
        value = inner(*args, **words)
        _strike(does, now and when == "after")
        return value

    setattr(owner, last, later if inspect.iscoroutinefunction(inner) else at_once)


def _strike(does: str, now: bool) -> None:
    if now and does == "hang":
        print("hanging", file=sys.stderr, flush=True)
        time.sleep(HANG_S)
    elif now:
        os.killpg(0, signal.Signals[does])


def _child(asked: Mapping[str, Any]) -> NoReturn:
    from croze.cli.main import main

    code = 70
    try:
        os.setsid()
        os.chdir(asked["cwd"])
        os.environ[MARK] = asked["mark"]
        for number, path in ((1, asked["out"]), (2, asked["out"] + ".err")):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if asked["strike"] is not None:
            _arm(*asked["strike"])
        code = main(asked["words"])
    except BaseException:  # the end of a process, whatever it is
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _serve(lines: Iterator[bytes], answers: int) -> None:
    for line in lines:
        asked = json.loads(line)
        if "wait" in asked:
            answer = os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _child(asked)
        os.write(answers, json.dumps(answer).encode() + b"\n")


if __name__ == "__main__" and len(sys.argv) > 1:
    from croze.cli.main import main

    _arm(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
    sys.exit(main(sys.argv[5:]))
elif __name__ == "__main__":
    for _name in LOADED:
        importlib.import_module(_name)
    _serve(iter(sys.stdin.buffer.readline, b""), os.dup(1))

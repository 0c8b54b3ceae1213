"""A run folder belongs to one process; what never began leaves it free again."""

import json
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from croze.errors import UsageError
from croze.loop.folder import CONFIG, LOCK, RunFolder, holder, read_config
from croze.run import Run


def a_run(path: Path) -> Run:
    return Run(model="m", tasks=[{"prompt": "1"}], reward=print, dir=str(path))


def test_one_holds_it_and_is_named(tmp_path):
    folder, run = RunFolder.create(a_run(tmp_path / "run"))
    by = holder(folder.path)
    assert by is not None and by.pid == os.getpid() and run.dir == str(tmp_path / "run")
    with pytest.raises(UsageError, match=f"in use by process {os.getpid()}"):
        RunFolder.open(folder.path)
    folder.close()
    assert holder(folder.path) is None
    RunFolder.open(folder.path).close()
    with pytest.raises(UsageError, match="already holds a run"):
        RunFolder.create(a_run(tmp_path / "run"))
    assert holder(folder.path) is None, "a refusal gives the folder back"


def test_who_asks_does_not_keep_anyone_out(tmp_path):
    RunFolder.create(a_run(tmp_path))[0].close()
    asking, stop = threading.Event(), threading.Event()

    def ask() -> None:
        while not stop.is_set():
            holder(tmp_path)
            asking.set()

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        asking.wait()
        for _ in range(50):
            RunFolder.open(tmp_path).close()
    finally:
        stop.set()
        thread.join()


def compete(path: str, results) -> None:
    """Make the run, or be refused; a winner takes it back at once, as one with a wrong declaration does."""
    until = time.monotonic() + 1.5
    held = 0
    while time.monotonic() < until:
        try:
            folder, _ = RunFolder.create(a_run(Path(path)))
        except UsageError:
            continue
        with folder:
            with (folder.path / "held").open("x"):  # fails where another holds it too
                held += 1
            (folder.path / "held").unlink()
            folder.discard()
    results.put(held)


def test_those_who_take_it_back_never_let_two_in(tmp_path):
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    both = [context.Process(target=compete, args=(str(tmp_path / "run"), results)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert results.get() + results.get() > 10


def test_what_never_began_is_taken_back(tmp_path):
    run = tmp_path / "run"
    folder, _ = RunFolder.create(a_run(run))
    for name in ("ledger.sqlite", "ledger.sqlite-wal", "faults.jsonl", "metrics.jsonl"):
        (run / name).touch()
    (run / "trace" / "spans").mkdir(parents=True)
    with folder:
        folder.discard()
    assert not run.exists()


@pytest.mark.parametrize("begun", ["metrics.jsonl", "checkpoints"])
def test_what_has_begun_stays(tmp_path, begun):
    folder, _ = RunFolder.create(a_run(tmp_path / "run"))
    path = folder.path / begun
    path.mkdir() if begun == "checkpoints" else path.write_text("{}\n")
    with folder:
        folder.discard()
    assert path.exists() and (folder.path / CONFIG).exists()


def test_what_others_put_there_stays(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    folder, _ = RunFolder.create(a_run(tmp_path))
    with folder:
        folder.discard()
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


WRONG_KINDS = [
    {"file": 3, "keys": {}},
    {"file": "", "keys": [1]},
    {"file": "", "keys": {}, "sources": 3},
    {"file": "", "keys": {}, "numerics": 3},
    {"file": "", "keys": {}, "numerics": [{"threads": 1}]},
    {"file": "", "keys": {}, "model": {"path": 1}},
]


@pytest.mark.parametrize(
    "content",
    [b"{", b"\xff\xfe", b"[]", b'{"file": ""}', None, *(json.dumps(c).encode() for c in WRONG_KINDS)],
)
def test_what_is_no_declaration_says_so(tmp_path, content):
    if content is None:
        (tmp_path / CONFIG).mkdir()
    else:
        (tmp_path / CONFIG).write_bytes(content)
    with pytest.raises(UsageError, match=r"config\.json"):
        read_config(tmp_path)
    assert not (tmp_path / LOCK).exists()

"""What a run folder says of its run, whatever is done to it meanwhile."""

import json
import os
import shutil
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from croze.loop.folder import RunFolder, holder
from croze.loop.ledger import SqliteLedger
from croze.loop.status import RunStatus, last_step, runs_in, status
from run_folders import claimed, dead, held, interrupted, saved, stepped


def looked_at(path: Path) -> RunStatus:
    found = status(path)
    assert found is not None
    return found


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(p): (p.stat().st_size, p.stat().st_mtime_ns) for p in sorted(folder.rglob("*"))}


def test_the_states_of_a_run(tmp_path):
    found = looked_at(interrupted(tmp_path / "a"))
    assert (found.state, found.resumable, found.step, found.steps) == ("interrupted", True, 0, 9)
    assert found.created is not None and abs(time.time() - found.created) < 600
    found = looked_at(saved(stepped(dead(tmp_path / "b"), 0.25, 0.5), 1))
    assert (found.state, found.resumable, found.step, found.reward_mean, found.checkpoint) == (
        "dead",
        True,
        2,
        0.5,
        1,
    )
    with held(tmp_path / "b") as process:
        found = looked_at(tmp_path / "b")
        assert (found.state, found.resumable, found.pid) == ("running", False, process.pid)
        assert found.host == os.uname().nodename and found.note is None
        process.send_signal(2)
        assert process.wait(20) == 4
    assert looked_at(tmp_path / "b").state == "interrupted"
    found = looked_at(saved(interrupted(tmp_path / "c"), 9))
    assert (found.state, found.resumable, found.checkpoint) == ("finished", False, 9)


def test_looking_changes_nothing(tmp_path):
    path = stepped(interrupted(tmp_path / "a"), 1.0)
    ledger = SqliteLedger(path / "ledger.sqlite")  # open, with its files beside it
    shutil.copytree(path, tmp_path / "b")
    ledger.close()
    before = contents(tmp_path)
    assert {one.name for one in runs_in(tmp_path)} == {"a", "b"}
    assert contents(tmp_path) == before


def test_a_run_in_its_first_moment(tmp_path):
    (tmp_path / "run").mkdir()
    with claimed(
        tmp_path / "run", json.dumps({"pid": os.getpid(), "host": os.uname().nodename, "since": 1.0})
    ):
        assert (looked_at(tmp_path / "run").state, looked_at(tmp_path / "run").note) == (
            "running",
            "it starts",
        )
    found = looked_at(tmp_path / "run")
    assert (found.state, found.note) == ("broken", "it has no config.json")


def test_a_run_of_another_host_and_one_whose_children_outlive_it(tmp_path):
    path = interrupted(tmp_path / "run")
    with claimed(path, json.dumps({"pid": 2, "host": "elsewhere.example", "since": 1.0})):
        found = looked_at(path)
        assert (found.state, found.pid, found.host, found.note) == ("running", 2, "elsewhere.example", None)
    for pid in (2**22 + 1, 0, -1, 10**30):
        with claimed(path, json.dumps({"pid": pid, "host": os.uname().nodename, "since": 1.0})):
            found = looked_at(path)
            assert found.state in ("running", "dead")  # a pid that no number holds is no signature
            assert found.state == "dead" or "is gone" in str(found.note)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"file": "", "keys": 3}', "null", "[" * 100_000, "\udcff", '{"keys": {}}']
)
def test_a_config_that_is_none(text, tmp_path):
    path = interrupted(tmp_path / "run")
    (path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    found = looked_at(path)
    assert found.state == "broken" and found.note and not found.resumable


def test_files_that_would_hold_up_or_fill_whoever_reads_them(tmp_path):
    path = interrupted(tmp_path / "run")
    (path / "config.json").rename(path / "kept")
    (path / "config.json").touch()
    os.truncate(path / "config.json", 8 << 30)
    assert looked_at(path).state == "broken"
    for name in ("config.json", "lock", "metrics.jsonl"):
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)
    assert list(runs_in(tmp_path)) == []
    (path / "config.json").unlink()
    (path / "kept").rename(path / "config.json")
    assert looked_at(path).state == "interrupted"


def test_only_the_end_of_the_metrics_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with path.open("wb") as file:
        file.truncate(64 << 30)
        file.seek(64 << 30)
        file.write(
            b'\n{"event":"step","step":70,"reward_mean":0.5}\n' + b'{"event":"eval","step":70}\n' * 20_000
        )
        file.write(b'{"event":"step","step":71,"rew')
    began = time.process_time()
    found = last_step(path)
    assert found is not None and (found.step, found.reward_mean) == (70, 0.5)
    assert time.process_time() - began < 1.0
    with path.open("ab") as file:
        file.write(b"x" * (5 << 20) + b"\n")
    assert last_step(path) is None


@pytest.mark.parametrize(
    ("text", "step"),
    [
        ("", None),
        ('{"event":"step","step":1,"reward_mean":null}\n', 1),
        ('{"event":"step","step":1,"reward_mean":0.5}', None),
        ('{"event":"step","step":1}\n{"event":"step","step":"2"}\nnonsense "step"\n\n', 1),
        ('{"event":"eval","step":4}\n', None),
        ('{"event":"step","step":1}\n\0\0\0\0', 1),
    ],
)
def test_lines_of_the_metrics(text, step, tmp_path):
    (tmp_path / "metrics.jsonl").write_text(text)
    found = last_step(tmp_path / "metrics.jsonl")
    assert (found.step if found else None) == step


def test_folders_that_are_no_runs_are_left_out(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    interrupted(tmp_path / "run")
    assert [one.name for one in runs_in(tmp_path)] == ["run"]
    assert [one.name for one in runs_in(tmp_path / "run")] == ["run"]


def test_folders_that_are_removed_meanwhile(tmp_path):
    """Nothing is raised, and what is told is one of the states."""
    template, stop = saved(stepped(interrupted(tmp_path / "template"), 0.5), 3), threading.Event()

    def churn() -> None:
        while not stop.is_set():
            shutil.copytree(template, tmp_path / "runs" / "churned")
            shutil.rmtree(tmp_path / "runs" / "churned")

    (tmp_path / "runs").mkdir()
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        seen = {one.state for _ in range(300) for one in runs_in(tmp_path / "runs")}
    finally:
        stop.set()
        thread.join()
    assert seen <= {"interrupted", "broken", "dead"}


def test_asking_keeps_nobody_from_claiming(tmp_path):
    """``holder`` has the lock for a moment; whoever claims the folder then waits for it."""
    path, stop = interrupted(tmp_path / "run"), threading.Event()

    def ask() -> None:
        while not stop.is_set():
            holder(path)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(40):
            RunFolder.open(path).close()
    finally:
        stop.set()
        for thread in threads:
            thread.join()


@settings(max_examples=60, deadline=None)
@given(
    config=st.one_of(st.binary(max_size=40), st.just(b'{"file": "", "keys": {"steps": 3}, "created": 1.5}')),
    lock=st.one_of(st.none(), st.binary(max_size=40)),
    metrics=st.one_of(st.none(), st.binary(max_size=60)),
)
def test_any_bytes_are_one_of_the_states(config, lock, metrics, tmp_path_factory):
    path = tmp_path_factory.mktemp("any") / "run"
    path.mkdir()
    (path / "config.json").write_bytes(config)
    for name, data in (("lock", lock), ("metrics.jsonl", metrics)):
        if data is not None:
            (path / name).write_bytes(data)
    for one in runs_in(path.parent):
        assert one.state in ("interrupted", "dead", "broken")
        assert (one.note is not None) == (one.state == "broken")

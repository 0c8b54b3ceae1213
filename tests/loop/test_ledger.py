"""The ledger: atomic, idempotent, final states final, and still there after a kill."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time

import pytest

from croze.errors import InfraFault, InvariantViolated
from croze.loop.decisions import Counts, Key
from croze.loop.ledger import Dispatched, Finished, SqliteLedger, StepCommit


@pytest.fixture
def ledger(tmp_path):
    ledger = SqliteLedger(tmp_path / "ledger.sqlite")
    yield ledger
    ledger.close()


def keys(n: int, step: int = 1) -> list[Key]:
    return [Key(group=(step - 1) * n + i // 4, member=i % 4) for i in range(n)]


def dispatch(ledger, some, step=1):
    ledger.dispatch(Dispatched(key=k, step=step, task_id=f"0.{k.group}") for k in some)


def test_the_way_of_a_step(ledger):
    some = keys(8)
    dispatch(ledger, some)
    assert ledger.counts() == Counts(dispatched=8, in_flight=8)
    ledger.finish(
        Finished(key=k, prompt_tokens=5, generated_tokens=7, score=0.5, weights_id="w0") for k in some[:6]
    )
    ledger.finish([Finished(key=k, state="failed", reason="sandbox.lost") for k in some[6:]])
    assert ledger.counts() == Counts(dispatched=8, in_flight=6, failed=2)
    commit = StepCommit(step=1, weights_id="w1", reward_mean=0.5, info={"tokens": 42})
    states = {k.rollout_id: "trained" for k in some[:4]} | {k.rollout_id: "filtered" for k in some[4:6]}
    ledger.settle(commit, states)
    assert ledger.counts() == Counts(dispatched=8, trained=4, filtered=2, failed=2)
    assert ledger.steps() == [commit]
    entries = ledger.rollouts(step=1)
    assert [e.rollout_id for e in entries] == [k.rollout_id for k in some]
    assert (entries[0].state, entries[0].score, entries[0].settled_step) == ("trained", 0.5, 1)
    assert (entries[7].state, entries[7].reason, entries[7].settled_step) == ("failed", "sandbox.lost", None)
    assert ledger.rollouts(step=2) == []


def test_repeating_a_call_changes_nothing(ledger):
    some = keys(4)
    for _ in range(2):
        dispatch(ledger, some)
    ledger.finish([Finished(key=some[0], score=1.0)])
    ledger.finish([Finished(key=some[0], state="failed", score=0.0)])
    assert ledger.rollouts()[0].score == 1.0
    ledger.finish([Finished(key=k) for k in some])
    for _ in range(2):
        ledger.settle(StepCommit(step=1, weights_id="w1"), {k.rollout_id: "trained" for k in some})
    dispatch(ledger, some)
    assert ledger.counts() == Counts(dispatched=4, trained=4)


def test_a_final_state_never_changes_and_a_bad_commit_leaves_no_trace(ledger):
    some = keys(4)
    dispatch(ledger, some)
    states = {k.rollout_id: "trained" for k in some}
    ledger.settle(StepCommit(step=1, weights_id="w1"), {k: s for k, s in states.items() if k != "g0.3.0"})
    for bad in (states, {"g0.3.0": "trained", "g99.0.0": "trained"}):
        with pytest.raises(InvariantViolated, match="in flight"):
            ledger.settle(StepCommit(step=2, weights_id="w2"), bad)
    assert [s.step for s in ledger.steps()] == [1]
    assert ledger.counts() == Counts(dispatched=4, in_flight=1, trained=3)


def test_a_step_committed_with_other_weights_is_refused(ledger):
    ledger.settle(StepCommit(step=1, weights_id="w1"), {})
    with pytest.raises(InvariantViolated, match="w2"):
        ledger.settle(StepCommit(step=1, weights_id="w2"), {})
    dispatch(ledger, keys(1))
    with pytest.raises(InvariantViolated, match="already"):
        ledger.settle(StepCommit(step=1, weights_id="w1"), {"g0.0.0": "trained"})


def test_two_attempts_at_one_member_are_never_both_trained(ledger):
    both = [Key(group=0, member=0), Key(group=0, member=0, attempt=1)]
    dispatch(ledger, both)
    with pytest.raises(InvariantViolated, match="UNIQUE"):
        ledger.settle(StepCommit(step=1, weights_id="w"), {k.rollout_id: "trained" for k in both})
    assert ledger.counts() == Counts(dispatched=2, in_flight=2)
    assert ledger.steps() == []


def test_even_raw_sql_cannot_change_a_final_state(ledger, tmp_path):
    dispatch(ledger, keys(1))
    ledger.settle(StepCommit(step=1, weights_id="w"), {"g0.0.0": "trained"})
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    with pytest.raises(sqlite3.IntegrityError, match="final"):
        db.execute("UPDATE rollouts SET state = 'running'")
    db.close()


def test_a_lost_row_breaks_the_identity_and_is_named(ledger, tmp_path):
    dispatch(ledger, keys(4))
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    db.execute("UPDATE account SET count = count - 1 WHERE state = 'running'")
    db.commit()
    db.close()
    with pytest.raises(InvariantViolated, match="4 rollouts were dispatched"):
        ledger.counts()


def test_cancelling_ends_all_in_flight(ledger):
    some = keys(4)
    dispatch(ledger, some)
    ledger.finish([Finished(key=some[0])])
    assert ledger.cancel_in_flight("interrupted") == 4
    assert ledger.cancel_in_flight("interrupted") == 0
    assert ledger.counts() == Counts(dispatched=4, cancelled=4)


def test_a_reader_sees_the_ledger_while_it_is_written(ledger, tmp_path):
    dispatch(ledger, keys(4))
    reader = sqlite3.connect(f"file:{tmp_path}/ledger.sqlite?mode=ro", uri=True)
    assert reader.execute("SELECT count(*) FROM rollouts").fetchone() == (4,)
    dispatch(ledger, keys(8))
    assert reader.execute("SELECT count(*) FROM rollouts").fetchone() == (8,)
    reader.close()


def test_it_survives_a_kill_between_any_two_calls(tmp_path):
    program = textwrap.dedent("""
        import sys
        from pathlib import Path
        from croze.loop.decisions import Key
        from croze.loop.ledger import *
        ledger = SqliteLedger(Path(sys.argv[1]))
        for step in range(1, 10**6):
            key = Key(group=step, member=0)
            ledger.dispatch([Dispatched(key=key, step=step, task_id="t")])
            ledger.finish([Finished(key=key, score=1.0)])
            ledger.settle(StepCommit(step=step, weights_id=f"w{step}"), {key.rollout_id: "trained"})
            print(step, flush=True)
    """)
    path = tmp_path / "ledger.sqlite"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 40:
                break
        os.kill(process.pid, signal.SIGKILL)
        said = [40, *map(int, process.stdout.read().split())][-1]
    ledger = SqliteLedger(path)
    steps = [s.step for s in ledger.steps()]
    assert steps == list(range(1, len(steps) + 1)) and len(steps) >= said
    counts = ledger.counts()
    assert counts.trained == len(steps) and counts.in_flight <= 1
    ledger.close()


@pytest.mark.parametrize(
    ("damage", "fix"), [("text", "from a copy"), ("future", "croze that wrote it"), ("folder", "is a file")]
)
def test_a_file_that_is_no_ledger_of_ours_is_named(tmp_path, damage, fix):
    path = tmp_path / "ledger.sqlite"
    if damage == "text":
        path.write_text("not a database, but long enough to be read as one " * 30)
    elif damage == "folder":
        path.mkdir()
    else:
        db = sqlite3.connect(path)
        db.execute("PRAGMA user_version = 99")
        db.close()
    with pytest.raises(InfraFault) as caught:
        SqliteLedger(path)
    assert fix in (caught.value.fix or "")


def test_a_full_disk_is_named_and_nothing_is_half_done(ledger):
    dispatch(ledger, keys(4))
    ledger._db.execute("PRAGMA max_page_count = 1")
    with pytest.raises(InfraFault, match="full"):
        for step in range(2, 200):
            dispatch(ledger, keys(64, step=step), step=step)
    counts = ledger.counts()
    assert (counts.dispatched - 4) % 64 == 0
    assert counts.dispatched == len(ledger.rollouts())


def test_calls_are_quick(ledger):
    some = [Key(group=i, member=0) for i in range(300)]
    spent = []
    for key in some:
        start = time.thread_time()
        ledger.dispatch([Dispatched(key=key, step=1, task_id="t")])
        ledger.finish([Finished(key=key, score=1.0)])
        spent.append(time.thread_time() - start)
    assert sorted(spent)[len(spent) // 2] / 2 < 1e-3

"""Whether a run folder can go on: each thing that would keep it from doing so."""

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from croze.env.tasks import as_tasks
from croze.loop.checkpoints import Checkpoints
from croze.loop.decisions import Key
from croze.loop.folder import RunFolder
from croze.loop.ledger import Dispatched, Finished, SqliteLedger, StepCommit
from croze.plan.preflight import check_folder
from croze.run import Run

FILE = "import croze as cz\nrun = cz.Run(model='tiny-calc', tasks=[{'prompt': '1'}], reward=print)\n"


@pytest.fixture
def folder(tmp_path) -> Path:
    """Three steps committed, checkpoints of the first two."""
    file = tmp_path / "task.py"
    file.write_text(FILE)
    run = Run(model="tiny-calc", tasks=[], reward=print, steps=5, dir=str(tmp_path / "run"), file=str(file))
    made, _ = RunFolder.create(run)
    ledger = SqliteLedger(made.path / "ledger.sqlite")
    checkpoints = Checkpoints(made.path / "checkpoints")
    for step in (1, 2, 3):
        key = Key(group=step, member=0)
        ledger.dispatch([Dispatched(key=key, step=step, task_id=f"0.{step}")])
        ledger.finish([Finished(key=key)])
        ledger.settle(StepCommit(step=step, weights_id=f"w{step}"), {key.rollout_id: "trained"})
        if step < 3:
            checkpoints.write(
                step, f"w{step}", {}, lambda where: (where / "data").write_bytes(b"x" * 5000) and None
            )
    ledger.close()
    made.close()
    return made.path


def found(folder: Path) -> dict[str, list[tuple[str, str, str]]]:
    told: dict[str, list[tuple[str, str, str]]] = {}
    for f in check_folder(folder):
        told.setdefault(f.check, []).append((f.status, f.kind, f.message))
    return told


def test_a_folder_that_can_go_on(folder):
    told = found(folder)
    assert {status for each in told.values() for status, _, _ in each} == {"ok"}
    assert "goes on after step 2 of 5; 1 steps after it are done again" in told["checkpoint"][0][2]


def test_a_finished_run_says_so(folder):
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    config["keys"]["steps"] = 2
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    assert found(folder)["checkpoint"][0][2].startswith("finished")


def test_flipped_bytes_fall_back_to_the_checkpoint_before(folder):
    data = folder / "checkpoints/step_000002/data"
    data.write_bytes(b"x" * 2000 + b"y" + b"x" * 2999)
    (broken, good) = found(folder)["checkpoint"]
    assert broken[:2] == ("warn", "checkpoint") and "step_000002" in broken[2] and "data" in broken[2]
    assert "after step 1" in good[2]


def test_without_a_whole_checkpoint_it_begins_anew(folder):
    shutil.rmtree(folder / "checkpoints")
    assert found(folder)["checkpoint"][0][:2] == ("warn", "folder.new")


def test_a_checkpoint_of_another_history_is_found(folder):
    db = sqlite3.connect(folder / "ledger.sqlite")
    db.execute("UPDATE steps SET weights_id = 'w9' WHERE step = 2")
    db.commit()
    db.close()
    told = found(folder)["checkpoint"]
    assert told[0][:2] == ("warn", "checkpoint") and "other weights at step 2" in told[0][2]
    assert "after step 1" in told[1][2]


def test_a_changed_task_file_is_found(folder):
    file = folder.parent / "task.py"
    file.write_text(FILE + "# more\n")
    assert found(folder)["file"][0][:2] == ("fail", "usage")
    file.unlink()
    assert found(folder)["file"][0][:2] == ("fail", "declaration")


def test_changed_tasks_are_found(folder):
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    for then, status in ((as_tasks([{"prompt": "1"}]).fingerprint(), "ok"), ("another", "fail")):
        (folder / "config.json").write_bytes(msgspec.json.encode({**config, "tasks": then}))
        assert found(folder)["tasks"][0][0] == status


def test_a_folder_in_use_is_found_and_left_alone(folder):
    before = (folder / "ledger.sqlite").read_bytes()
    with RunFolder.open(folder):
        told = found(folder)
    assert told["folder"][0][:2] == ("fail", "usage") and "in use by process" in told["folder"][0][2]
    assert told["ledger"][0][1] == "skipped" and (folder / "ledger.sqlite").read_bytes() == before


def test_a_ledger_that_does_not_add_up_is_found(folder):
    db = sqlite3.connect(folder / "ledger.sqlite")
    db.execute("UPDATE account SET count = count + 1 WHERE state = 'trained'")
    db.commit()
    db.close()
    told = found(folder)
    assert told["ledger"][0][:2] == ("fail", "invariant") and told["checkpoint"][0][1] == "skipped"


@pytest.mark.parametrize("data", [b"this is no database" * 100, b""])
def test_a_ledger_that_is_none_is_found(folder, data):
    for name in ("ledger.sqlite-wal", "ledger.sqlite-shm"):
        (folder / name).unlink(missing_ok=True)
    (folder / "ledger.sqlite").write_bytes(data)
    told = found(folder)
    if data:
        assert told["ledger"][0][:2] == ("fail", "infra")
    else:
        assert "goes on" not in told["checkpoint"][-1][2]


def test_a_missing_ledger_is_not_made(folder):
    for path in folder.glob("ledger.sqlite*"):
        path.unlink()
    assert found(folder)["ledger"][0][:2] == ("warn", "folder.new")
    assert not (folder / "ledger.sqlite").exists()


@pytest.mark.parametrize("text", [None, "{", '{"file": ""}', "[]"])
def test_a_folder_that_is_no_run_fails_once(folder, text):
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    told = found(folder)
    assert told["folder"][0][0] == "fail" and told["folder"][0][1] in ("usage", "declaration")
    assert {each[0][1] for name, each in told.items() if name != "folder"} == {"skipped"}


def test_a_model_that_is_gone_is_found(folder):
    config = msgspec.json.decode((folder / "config.json").read_bytes())
    config["keys"]["model"] = str(folder / "no-model")
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    assert found(folder)["model"][0][:2] == ("fail", "model.not_found")


def test_checking_a_folder_loads_no_torch(folder):
    program = (
        "import sys\nfrom pathlib import Path\nfrom croze.plan.preflight import check_folder\n"
        "check_folder(Path(sys.argv[1]))\nprint('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["False"], done.stderr

"""A run that stops, by signal, fault or kill, goes on where it was; what cannot go on says why."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from croze.loop.checkpoints import Checkpoints
from dying import TASK, Nursery, Process, Strike, alive, facts, gone_within

CROZE = [sys.executable, "-m", "croze.cli.main"]
SETTLED = Strike(when="after", at="croze.loop.ledger:SqliteLedger.settle", nth=3)
"""Step 3 is committed, and step 2 the last that was saved."""


@pytest.fixture(scope="module")
def nursery(tmp_path_factory) -> Iterator[Nursery]:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "task.py").write_text(TASK)
    with Nursery(folder) as made:
        yield made


@pytest.fixture(scope="module")
def whole(nursery) -> dict:
    """The facts of a run that nothing happened to."""
    assert nursery.run("train", "task.py", "run.dir=whole").code == 0
    return facts(nursery.folder / "whole")


@pytest.fixture(scope="module")
def _half(nursery) -> Path:
    assert nursery.run("train", "task.py", "run.dir=half", strike=SETTLED).code == -signal.SIGKILL
    return nursery.folder / "half"


@pytest.fixture
def half(_half, tmp_path) -> Path:
    """A run that was killed after step 3."""
    return shutil.copytree(_half, tmp_path / "half")


def resumed(nursery: Nursery, run: Path, whole: dict, *words: str) -> Process:
    process = nursery.run("resume", str(run), *words)
    assert process.code == 0, process.tail()
    found = facts(run)
    assert [key for key in whole if whole[key] != found[key]] == []
    assert process.told("done")[0]["weights_id"] == whole["steps"][-1].weights_id
    return process


# ------------------------------------------------------------------------------------------------- killed


def test_a_killed_run_ends_as_if_it_never_was(nursery, whole, tmp_path):
    """In the middle of a save; tests/chaos has every other place."""
    strike = Strike(when="before", at="croze.loop.checkpoints:_write_durably", nth=2)
    process = nursery.run("train", "task.py", f"run.dir={tmp_path}/run", strike=strike)
    assert process.code == -signal.SIGKILL
    assert gone_within(5, lambda: alive(process.mark)) == []
    resumed(nursery, tmp_path / "run", whole)


def test_killed_again_while_it_resumes(nursery, whole, half):
    cut = Strike(when="after", at="croze.loop.ledger:SqliteLedger.cut")
    assert nursery.run("resume", str(half), strike=cut).code == -signal.SIGKILL
    process = resumed(nursery, half, whole)
    assert process.told("resume")[0]["step"] == 2


def test_it_is_declared_before_anything_heavy_is_loaded(nursery, whole, tmp_path):
    words = [*CROZE, "train", str(nursery.folder / "task.py"), f"run.dir={tmp_path}/run", "--json"]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, start_new_session=True) as process:
        ends = time.monotonic() + 30
        while not (tmp_path / "run" / "config.json").exists():
            assert process.poll() is None and time.monotonic() < ends
            time.sleep(0.001)
        os.killpg(process.pid, signal.SIGSTOP)
        loaded = Path(f"/proc/{process.pid}/maps").read_text()
        os.killpg(process.pid, signal.SIGKILL)
    assert "torch" not in loaded
    resumed(nursery, tmp_path / "run", whole)


def test_a_torn_ledger_costs_no_checkpoint(nursery, whole, half, tmp_path):
    """Whole checkpoints that the ledger has lost sight of are not thrown away unasked."""
    wal = half / "ledger.sqlite-wal"
    os.truncate(wal, wal.stat().st_size // 2 + 17)
    refused = nursery.run("resume", str(half))
    (error,) = [e for e in refused.events() if e["event"] == "error"]
    assert refused.code == 3 and "step_000002 is whole" in error["message"] and "move the" in error["fix"]
    (half / "checkpoints" / "step_000002").rename(tmp_path / "kept")
    resumed(nursery, half, whole)


def test_an_interrupt_while_the_task_file_loads_names_the_resume(half):
    """Twice in a moment: the answer to the first is not cut off."""
    config, file, loading = json.loads((half / "config.json").read_text()), half / "slow.py", half / "loading"
    file.write_text(f"{TASK}\nimport pathlib, time\npathlib.Path({str(loading)!r}).touch()\ntime.sleep(60)\n")
    (half / "config.json").write_text(json.dumps({**config, "file": str(file)}))
    words = [*CROZE, "resume", str(half), "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 30
        while not loading.exists() and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    error = json.loads(out)
    assert process.returncode == 4 and "Traceback" not in err
    assert error["kind"] == "interrupted" and error["fix"] == f"croze resume {half}"


def test_more_steps_done_than_declared_is_told(nursery, half):
    config = json.loads((half / "config.json").read_text())
    config["keys"]["steps"] = 2
    (half / "config.json").write_text(json.dumps(config))
    refused = nursery.run("resume", str(half))
    (error,) = refused.events()
    assert refused.code == 2 and error["message"] == "config.json says steps=2, and 3 are done"


# ------------------------------------------------------------------------------------ finished, held, refused


def test_a_finished_run_is_only_told(whole, nursery):
    program = "import sys; from croze.cli.main import main; code = main(sys.argv[1:])"
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{program}; assert 'torch' not in sys.modules; sys.exit(code)",
            "resume",
            "whole",
            "--json",
        ],
        cwd=nursery.folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    last = whole["steps"][-1].weights_id
    assert json.loads(line) == {"event": "done", "run_dir": "whole", "weights_id": last}
    again = nursery.run("train", "task.py", "run.dir=whole")
    assert again.code == 2 and "croze resume whole" in again.events()[-1]["fix"]
    assert facts(nursery.folder / "whole") == whole


def test_a_run_has_one_process(nursery, tmp_path):
    first = nursery.start("train", "task.py", f"run.dir={tmp_path}/run", "steps=100000")
    second = nursery.start("train", "task.py", f"run.dir={tmp_path}/run", "steps=100000")
    until = time.monotonic() + 30
    while first.lives() and second.lives() and time.monotonic() < until:
        time.sleep(0.01)
    (runs, lost) = (first, second) if first.lives() else (second, first)
    assert lost.wait() == 2 and f"in use by process {runs.pid}" in lost.events()[-1]["message"]
    runs.until(lambda p: p.told("step"))
    third = nursery.run("resume", f"{tmp_path}/run")
    assert third.code == 2 and f"in use by process {runs.pid}" in third.events()[-1]["message"]
    runs.signal(signal.SIGTERM)
    assert runs.wait() == 4


def test_another_task_file_is_refused_unless_allowed(nursery, whole, half):
    config = json.loads((half / "config.json").read_text())
    (half.parent / "task.py").write_text(TASK + "# better\n")
    config["file"] = str(half.parent / "task.py")
    (half / "config.json").write_text(json.dumps(config))
    before = (half / "metrics.jsonl").read_bytes()
    refused = nursery.run("resume", str(half))
    (error,) = refused.events()
    assert refused.code == 2 and "task file has changed" in error["message"] and "--changed" in error["fix"]
    assert (half / "metrics.jsonl").read_bytes() == before
    resumed(nursery, half, whole, "--changed")


def test_other_threads_are_told(nursery, half):
    config = json.loads((half / "config.json").read_text())
    config["numerics"][-1]["threads"] = 3
    (half / "config.json").write_text(json.dumps(config))
    process = nursery.run("resume", str(half))
    told = [e["message"] for e in process.told("warning") if "threads" in e["message"]]
    assert process.code == 0 and told == ["the run goes on, but not bit for bit: threads was 3, is 1"]
    assert told[0] in (half / "faults.jsonl").read_text()
    (doubt,) = [e["message"] for e in process.told("warning") if "exact numerics" in e["message"]]
    assert doubt.startswith("a resume needs") and doubt.endswith("not measured; set engine.self_check=true")
    then, now = json.loads((half / "config.json").read_text())["numerics"]
    assert (then["from_step"], then["threads"]) == (1, 3) and now["threads"] == 1
    assert now["from_step"] > 1, "the steps before were computed with three"


def test_a_run_made_in_python(nursery, whole, tmp_path):
    """The task file as a module; the program gives the run once more."""
    (tmp_path / "made.py").write_text(TASK)
    (tmp_path / "program.py").write_text(
        "import signal\nimport croze as cz\nfrom made import run\n"
        "def at(event):\n"
        "    if event['event'] == 'step' and event['step'] == 3:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "run = run.override({'run.dir': 'run'})\n"
        "try:\n"
        "    cz.train(run, on_event=at)\n"
        "except cz.CrozeError as error:\n"
        "    print(error.kind, error.message)\n"
        "print(cz.resume('run', run).weights_id)\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, env=environment
    )
    told = ["interrupted stopped after step 3 of 5", whole["steps"][-1].weights_id]
    assert done.stdout.splitlines() == told, done.stderr
    without = nursery.run("resume", f"{tmp_path}/run")
    assert without.code == 2 and "made in Python" in without.events()[-1]["message"]


# ------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("harm", ["flipped", "no manifest"])
def test_a_broken_checkpoint_falls_back_by_name(nursery, whole, harm, tmp_path):
    run = shutil.copytree(nursery.folder / "whole", tmp_path / "run")
    newest = run / "checkpoints" / "step_000005"
    file = next(newest.glob("trainer/*.safetensors"))
    if harm == "flipped":
        with file.open("r+b") as changed:
            changed.seek(file.stat().st_size // 2)
            changed.write(b"\xff\x00\xff\x00\xff\x00\xff\x00")
    else:
        (newest / "manifest.json").unlink()
    process = resumed(nursery, run, whole)
    (told,) = process.told("resume")
    assert (told["step"], told["again_steps"]) == (4, 1)
    assert [b["checkpoint"] for b in told["broken"]] == ["step_000005"] and told["broken"][0]["why"]
    (kept,) = [
        json.loads(line) for line in (run / "faults.jsonl").read_text().splitlines() if "broken" in line
    ]
    assert kept["event"] == "broken_checkpoint" and kept["checkpoint"] == "step_000005"


def test_without_a_whole_checkpoint_it_begins_anew(nursery, whole, tmp_path):
    run = shutil.copytree(nursery.folder / "whole", tmp_path / "run")
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_bytes(manifest.read_bytes()[:-9])
    (told,) = resumed(nursery, run, whole).told("resume")
    assert (told["step"], told["again_steps"], told["again_rollouts"]) == (0, 5, 40)
    assert [b["checkpoint"] for b in told["broken"]] == ["step_000005", "step_000004"]


# ------------------------------------------------------------------------------------------------ signals


@pytest.mark.parametrize(
    ("strike", "step"),
    [
        (Strike(at="croze.loop.build:build_model", does="SIGINT"), 0),
        (Strike(at="croze.loop.ledger:SqliteLedger.dispatch", nth=3, does="SIGTERM"), 2),
        (Strike(at="croze.train.optimizer:AdamW.step", nth=3, does="SIGINT"), 3),
    ],
    ids=str,
)
def test_stopped_once_it_saves_what_is_trained(nursery, whole, strike, step, tmp_path):
    run = tmp_path / "run"
    process = nursery.run("train", "task.py", f"run.dir={run}", strike=strike)
    last = process.events()[-1]
    assert process.code == 4 and last["kind"] == "interrupted" and last["fix"] == f"croze resume {run}"
    assert len(process.told("stopping")) == 1
    steps = [e["step"] for e in process.told("step")]
    saved, _ = Checkpoints(run / "checkpoints").newest()
    assert (saved.step if saved else 0) == len(steps) == step
    assert gone_within(5, lambda: alive(process.mark)) == []
    resumed(nursery, run, whole)


def test_stopped_during_the_last_evaluation_it_is_made_later(nursery, tmp_path):
    words = ("loop.eval_tasks=3", "steps=2")
    assert nursery.run("train", "task.py", f"run.dir={tmp_path}/whole", *words).code == 0
    strike = Strike(at="croze.loop.evaluation:Evaluation.measure", nth=2, does="SIGINT")
    stopped = nursery.run("train", "task.py", f"run.dir={tmp_path}/run", *words, strike=strike)
    assert stopped.code == 4 and len(stopped.told("eval")) == 1
    process = resumed(nursery, tmp_path / "run", facts(tmp_path / "whole"))
    assert [e["step"] for e in process.told("eval")] == [2]
    assert [e["event"] for e in nursery.run("resume", f"{tmp_path}/run").events()] == ["done"]


@pytest.mark.parametrize("group", [False, True], ids=["process", "group"])
def test_stopped_twice_it_ends_at_once(nursery, group, tmp_path):
    hang = Strike(at="croze.train.state:StateSnapshot.write", does="hang")
    process = nursery.start("train", "task.py", f"run.dir={tmp_path}/run", strike=hang)
    process.until(lambda p: "hanging" in p.said())
    process.signal(signal.SIGINT, group=group)
    process.until(lambda p: p.told("stopping"))
    time.sleep(0.2)
    assert process.lives() and alive(process.mark), "what judges is not to go before the run decides"
    process.signal(signal.SIGINT, group=group)
    began = time.monotonic()
    assert process.wait() == 4 and time.monotonic() - began < 1
    assert process.events()[-1]["fix"] == f"croze resume {tmp_path}/run"
    assert gone_within(5, lambda: alive(process.mark)) == []


def test_who_reads_the_output_goes_away(nursery, whole, tmp_path):
    """``croze train FILE --json | head -2``, and Ctrl-C with ``| tee log``: what is trained is saved."""
    words = [*CROZE, "train", str(nursery.folder / "task.py"), f"run.dir={tmp_path}/run", "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if '"step"' in line:
                break
        process.stdout.close()
        said = process.stderr.read()
        assert process.wait() == 4 and "Traceback" not in said
    assert Checkpoints(tmp_path / "run" / "checkpoints").all()
    resumed(nursery, tmp_path / "run", whole)

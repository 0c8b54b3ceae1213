"""Killed anywhere, a run goes on as if nothing had happened: same weights, same ledger, same metrics, same trace."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dying import TASK, Nursery, Strike, alive, facts, gone_within

pytestmark = pytest.mark.chaos

PLAIN: tuple[str, ...] = ()
RICH = ("lora.rank=2", "loop.eval_tasks=3", "loop.eval_every=2", "optim.minibatches=2", "sync.dtype=float32")
"""An adapter, evaluations, two updates a step."""


class Ward:
    """Runs in one folder, each compared with one that was never killed."""

    def __init__(self, folder: Path) -> None:
        (folder / "task.py").write_text(TASK)
        self.folder, self.nursery, self._number = folder, Nursery(folder), 0
        self._whole: dict[tuple[str, ...], dict] = {}

    def whole(self, words: tuple[str, ...]) -> dict:
        if words not in self._whole:
            name = f"whole-{len(self._whole)}"
            assert self.nursery.run("train", "task.py", f"run.dir={name}", *words).code == 0
            self._whole[words] = facts(self.folder / name)
        return self._whole[words]

    def new(self) -> str:
        self._number += 1
        return f"run-{self._number}"

    def killed(self, *words: str, strike: Strike) -> None:
        process = self.nursery.run(*words, strike=strike)
        assert process.code == -signal.SIGKILL, f"it never came to {strike}: {process.tail()}"
        assert gone_within(5, lambda: alive(process.mark)) == []

    def resumed(self, name: str, words: tuple[str, ...]) -> list[dict]:
        """Resume to the end, compare all with a run that never stopped; the events."""
        process = self.nursery.run("resume", name)
        assert process.code == 0, process.tail()
        whole, found = self.whole(words), facts(self.folder / name)
        assert [key for key in whole if whole[key] != found[key]] == []
        assert process.events()[-1]["weights_id"] == whole["steps"][-1].weights_id
        return process.events()


@pytest.fixture(scope="module")
def ward(tmp_path_factory) -> Iterator[Ward]:
    made = Ward(tmp_path_factory.mktemp("ward"))
    yield made
    made.nursery.close()


def points(*told: tuple[str, str, int]) -> list[Strike]:
    return [Strike(when=when, at=at, nth=nth) for when, at, nth in told]


ANYWHERE = points(
    ("after", "croze.loop.folder:RunFolder.write", 1),  # config.json is there, nothing else
    ("before", "croze.loop.build:build_model", 1),
    ("after", "croze.loop.build:build_trainer", 1),
    ("after", "croze.loop.ledger:SqliteLedger.dispatch", 1),  # nothing generated yet
    ("after", "croze.loop.ledger:SqliteLedger.finish", 3),  # some of step 1
    ("after", "croze.loop.ledger:SqliteLedger.finish", 20),  # some of step 3, after a checkpoint
    ("before", "croze.loop.learning:Learning.learn", 3),  # all generated, nothing learned
    ("before", "croze.train.optimizer:AdamW.step", 3),
    ("after", "croze.train.optimizer:AdamW.step", 3),  # other weights, not published
    ("after", "croze.sync.identity:Identity.of", 4),
    ("before", "croze.loop.ledger:SqliteLedger.settle", 3),
    ("after", "croze.loop.ledger:SqliteLedger.settle", 3),  # committed, its rollouts not in the trace
    ("after", "croze.trace.recorder:Recorder.flush", 5),
    ("after", "croze.trace.metrics:JsonLines.write", 3),
    ("before", "croze.loop.saving:Saver.begin", 2),  # a checkpoint is due
    ("before", "croze.train.state:StateSnapshot.write", 2),
    ("after", "croze.train.state:StateSnapshot.write", 2),  # the training state, no model yet
    ("after", "croze.loop.training:save_model", 2),
    ("before", "croze.loop.checkpoints:_write_durably", 2),  # all but the manifest
    ("after", "croze.loop.checkpoints:_write_durably", 2),  # the manifest, under a name that does not count
    ("before", "croze.loop.checkpoints:Checkpoints._prune", 3),  # one checkpoint too many
    ("before", "croze.loop.checkpoints:_remove", 4),  # one without its manifest
    ("before", "croze.loop.checkpoints:_write_durably", 3),  # of the last step
    ("before", "croze.loop.training:result", 1),  # done, and not told
)


@pytest.mark.parametrize("strike", ANYWHERE, ids=str)
def test_killed_once(ward: Ward, strike: Strike) -> None:
    name = ward.new()
    ward.killed("train", "task.py", f"run.dir={name}", strike=strike)
    ward.resumed(name, PLAIN)


@pytest.mark.parametrize(
    "strike",
    points(
        ("after", "croze.loop.evaluation:Evaluation.measure", 1),  # before the first step, not told
        ("after", "croze.train.optimizer:AdamW.step", 5),  # between the two updates of step 3
        ("before", "croze.loop.evaluation:Evaluation.measure", 2),  # after step 2
        ("before", "croze.loop.saving:Saver.begin", 1),  # evaluated, not saved
        ("after", "croze.loop.training:save_model", 2),
        ("before", "croze.loop.evaluation:Evaluation.measure", 4),  # the last one
        ("before", "croze.loop.saving:Saver.keep", 1),
    ),
    ids=str,
)
def test_killed_once_with_an_adapter_and_evaluations(ward: Ward, strike: Strike) -> None:
    name = ward.new()
    ward.killed("train", "task.py", f"run.dir={name}", *RICH, strike=strike)
    ward.resumed(name, RICH)


def test_killed_before_it_is_declared_nothing_was_begun(ward: Ward) -> None:
    name = ward.new()
    strike = Strike(at="croze.loop.folder:RunFolder.write")
    ward.killed("train", "task.py", f"run.dir={name}", strike=strike)
    refused = ward.nursery.run("resume", name)
    assert refused.code == 2 and "holds no run" in refused.events()[-1]["message"]
    assert ward.nursery.run("train", "task.py", f"run.dir={name}").code == 0
    assert facts(ward.folder / name) == ward.whole(PLAIN)


@pytest.mark.parametrize(
    "again",
    points(
        ("before", "croze.loop.ledger:SqliteLedger.cut", 1),
        ("after", "croze.loop.ledger:SqliteLedger.cut", 1),
        ("after", "croze.trace.marks:cut", 1),
        ("after", "croze.loop.checkpoints:Checkpoints.go_on_from", 1),
        ("after", "croze.train.trainer:TorchTrainer.load", 1),
        ("after", "croze.loop.ledger:SqliteLedger.finish", 3),
        ("after", "croze.loop.ledger:SqliteLedger.settle", 1),
        ("after", "croze.loop.checkpoints:_write_durably", 1),
        ("before", "croze.loop.training:result", 1),
    ),
    ids=str,
)
def test_killed_again_while_it_resumes(ward: Ward, again: Strike) -> None:
    name = ward.new()
    first = Strike(when="after", at="croze.loop.ledger:SqliteLedger.settle", nth=3)
    ward.killed("train", "task.py", f"run.dir={name}", strike=first)
    ward.killed("resume", name, strike=again)
    ward.resumed(name, PLAIN)


def test_killed_at_every_step(ward: Ward) -> None:
    """As soon as it is saved, again and again."""
    name = ward.new()
    strike = Strike(when="after", at="croze.loop.checkpoints:Checkpoints.write")
    ward.killed("train", "task.py", f"run.dir={name}", "loop.checkpoint_every=1", strike=strike)
    for _ in range(3):
        ward.killed("resume", name, strike=strike)
    events = ward.resumed(name, ("loop.checkpoint_every=1",))
    assert [e["step"] for e in events if e["event"] == "resume"] == [4]


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_moment(ward: Ward, seed: int) -> None:
    """As often as it takes, after a random time; it comes to its end because every step is saved."""
    rng, name, words = random.Random(seed), ward.new(), ("loop.checkpoint_every=1",)
    ward.whole(words)
    process = ward.nursery.start("train", "task.py", f"run.dir={name}", *words)
    for _ in range(4):
        process.until(lambda p: (ward.folder / name / "config.json").exists())
        ends = time.monotonic() + rng.uniform(0, 2.5)
        while process.lives() and time.monotonic() < ends:
            time.sleep(0.002)
        if process.lives():
            os.killpg(process.pid, signal.SIGKILL)
        assert process.wait() in (0, -signal.SIGKILL)
        assert gone_within(5, lambda p=process: alive(p.mark)) == []
        process = ward.nursery.start("resume", name)
    assert process.wait() == 0, process.tail()
    ward.resumed(name, words)


@pytest.mark.parametrize(
    "strike",
    [
        Strike(at="croze.loop.evaluation:Evaluation.measure", nth=1, does="SIGINT"),
        Strike(at="croze.loop.evaluation:Evaluation.measure", nth=2, does="SIGTERM"),
        Strike(at="croze.train.optimizer:AdamW.step", nth=5, does="SIGINT"),
        Strike(at="croze.train.state:StateSnapshot.write", nth=1, does="SIGINT"),
        Strike(at="croze.loop.ledger:SqliteLedger.settle", nth=3, does="SIGTERM"),
    ],
    ids=str,
)
def test_stopped_anywhere(ward: Ward, strike: Strike) -> None:
    name = ward.new()
    process = ward.nursery.run("train", "task.py", f"run.dir={name}", *RICH, strike=strike)
    assert process.code == 4 and process.events()[-1]["fix"] == f"croze resume {name}", process.tail()
    assert gone_within(5, lambda: alive(process.mark)) == []
    events = ward.resumed(name, RICH)
    assert [e["again_steps"] for e in events if e["event"] == "resume"] == [0]


def test_killed_in_the_middle_of_a_file(ward: Ward) -> None:
    """While the state is being written: seen from outside, by what is in the folder."""
    name = ward.new()
    process = ward.nursery.start("train", "task.py", f"run.dir={name}", "loop.checkpoint_every=1")
    partial = ward.folder / name / "checkpoints"
    process.until(lambda _: any(p.name.endswith(".safetensors") for p in partial.glob(".step_*/*/*")))
    process.signal(signal.SIGKILL, group=True)
    assert process.wait() == -signal.SIGKILL
    ward.resumed(name, ("loop.checkpoint_every=1",))


@pytest.mark.parametrize("seed", range(2))
def test_the_command_itself_killed_early(ward: Ward, seed: int) -> None:
    """A whole start, with its self-check; killed in its first seconds, once or twice."""
    rng, name = random.Random(seed), ward.new()
    croze = [sys.executable, "-m", "croze.cli.main"]
    words = ["train", "task.py", f"run.dir={name}", "--json"]
    for _ in range(2):
        with subprocess.Popen(
            [*croze, *words], cwd=ward.folder, stdout=subprocess.DEVNULL, start_new_session=True
        ) as process:
            while not (ward.folder / name / "config.json").exists():
                time.sleep(0.005)
            time.sleep(rng.uniform(0, 4))
            os.killpg(process.pid, signal.SIGKILL)
        words = ["resume", name, "--json"]
    ward.resumed(name, PLAIN)


def test_other_data_are_refused(tmp_path: Path, ward: Ward) -> None:
    rows = [json.dumps({"prompt": f"add {n} and 2, times 3=", "answer": str(n)}) for n in range(50)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "task.py").write_text(TASK.replace("cz.tasks(problems)", "cz.tasks('rows.jsonl')"))
    settled = Strike(when="after", at="croze.loop.ledger:SqliteLedger.settle", nth=3)
    killed = ward.nursery.run("train", "task.py", "run.dir=run", strike=settled, cwd=tmp_path)
    assert killed.code == -signal.SIGKILL
    (tmp_path / "rows.jsonl").write_text("\n".join(rows).replace('"7"', '"8"'))
    refused = ward.nursery.run("resume", "run", cwd=tmp_path)
    assert refused.code == 2 and "tasks have changed" in refused.events()[-1]["message"]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    assert ward.nursery.run("resume", "run", cwd=tmp_path).code == 0


@pytest.mark.parametrize("harm", ["short", "long", "missing", "gone"])
def test_a_broken_checkpoint_falls_back(ward: Ward, harm: str) -> None:
    ward.whole(PLAIN)
    name = ward.new()
    run = shutil.copytree(ward.folder / "whole-0", ward.folder / name)
    newest = run / "checkpoints" / "step_000005"
    file = newest / "model" / "model.safetensors"
    if harm == "short":
        os.truncate(file, file.stat().st_size - 1)
    elif harm == "long":
        os.truncate(file, file.stat().st_size + 1)
    elif harm == "missing":
        file.unlink()
    else:
        shutil.rmtree(newest)
    (told,) = [e for e in ward.resumed(name, PLAIN) if e["event"] == "resume"]
    assert told["step"] == 4 and [b["checkpoint"] for b in told["broken"]] == ["step_000005"] * (
        harm != "gone"
    )


def test_a_broken_one_does_not_count_among_those_kept(ward: Ward) -> None:
    """With one kept, the newest broken and the run killed again: the older one is what is left, and is used."""
    words, name = ("loop.keep=1", "loop.checkpoint_every=1"), ward.new()
    settled = Strike(when="after", at="croze.loop.ledger:SqliteLedger.settle", nth=4)
    ward.killed(
        "train", "task.py", f"run.dir={name}", "loop.checkpoint_every=1", "loop.keep=2", strike=settled
    )
    config = ward.folder / name / "config.json"
    config.write_text(config.read_text().replace('"loop.keep": 2', '"loop.keep": 1'))
    (newest,) = (ward.folder / name / "checkpoints").glob("step_000003/trainer/trainer.json")
    newest.write_bytes(b"{}")
    ward.killed(
        "resume", name, strike=Strike(when="after", at="croze.loop.ledger:SqliteLedger.finish", nth=3)
    )
    (told,) = [e for e in ward.resumed(name, words) if e["event"] == "resume"]
    assert told["step"] == 2

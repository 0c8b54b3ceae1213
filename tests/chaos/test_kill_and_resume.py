"""Killed anywhere, a run goes on as if nothing had happened: same weights, same ledger, same metrics, same trace."""

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dying import TASK, Death, Nursery, alive, facts, gone_within

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

    def killed(self, *words: str, death: Death) -> None:
        process = self.nursery.run(*words, death=death)
        assert process.code == -signal.SIGKILL, f"it never came to {death}: {process.tail()}"
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


def points(*told: tuple[str, str, int]) -> list[Death]:
    return [Death(when=when, at=at, nth=nth) for when, at, nth in told]


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


@pytest.mark.parametrize("death", ANYWHERE, ids=str)
def test_killed_once(ward: Ward, death: Death) -> None:
    name = ward.new()
    ward.killed("train", "task.py", f"run.dir={name}", death=death)
    ward.resumed(name, PLAIN)


@pytest.mark.parametrize(
    "death",
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
def test_killed_once_with_an_adapter_and_evaluations(ward: Ward, death: Death) -> None:
    name = ward.new()
    ward.killed("train", "task.py", f"run.dir={name}", *RICH, death=death)
    ward.resumed(name, RICH)


def test_killed_before_it_is_declared_nothing_was_begun(ward: Ward) -> None:
    name = ward.new()
    death = Death(at="croze.loop.folder:RunFolder.write")
    ward.killed("train", "task.py", f"run.dir={name}", death=death)
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
def test_killed_again_while_it_resumes(ward: Ward, again: Death) -> None:
    name = ward.new()
    first = Death(when="after", at="croze.loop.ledger:SqliteLedger.settle", nth=3)
    ward.killed("train", "task.py", f"run.dir={name}", death=first)
    ward.killed("resume", name, death=again)
    ward.resumed(name, PLAIN)


def test_killed_at_every_step(ward: Ward) -> None:
    """Always in the middle of its generation, first without and then with a checkpoint to go on from."""
    name = ward.new()
    death = Death(when="after", at="croze.loop.ledger:SqliteLedger.finish", nth=12)
    ward.killed("train", "task.py", f"run.dir={name}", "loop.checkpoint_every=1", death=death)
    for _ in range(3):
        ward.killed("resume", name, death=death)
    events = ward.resumed(name, ("loop.checkpoint_every=1",))
    assert events[1]["step"] >= 4


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

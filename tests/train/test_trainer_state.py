"""Saved and loaded, training goes on bit for bit; a state that is damaged or another's is refused whole."""

import json
import random
import resource
import shutil
import threading
import time

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import croze.train.state as state_module
import small_models as small
from croze.config import Algo, Optim, Sampling
from croze.errors import CheckFailed, CheckpointFault, CheckpointMismatch, CrozeError, UsageError, WaitExpired
from croze.models.weights import LoraSpec
from croze.train.algorithms import build
from croze.train.optimizer import MAX_SKIPS
from croze.train.protocol import StepStats, TrainStats
from croze.train.state import Hold, StateSnapshot
from croze.train.trainer import TorchTrainer
from croze.types import WeightsId

SPEC = LoraSpec(rank=3, scale=2.0, targets=("q_proj", "v_proj", "down_proj"))
KL = build(Algo(kl=0.1), Sampling())
PLAIN = build(Algo(), Sampling())
ARCH = small.architecture()


def trainer(*, algorithm=KL, lora=None, dtype="float32", release=False, seed=0, arch=ARCH) -> TorchTrainer:
    optim = Optim(lr=1e-2, schedule="cosine", warmup_steps=2, weight_decay=0.1)
    return small.make_rig(
        arch,
        dtype=dtype,
        lora=lora,
        algorithm=algorithm,
        optim=optim,
        release=release,
        seed=seed,
        measured=False,
    ).trainer


def accumulate(own: TorchTrainer, step: int) -> TrainStats:
    """Forward and backward over the samples of a step, with the reference's log-probs where they are needed."""
    samples = small.random_samples(307, [(9, (12, 5)), (4, (7,))], seed=step)
    if own.reference is not None:
        found = own.reference_logprobs(samples)
        samples = [msgspec.structs.replace(s, reference_S=r) for s, r in zip(samples, found, strict=True)]
    return own.forward_backward(small.batch(samples))


def learn(own: TorchTrainer, steps: range) -> list[tuple[TrainStats, StepStats]]:
    """Train these steps as a loop does, published after each."""
    told = []
    for step in steps:
        told.append((accumulate(own, step), msgspec.structs.replace(own.step(step), waited_s=0.0)))
        own.publish(WeightsId(f"w{step}"))
    return told


def state(own: TorchTrainer) -> dict[str, bytes]:
    """Every byte of it: masters and moments, what is published, the counts."""
    tensors = {**dict(own._state()), **{f"export/{n}": t for n, t in own.export()}}
    taken = {n: t.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for n, t in tensors.items()}
    return {**taken, "header": msgspec.json.encode(own._header())}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved state of two steps and all that was in it, for tests that damage copies."""
    own, folder = trainer(), tmp_path_factory.mktemp("state") / "trainer"
    learn(own, range(1, 3))
    own.save(folder)
    return folder, state(own)


@pytest.mark.parametrize("release", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, SPEC], ids=["full", "lora"])
@pytest.mark.parametrize("algorithm", [KL, PLAIN], ids=["kl", "plain"])
def test_training_goes_on_bit_for_bit(algorithm, lora, dtype, release, tmp_path):
    made = {"algorithm": algorithm, "lora": lora, "dtype": dtype, "release": release}
    own, again = trainer(**made), trainer(**made)
    learn(own, range(1, 3))
    files = own.save(tmp_path / "trainer")
    assert sorted(files) == sorted((tmp_path / "trainer").iterdir())
    wanted, cut = learn(own, range(3, 6)), state(own)
    learn(again, range(1, 2))  # whatever it did before is gone
    accumulate(again, 7)
    again.load(tmp_path / "trainer")
    assert learn(again, range(3, 6)) == wanted
    assert state(again) == cut
    probe = small.random_samples(307, [(9, (12, 5))], seed=9)
    for a, b in zip(own.logprobs(probe), again.logprobs(probe), strict=True):
        np.testing.assert_array_equal(a, b)


def test_all_that_is_trained_is_saved_once():
    for lora in (None, SPEC):
        own = trainer(lora=lora)
        masters = sum(m.numel() for m in own.parameters.masters.values())
        assert sum(t.numel() for _, t in own._state()) == 3 * masters


def test_files_are_cut_by_size_and_come_together_again(tmp_path, monkeypatch):
    monkeypatch.setattr(state_module, "SHARD_BYTES", 100_000)
    own, again = trainer(), trainer()
    learn(own, range(1, 3))
    files = own.save(tmp_path)
    assert len(files) > 10
    assert max(f.stat().st_size for f in files) < 2 * 100_000
    again.load(tmp_path)
    assert state(again) == state(own)


def test_a_snapshot_is_of_its_moment_however_late_it_is_written(tmp_path):
    """Forward and backward passes run on beside it; the optimizer waits for the last byte."""
    own, again = trainer(), trainer()
    learn(own, range(1, 3))
    cut = state(own)
    held = own.snapshot()
    accumulated, stats = threading.Event(), []

    def go_on() -> None:
        accumulate(own, 3)
        accumulated.set()
        stats.append(own.step(3))

    going = threading.Thread(target=go_on)
    going.start()
    assert accumulated.wait(20)
    time.sleep(0.3)
    assert going.is_alive() and not stats
    held.write(tmp_path / "trainer")
    going.join(20)
    assert stats[0].waited_s > 0.1
    assert state(own) != cut
    again.load(tmp_path / "trainer")
    assert state(again) == cut
    learn(again, range(3, 4))
    assert state(again) == state(own)


def test_writers_and_steps_at_once_never_tear_a_state(tmp_path):
    own, again = trainer(algorithm=PLAIN), trainer(algorithm=PLAIN)
    cuts: dict[int, dict[str, bytes]] = {}
    folders = iter(range(100))

    def write() -> None:
        for _ in range(4):
            own.save(tmp_path / str(next(folders)))
            time.sleep(random.random() / 100)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for thread in writers:
        thread.start()
    for step in range(1, 9):
        accumulate(own, step)
        own.step(step)
        cuts[step] = state(own)
    for thread in writers:
        thread.join(30)
    assert len(list(tmp_path.iterdir())) == 12
    for folder in tmp_path.iterdir():
        again.load(folder)
        updates = again.optimizer.updates
        assert updates == 0 or state(again) == cuts[updates]


def test_a_wait_ends_and_says_for_whom():
    own = trainer(algorithm=PLAIN)
    own._hold = Hold(wait_s=0.1)
    with own.snapshot():
        accumulate(own, 1)
        with pytest.raises(WaitExpired, match=r"step 1 waited 0.1 s for a snapshot"):
            own.step(1)
        with pytest.raises(WaitExpired, match="a snapshot waited"):
            own.snapshot()
    assert own.step(1).grad_norm > 0  # the gradients are still there


def test_a_snapshot_is_written_once(tmp_path):
    own = trainer()
    held = own.snapshot()
    held.write(tmp_path / "a")
    with pytest.raises(UsageError, match="written or closed"):
        held.write(tmp_path / "b")
    held.close()
    with own.snapshot() as held:
        pass
    held.close()
    with pytest.raises(UsageError, match="already holds"):
        own.save(tmp_path / "a")
    own.step(1)


def test_closing_under_a_writer_does_not_let_the_state_go(tmp_path):
    """As when the task that waits for the writing thread is cancelled."""
    hold, begun, go_on = Hold(wait_s=0.1), threading.Event(), threading.Event()

    def slow():
        begun.set()
        assert go_on.wait(20)
        yield "masters/w", torch.zeros(3)

    hold.take("a snapshot")
    with StateSnapshot(trainer()._header(), slow, hold) as held:
        writer = threading.Thread(target=held.write, args=(tmp_path,))
        writer.start()
        assert begun.wait(20)
    with pytest.raises(WaitExpired):
        hold.take("a step")
    go_on.set()
    writer.join(20)
    with hold.taken("a step"):
        pass


def test_a_failed_write_is_a_fault_and_training_goes_on(tmp_path):
    own = trainer(algorithm=PLAIN)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointFault, match="cannot be written"):
        own.save(tmp_path / "file")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))  # as a full disk: a write in the middle fails
    try:
        with pytest.raises(CheckpointFault, match="cannot be written") as caught:
            own.save(tmp_path / "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.exit_code == 3 and caught.value.fix
    learn(own, range(1, 2))
    own.save(tmp_path / "next")


def test_skips_in_a_row_are_remembered(tmp_path):
    own, again = trainer(algorithm=PLAIN), trainer(algorithm=PLAIN)
    for step in range(1, MAX_SKIPS):
        own.parameters.grads["model.norm.weight"] = torch.full((64,), torch.nan)
        assert own.step(step).skipped
    own.save(tmp_path)
    again.load(tmp_path)
    assert (again.optimizer.skipped, again.optimizer.updates) == (MAX_SKIPS - 1, 0)
    again.parameters.grads["model.norm.weight"] = torch.full((64,), torch.nan)
    with pytest.raises(CheckFailed, match="not finite"):
        again.step(MAX_SKIPS)


MISMATCHES = {
    "algorithm": ({"algorithm": build(Algo(name="rloo", kl=0.1), Sampling())}, {}, "algo.name=grpo"),
    "no reference": ({"algorithm": PLAIN}, {}, "algo.kl"),
    "reference": ({"seed": 4}, {}, "model files"),
    "adapter": ({"lora": SPEC}, {}, "lora"),
    "no adapter": ({}, {"lora": SPEC}, "lora"),
    "rank": ({"lora": LoraSpec(rank=4, scale=2.0, targets=SPEC.targets)}, {"lora": SPEC}, "lora"),
    "scale": ({"lora": LoraSpec(rank=3, scale=1.0, targets=SPEC.targets)}, {"lora": SPEC}, "lora"),
    "targets": ({"lora": LoraSpec(rank=3, scale=2.0, targets=("q_proj",))}, {"lora": SPEC}, "lora"),
    "base": ({"lora": SPEC, "seed": 4, "algorithm": PLAIN}, {"lora": SPEC, "algorithm": PLAIN}, "model files"),
    "shapes": (
        {"arch": small.architecture(hidden=32), "algorithm": PLAIN}, {"algorithm": PLAIN}, "with the model"
    ),
    "layers": (
        {"arch": small.architecture(layers=3), "algorithm": PLAIN}, {"algorithm": PLAIN}, "with the model"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISMATCHES)
def test_another_training_is_refused(name, tmp_path):
    here, there, fix = MISMATCHES[name]
    trainer(**there).save(tmp_path)
    own = trainer(**here)
    before = state(own)
    with pytest.raises(CheckpointMismatch) as caught:
        own.load(tmp_path)
    assert caught.value.exit_code == 2
    assert fix in (caught.value.fix or "") and str(tmp_path) in (caught.value.where or "")
    assert state(own) == before


def test_the_format_and_the_optimizer_are_held_to(saved, tmp_path):
    folder, _ = saved
    for field, value in (("format", "croze-trainer-0"), ("optimizer", "sgd")):
        copy = tmp_path / field
        shutil.copytree(folder, copy)
        header = json.loads((copy / "trainer.json").read_text())
        (copy / "trainer.json").write_text(json.dumps({**header, field: value}))
        with pytest.raises(CheckpointMismatch, match=value):
            trainer().load(copy)


@pytest.mark.parametrize("name", ["trainer.json", "state-00001-of-00001.safetensors"])
def test_a_missing_file_is_named(name, saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "copy")
    (tmp_path / "copy" / name).unlink()
    with pytest.raises(CheckpointFault, match=name) as caught:
        trainer().load(tmp_path / "copy")
    assert caught.value.where.endswith(name) and caught.value.fix
    with pytest.raises(CheckpointFault):
        trainer().load(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def victim():
    own = trainer()
    return own, state(own)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_damage_is_a_fault_and_changes_nothing(saved, victim, tmp_path_factory, data):
    """Cut anywhere, or bytes of a header replaced: never another exception, never half a state."""
    folder, _ = saved
    own, before = victim
    copy = tmp_path_factory.mktemp("damaged")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    path = copy / data.draw(st.sampled_from(["trainer.json", "state-00001-of-00001.safetensors"]))
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        at = data.draw(st.integers(0, min(len(content), 4000) - 1))
        content[at : at + 4] = data.draw(st.binary(min_size=1, max_size=8))
    path.write_bytes(content)
    try:
        own.load(copy)
    except (CheckpointFault, CheckpointMismatch):
        assert state(own) == before
    except CrozeError as error:
        raise AssertionError(f"a {error.kind} error") from error
    else:
        own.load(folder)  # the bytes were what they had been, or a count: checksums are the manifest's
        before.clear()
        before.update(state(own))
    finally:
        shutil.rmtree(copy)

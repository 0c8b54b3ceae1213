"""A recorded step made again is the step that was, bit for bit; whatever was changed since is found and named."""

import functools
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from safetensors.torch import load_file, save_file

from croze.cli.main import main
from croze.errors import CheckFailed, CheckpointMismatch, Interrupted, ModelNotFound, UsageError
from croze.loop import replay as module
from croze.loop.folder import numerics_at
from croze.loop.load import load_run
from croze.loop.replay import Replayed, replay
from croze.loop.start import resume, train
from croze.models.source import resolve
from croze.trace.tables import read_table, table_files

TASK = """
import os
import croze as cz
from croze.reward.expression import evaluate

TASKS = [{{"prompt": f"add {{a}} and {{b}}, times 3=", "answer": str((a + b) * 3), "n": n}}
         for n, (a, b) in enumerate([(12, 3), (24, 15), (6, 7), (18, 9), (23, 8), (15, 9), (27, 14), (9, 2)])]

def judged(reply, answer, rollout, n):
    if {faults} and n in (1, 5) and rollout.member == 0 and rollout.attempt == 0:
        raise RuntimeError("once")
    if {faults} and n == 2 and rollout.member < 2:
        return cz.Outcome(valid=False, message="not applicable")
    if {faults} and n == 3:
        return 0.5
    return (1.0 if str(evaluate(reply)) == answer else 0.1 * (evaluate(reply) is not None)) + rollout.member / 8

run = cz.Run(model="tiny-calc", tasks=TASKS, reward=judged, steps=3, groups_per_step=3, group_size=3,
             sampling=cz.Sampling(max_tokens=10), optim=cz.Optim(lr=3e-4), engine=cz.EngineOptions(threads=1),
             loop=cz.LoopOptions(retries=1, checkpoint_every=0))
"""
WAYS: dict[str, dict[str, str]] = {
    "lora, kl, entropy": {"lora.rank": "4", "algo.kl": "0.01", "algo.entropy": "0.001"},
    "two updates, gspo, checkpoints": {
        "optim.minibatches": "2",
        "algo.name": "gspo",
        "algo.normalizer": "sequence",
        "loop.checkpoint_every": "1",
        "loop.keep": "0",
    },
    "recomputed anchor, masked, small micro-batches": {
        "optim.minibatches": "3",
        "algo.anchor": "recomputed",
        "algo.importance": "mask",
        "sampling.temperature": "0.8",
        "optim.tokens_per_microbatch": "40",
        "sync.dtype": "float32",
    },
}


def run_in(
    folder: Path,
    words: dict[str, str] | None = None,
    *,
    faults: bool = False,
    on_event: Callable[[dict], None] | None = None,
) -> Path:
    """Train the task above in ``folder``; the run folder."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "task.py"
    file.write_text(TASK.format(faults=faults))
    train(load_run(file).override({"run.dir": str(folder / "run"), **(words or {})}), on_event=on_event)
    return folder / "run"


def is_exact(found: Replayed) -> None:
    assert found.verdict == "exact", (
        found.causes,
        found.differences,
        [f for f in found.figures if not f.equal],
    )
    assert (
        found.weights.equal and not found.causes and {f.name for f in found.figures} >= {"loss", "weights_id"}
    )


def shares_add_up(found: Replayed) -> None:
    for batch in {s.batch for s in found.samples}:
        shares = [s.share for s in found.samples if s.batch == batch and s.share is not None]
        assert not shares or math.fsum(shares) == pytest.approx(1.0, abs=1e-5)


def contents(folder: Path) -> dict[str, tuple[int, int]]:
    files = [p for p in sorted(folder.rglob("*")) if p.is_file()]
    return {str(p.relative_to(folder)): (p.stat().st_mtime_ns, p.stat().st_size) for p in files}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a checkpoint of every step; tests change copies of it."""
    return run_in(tmp_path_factory.mktemp("plain"), {"loop.checkpoint_every": "1", "loop.keep": "0"})


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with rollouts that failed, were tried again, or had no say; no checkpoint but the last."""
    return run_in(tmp_path_factory.mktemp("faulty"), faults=True)


def every_step(folder: Path) -> list[Replayed]:
    """Every step replayed; each is exact."""
    rows = read_table(folder / "trace" / "rollouts", "rollouts").to_pylist()
    steps = [replay(folder, step) for step in (1, 2, 3)]
    for found in steps:
        is_exact(found)
        shares_add_up(found)
        trained = {r["rollout_id"] for r in rows if r["step"] == found.step and r["advantage"] is not None}
        assert found.rest.samples == 0 and {s.rollout_id for s in found.samples} == trained
    return steps


@pytest.mark.parametrize("way", WAYS)
def test_every_step_of_a_run_is_made_again_bit_for_bit(way: str, tmp_path: Path) -> None:
    every_step(run_in(tmp_path, WAYS[way], faults="updates" in way))


def test_failed_filtered_and_equal_rollouts_are_what_they_were(faulty: Path) -> None:
    groups = [found.groups for found in every_step(faulty)]
    assert sum(len(g.dropped) for g in groups) >= 1 and sum(len(g.zero_variance) for g in groups) >= 1
    rows = read_table(faulty / "trace" / "rollouts", "rollouts").to_pylist()
    retried = next(r for r in rows if r["attempt"] == 0 and r["fault"] in ("infra", "unknown"))
    found = replay(faulty, retried["step"], samples=0, sample=retried["rollout_id"])
    assert found.sample is not None and found.sample.state == "failed" and "once" in found.sample.reason
    sampled = [t for t in found.sample.tokens if t.producer == "model"]
    assert all(t.gap == 0.0 and t.loss is None and not t.trained for t in sampled) and sampled


def test_a_run_that_lives_was_interrupted_and_was_resumed(tmp_path: Path) -> None:
    folder, seen = tmp_path / "run", []
    code = (
        "import sys, msgspec; from croze.loop.replay import replay;"
        "sys.stdout.buffer.write(msgspec.json.encode(replay(sys.argv[1], 2)))"
    )

    def look(event: dict) -> None:
        if event["event"] == "step" and event["step"] == 2:
            before = contents(folder)
            words = [sys.executable, "-c", code, str(folder)]
            done = subprocess.run(words, capture_output=True, timeout=120, check=True)
            seen.append(msgspec.json.decode(done.stdout, type=Replayed))
            assert contents(folder) == before, "a replay writes nothing"
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, Interrupted)):
        run_in(tmp_path, {"loop.checkpoint_every": "1"}, on_event=look)
    is_exact(seen[0])
    is_exact(replay(folder, 2))
    with pytest.raises(UsageError, match="not committed") as refused:
        replay(folder, 3)
    assert refused.value.fix == "steps 1 to 2 are on record"
    resume(folder)
    for step in (2, 3):
        is_exact(replay(folder, step, samples=0))


def test_samples_are_chosen_and_the_rest_is_told(plain: Path) -> None:
    everything = replay(plain, 3)
    norms = [s.grad_norm for s in everything.samples]
    assert all(n is not None for n in norms) and len(norms) == 9
    assert [abs(s.share or 0) for s in everything.samples] == sorted(
        (abs(s.share or 0) for s in everything.samples), reverse=True
    )
    last = everything.samples[-1].rollout_id
    found = replay(plain, 3, samples=2, sample=last)
    measured = {s.rollout_id: s.share for s in found.samples if s.share is not None}
    assert len(measured) == 2 and last in measured and found.rest.samples == 7
    assert found.rest.share == pytest.approx(1 - sum(measured.values()))
    by_name = {s.rollout_id: s for s in everything.samples}
    assert all(by_name[name].share == pytest.approx(share, abs=1e-5) for name, share in measured.items())
    assert replay(plain, 3, samples=0).rest.share is None


def test_a_sample_token_by_token(plain: Path) -> None:
    name = replay(plain, 2, samples=0).samples[0].rollout_id
    found = replay(plain, 2, samples=1, sample=name)
    told, (share, *_) = found.sample, found.samples
    assert told is not None and share.rollout_id == name and told.state == "trained"
    row = next(
        r for r in read_table(plain / "trace" / "tokens", "tokens").to_pylist() if r["rollout_id"] == name
    )
    assert [t.token_id for t in told.tokens] == row["token_id"] and [t.text for t in told.tokens] == row[
        "text"
    ]
    trained = [t for t in told.tokens if t.trained]
    assert len(trained) == share.tokens and told.prompt_tokens == len(told.tokens) - len(trained)
    assert sum(t.loss or 0 for t in trained) == pytest.approx(share.loss)
    for t in trained:
        assert t.trainer_logprob == t.sampler_logprob and (t.gap, t.ratio, t.clipped) == (0.0, 1.0, False)
        # on-policy, ratio 1: loss and slope are both minus weight x advantage
        assert t.weight is not None and t.advantage is not None
        assert t.loss == pytest.approx(-t.weight * t.advantage) == t.gradient
    assert all(
        t.producer == "prompt" and t.sampler_logprob is None for t in told.tokens[: told.prompt_tokens]
    )


def change(folder: Path, table: str, edit: Callable[[list[dict[str, Any]]], object]) -> None:
    """Edit a table's rows in place, as if by hand."""
    for file in table_files(folder / "trace" / table):
        with pa.ipc.open_stream(file) as stream:
            whole = stream.read_all()
        rows = whole.to_pylist()
        edit(rows)
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, whole.schema) as writer:
            writer.write_table(pa.Table.from_pylist(rows, schema=whole.schema))


@functools.cache
def of_step(plain: Path, step: int) -> list[str]:
    return [s.rollout_id for s in replay(plain, step, samples=0).samples]


def set_last(column: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda row: row[column].__setitem__(-1, value)


CHANGES: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "a log-prob": ("tokens", set_last("logprob", -0.25), "logprob"),
    "a token": ("tokens", lambda row: row["token_id"].__setitem__(-3, 5), "logprob"),
    "a mask": ("tokens", set_last("mask", False), "generated_tokens"),
    "a score": ("rollouts", lambda row: row.update(score=7.0), "score"),
    "an advantage": ("rollouts", lambda row: row.update(advantage=7.0), "advantage"),
    "a validity": ("rollouts", lambda row: row.update(score=None, valid=False), "score"),
}


@pytest.mark.parametrize("changed", CHANGES)
def test_a_record_changed_by_hand_is_found_and_named(changed: str, plain: Path, tmp_path: Path) -> None:
    table, edit, what = CHANGES[changed]
    folder = tmp_path / "run"
    shutil.copytree(plain, folder)
    name = of_step(plain, 2)[0]
    change(folder, table, lambda rows: [edit(row) for row in rows if row["rollout_id"] == name])
    found = replay(folder, 2, samples=0)
    assert found.verdict == "differs"
    assert (what, name) in {(d.what, d.where) for d in found.differences}
    assert name in " ".join(found.causes) or (changed == "an advantage" and "was changed" in found.causes[0])
    assert {d.where for d in found.differences if d.what in ("logprob", what) and d.what != "advantage"} <= {
        name
    }
    if changed == "a log-prob":
        is_exact(replay(folder, 3, samples=0))  # from the checkpoint behind it


def test_a_change_in_an_earlier_step_is_named_where_it_is(plain: Path, tmp_path: Path) -> None:
    folder, name = tmp_path / "run", of_step(plain, 1)[0]
    shutil.copytree(plain, folder)
    shutil.rmtree(folder / "checkpoints")
    is_exact(replay(folder, 3, samples=0))
    edit = CHANGES["a log-prob"][1]
    change(folder, "tokens", lambda rows: [edit(row) for row in rows if row["rollout_id"] == name])
    found = replay(folder, 3, samples=0)
    assert found.verdict == "differs" and "step 1" in found.causes[0] and not found.weights.equal
    change(folder, "tokens", lambda rows: [rows.remove(r) for r in list(rows) if r["rollout_id"] == name])
    with pytest.raises(CheckFailed, match=f"step 1 is not whole on record.*{name}"):
        replay(folder, 3)


def test_a_broken_checkpoint_is_passed_over(plain: Path, tmp_path: Path) -> None:
    shutil.copytree(plain, tmp_path / "run")
    state = next((tmp_path / "run" / "checkpoints" / "step_000002" / "trainer").glob("*.safetensors"))
    state.write_bytes(state.read_bytes()[:-8] + b"rotten!!")
    found = replay(tmp_path / "run", 3, samples=0)
    is_exact(found)
    assert found.weights.from_step == 1 and "changed" in found.weights.passed_over["step_000002"]


def test_changed_options_and_logs_are_told(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(plain, folder)
    config = json.loads((folder / "config.json").read_text())

    def with_config(**keys: Any) -> Replayed:
        changed = {**config, "keys": {**config["keys"], **keys}}
        (folder / "config.json").write_text(json.dumps(changed))
        return replay(folder, 2, samples=0)

    faster = with_config(**{"optim.lr": 1e-3})
    assert faster.verdict == "differs" and "optim.lr" in faster.causes[0]
    assert {f.name for f in faster.figures if not f.equal} == {"lr", "weights_id"}
    other = with_config(**{"algo.advantage_std": False})
    assert other.verdict == "differs" and "algo" in other.causes[0]
    assert {d.what for d in other.differences} == {"advantage"}
    with pytest.raises(CheckpointMismatch, match="has the algorithm grpo"):
        with_config(**{"algo.name": "rloo"})
    is_exact(with_config())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for event in lines:
        event["loss"] += 0.5
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    logged = replay(folder, 2, samples=0)
    assert logged.verdict == "differs" and "logged" in logged.causes[0]
    assert [f.name for f in logged.figures if not f.equal] == ["loss"]


def test_other_arithmetic_is_named_and_near_is_enough(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(plain, folder)
    config = json.loads((folder / "config.json").read_text())
    config["numerics"][-1]["torch"] = "2.0.1"
    (folder / "config.json").write_text(json.dumps(config))
    same = replay(folder, 2, samples=0)
    assert same.verdict == "exact" and [n.name for n in same.numerics] == ["torch"]
    config["numerics"][-1]["dtype"] = (
        "bfloat16" if config["numerics"][-1]["dtype"] == "float32" else "float32"
    )
    (folder / "config.json").write_text(json.dumps(config))
    found = replay(folder, 2, samples=0)
    assert found.verdict == "close" and {n.name for n in found.numerics} >= {"torch", "recipe"}
    assert "torch 2.0.1" in " ".join(found.causes)
    assert "weights_id" in {f.name for f in found.figures if not f.equal}


def test_arithmetic_that_is_not_exact_is_named(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(plain, folder)
    config = json.loads((folder / "config.json").read_text())
    config["keys"]["engine.self_check"] = False
    (folder / "config.json").write_text(json.dumps(config))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for event in lines:
        event["grad_norm"] *= 1.001
    (folder / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in lines))
    found = replay(folder, 2, samples=0)
    assert found.verdict == "close"
    assert any(c.startswith("a replay needs exact") and "engine.self_check=true" in c for c in found.causes)


def test_each_step_has_the_arithmetic_it_was_computed_with() -> None:
    config = {"numerics": [{"from_step": 1, "threads": 2}, {"from_step": 5, "threads": 1}]}
    assert [numerics_at(config, step).get("threads") for step in (1, 4, 5, 9)] == [2, 2, 1, 1]
    assert numerics_at({}, 3) == {} == numerics_at(config, 0)


def test_neither_task_file_nor_model_need_be_where_they_were(tmp_path: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(resolve("tiny-calc").path, models)
    folder = run_in(tmp_path / "made", {"model": str(models), "steps": "1"})
    moved = tmp_path / "moved"
    folder.rename(moved)
    shutil.rmtree(tmp_path / "made")
    is_exact(replay(moved, 1, samples=0))
    models.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelNotFound) as refused:
        replay(moved, 1)
    assert "--model" in str(refused.value.fix)
    is_exact(replay(moved, 1, samples=0, model=str(tmp_path / "elsewhere")))
    file = next((tmp_path / "elsewhere").glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.norm.weight"] += 0.25
    save_file(tensors, file)
    found = replay(moved, 1, samples=0, model=str(tmp_path / "elsewhere"))
    assert found.verdict == "differs" and found.causes == [
        "the model files are not those that the run began from"
    ]


def test_a_run_that_kept_no_tokens_or_has_no_steps(tmp_path: Path, plain: Path) -> None:
    shutil.copytree(plain, tmp_path / "run")
    config = json.loads((plain / "config.json").read_text())
    config["keys"]["trace.tokens"] = False
    (tmp_path / "run" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError) as refused:
        replay(tmp_path / "run", 1)
    assert "trace.tokens=true" in str(refused.value.fix)
    (tmp_path / "young").mkdir()
    shutil.copy(plain / "config.json", tmp_path / "young")
    with pytest.raises(UsageError, match="step 1 is not committed yet"):
        replay(tmp_path / "young", 1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "0"], "there is no step 0 in a run of 3 steps"),
        (["--step", "-1"], "there is no step -1"),
        (["--step", "4"], "steps 1 to 3 are on record"),
        (["--step", "2", "--sample", "g4.0.9"], "did you mean 'g4.0.0'?"),
        (["--step", "2", "--samples", "-1"], "cannot be negative"),
        (["--step", "two"], "invalid int value"),
        ([], "--step"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_told(
    words: list[str], said: str, plain: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(plain), *words]) == 2
    assert said in capfd.readouterr().err


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError, match="no run"):
            replay(path, 1)


def test_the_verb(plain: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def croze(*words: str) -> tuple[int, str]:
        code = main(["replay", *words])
        said = capfd.readouterr()
        assert "Traceback" not in said.err
        return code, said.out

    code, said = croze(str(plain), "--step", "3", "--json")
    (line,) = said.splitlines()
    document = json.loads(line)
    assert (
        code == 0
        and document["event"] == "replay"
        and document["verdict"] == "exact"
        and document["step"] == 3
    )
    best = document["samples"][0]
    code, said = croze(str(plain), "--step", "3")
    assert code == 0 and "exact, bit for bit" in said and best["rollout_id"] in said
    code, said = croze(str(plain), "--step", "3", "--sample", best["rollout_id"])
    assert code == 0 and len([x for x in said.splitlines() if "  model  " in x]) == best["tokens"]

    folder, name = tmp_path / "run", best["rollout_id"]
    shutil.copytree(plain, folder)
    edit = CHANGES["a log-prob"][1]
    change(folder, "tokens", lambda rows: [edit(row) for row in rows if row["rollout_id"] == name])
    code, said = croze(str(folder), "--step", "3")
    assert code == 1 and "NOT what the run had" in said and name in said
    code, said = croze(str(folder), "--step", "3", "--json")
    assert code == 1 and json.loads(said)["verdict"] == "differs"


def test_the_page_tells_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "replay.md").read_text()
    structs = [s for s in vars(module).values() if isinstance(s, type) and issubclass(s, msgspec.Struct)]
    assert len(structs) >= 10
    for struct in structs:
        for name in struct.__struct_fields__:
            assert re.search(rf"`[^`]*\b{name}\b[^`]*`", page), f"{struct.__name__}.{name}"

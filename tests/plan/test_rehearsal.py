"""The rehearsal: a tiny model of the run's family, and two steps of the real loop with it."""

import dataclasses
import json
import time
from pathlib import Path

import pytest
from plan_help import write_model

from croze.config import Optim, Sampling
from croze.models.architecture import read_architecture
from croze.models.layout import Layout, read_tensors
from croze.models.protocol import ModelFiles
from croze.models.source import resolve, verify
from croze.models.tokenizer import load_tokenizer
from croze.plan import rehearsal
from croze.plan.checks import Check, Context, Report, make
from croze.run import Run
from croze.trace.metrics import JsonLines

TASK = """
import croze as cz

def problems(seed):
    while True:
        yield {"prompt": "1+1=", "answer": "2"}

def reward(reply, answer):
    BODY

run = cz.Run(model="tiny-calc", tasks=cz.tasks(problems), reward=reward, groups_per_step=3,
             sampling=cz.Sampling(max_tokens=4, stop=("a", "b")))
"""


def rehearse(file: Path, **fields):
    from croze.loop.load import load_run

    run = dataclasses.replace(load_run(file), **fields)
    files = resolve(run.model)
    context = Context(run=run, files=files, arch=read_architecture(files.path))
    return make((Check(name="rehearsal", look=rehearsal.look_at_rehearsal),), context)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 128}},
        {"model_type": "mistral", "sliding_window": 16},
        {"model_type": "qwen2", "num_hidden_layers": 5, "layer_types": ["full_attention"] * 4 + ["sliding_attention"],
         "use_sliding_window": True, "sliding_window": 8},
        {"model_type": "qwen3", "tie_word_embeddings": False, "head_dim": 128},
    ],
)  # fmt: skip
def test_a_tiny_model_is_of_the_same_family_and_vocabulary(tmp_path, config):
    source = write_model(tmp_path / "real", **config)
    path = rehearsal.make_tiny(ModelFiles(name="real", path=source, source="test"), tmp_path / "tiny")
    verify(path)
    arch = read_architecture(path)
    assert (arch.family, arch.vocab, arch.layers, arch.context) == (config["model_type"], 128, 2, 256)
    assert arch.parameters < rehearsal.TINY
    assert len(list(Layout(arch).checked(read_tensors(path)))) == len(Layout(arch).slots)
    tokenizer = load_tokenizer(ModelFiles(name="tiny", path=path, source="test"))
    assert tokenizer.decode(tokenizer.encode("1+1=")) == "1+1="


def test_words_are_the_runs_own_and_smaller():
    run = Run(
        model="m", tasks=[], reward=print, group_size=2, optim=Optim(minibatches=8), sampling=Sampling(max_tokens=900)
    ).override({"algo.name": "rloo", "sampling.stop": "x,y", "trace.tokens": "false", "model": "n"})  # fmt: skip
    words = dict(word.split("=", 1) for word in rehearsal.words(run, Path("tiny"), Path("there")))
    assert (
        words["algo.name"] == "rloo" and words["sampling.stop"] == "x,y" and words["trace.tokens"] == "false"
    )
    assert words["model"] == "tiny" and words["run.dir"] == "there"
    assert (words["group_size"], words["sampling.max_tokens"], words["optim.minibatches"]) == ("2", "32", "2")


def test_two_real_steps(tmp_path):
    file = tmp_path / "task.py"
    file.write_text(TASK.replace("BODY", "return float(len(reply))"))
    began = time.monotonic()
    (found,) = rehearse(file)
    assert (found.status, found.kind) == ("ok", "rehearsal"), found
    assert found.message.startswith("2 steps") and time.monotonic() - began < rehearsal.DEADLINE_S
    assert [p.name for p in tmp_path.iterdir() if p.suffix == "" and p.name != "__pycache__"] == []


def test_what_ends_the_loop_is_told_with_its_kind(tmp_path):
    file = tmp_path / "task.py"
    file.write_text(TASK.replace("while True:", "while not {}[seed]:"))
    (found,) = rehearse(file)
    assert (found.status, found.kind, found.where) == ("fail", "tasks", f"{file}:5")
    assert "KeyError: " in found.message and "Traceback" not in found.message


def test_a_rehearsal_that_does_not_end_is_ended(tmp_path, monkeypatch):
    file = tmp_path / "task.py"
    file.write_text(TASK.replace("BODY", "import time; time.sleep(600)"))
    monkeypatch.setattr(rehearsal, "DEADLINE_S", 1.0)
    (found,) = rehearse(file)
    assert (found.status, found.kind) == ("fail", "wait") and "within 1 s" in found.message


def test_faults_of_some_attempts_are_a_warning(tmp_path):
    with JsonLines(tmp_path / "faults.jsonl") as faults:
        faults.write({"event": "warning", "message": "not this one"})
        for rollout in ("g1.0.0", "g1.1.0"):
            faults.write({"step": 1, "rollout_id": rollout, "fault": "infra", "message": "OSError: no"})
    report = Report("rehearsal")
    report.ok("two steps")
    rehearsal._report_faults(tmp_path, report)
    assert [f.kind for f in report.findings] == ["rehearsal", "rehearsal.faults"]
    assert "2 attempts met a fault, 2 of them: OSError: no" in report.findings[1].message


def test_a_run_made_in_python_is_not_rehearsed(tmp_path):
    run = Run(model="tiny-calc", tasks=[], reward=print)
    files = resolve(run.model)
    context = Context(run=run, files=files, arch=read_architecture(files.path))
    (found,) = make((Check(name="rehearsal", look=rehearsal.look_at_rehearsal),), context)
    assert (found.status, found.kind) == ("fail", "declaration")


def test_the_tiny_config_is_json(tmp_path):
    source = write_model(tmp_path / "real")
    path = rehearsal.make_tiny(ModelFiles(name="real", path=source, source="test"), tmp_path / "tiny")
    assert json.loads((path / "config.json").read_text())["hidden_size"] == rehearsal.SIZES["hidden_size"]

"""Wrong words after a verb: each ends at once with its kind, what, where and what to do, and leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bad_inputs import Answer, Wrong, croze, hold, task_file, train

CROZE = [sys.executable, "-m", "croze.cli.main"]
GOOD = task_file()

KEYS = {
    "stpes=3": ("unknown key 'stpes'", "did you mean 'steps'"),
    "lr=3": ("unknown key 'lr'", "did you mean 'optim.lr'"),
    "sampling.lr=3": ("unknown key 'sampling.lr'", "did you mean 'optim.lr'"),
    "optim.learning_rate=3": ("unknown key", "croze keys optim"),
    "optim=3": ("unknown key 'optim'", "croze keys optim"),
    "reward=mine": ("unknown key 'reward'", "cz.Run(reward=...)"),
    ".=3": ("unknown key '.'", "croze keys"),
    "steps": ("'steps' is not an override", "write key=value"),
    "=3": ("'=3' is not an override", "write key=value"),
    "steps=1 steps=2": ("'steps' is given twice", "keep one"),
}
"""What is told of the words themselves."""
VALUES = {
    "steps=many": ("wants a whole number, got 'many'", "croze keys steps"),
    "steps=1e3": ("wants a whole number", "croze keys steps"),
    "steps=": ("wants a whole number", "croze keys steps"),
    "steps=-1": ("between 0 and 1000000000", "croze keys steps"),
    "steps=99999999999999999999999": ("between 0 and 1000000000", "croze keys steps"),
    "group_size=0": ("between 1 and 65536", "croze keys group_size"),
    "group_size=100000000000": ("between 1 and 65536", "croze keys group_size"),
    "groups_per_step=0": ("between 1 and 1000000", "croze keys groups_per_step"),
    "groups_per_step=1000000": ("1000000 groups of 2 rollouts is more than", "lower groups_per_step"),
    "seed=-1": ("between 0 and 9223372036854775807", "croze keys seed"),
    "seed=9223372036854775808": ("between 0 and 9223372036854775807", "croze keys seed"),
    "optim.lr=nan": ("at least 0, got nan", "croze keys optim.lr"),
    "optim.lr=inf": ("must be finite", "croze keys optim.lr"),
    "optim.lr=-1": ("at least 0, got -1.0", "croze keys optim.lr"),
    "optim.lr=fast": ("wants a number, got 'fast'", "croze keys optim.lr"),
    "optim.eps=1e999": ("must be finite", "croze keys optim.eps"),
    "optim.betas=0.9": ("wants 2 values", "commas"),
    "optim.minibatches=5": ("cannot be cut from groups_per_step=2", "never split"),
    "reward.timeout_s=inf": ("must be finite", "croze keys reward.timeout_s"),
    "reward.timeout_s=0": ("at least 0.001", "croze keys reward.timeout_s"),
    "reward.memory_mib=-1": ("at least 0", "croze keys reward.memory_mib"),
    "loop.retries=1000": ("between 0 and 255", "croze keys loop.retries"),
    "sampling.temperature=nan": ("at least 0", "croze keys sampling.temperature"),
    "sampling.temperature=0": ("above 0", "set sampling.temperature=1"),
    "sampling.max_tokens=0": ("between 1 and", "croze keys sampling.max_tokens"),
    "sandbox.disk_mib=9999": ("must be below sandbox.memory_mib", "set sandbox.memory_mib above"),
    "algo.name=gpro": ("wants one of cispo, grpo", "did you mean 'grpo'"),
    "algo.normalizer=token": ("wants one of", "did you mean 'tokens'"),
    "engine.name=vlm": ("wants one of torch", "croze.inference"),
    "trace.tokens=maybe": ("wants true or false", "croze keys trace.tokens"),
    "group_size=1": ("compares 2 siblings or more", "set group_size to 4"),
    "name=a/b": ("cannot name a folder", "letters"),
    "lora.targets=q": ("does not know q", "choose from q_proj"),
}
OTHERS = {
    "--steps=3": Wrong("usage", "--steps", "croze train", "--help"),
    "run.dir=task.py": Wrong("usage", "cannot be made", "run.dir", "can be written"),
    "run.dir=task.py/x": Wrong("usage", "cannot be made", "run.dir", "can be written"),
    "run.dir=/proc/none/x": Wrong("usage", "cannot be made", "run.dir", "can be written"),
    "run.dir=a\0b": Wrong("usage", "cannot be made", "run.dir", "can be written"),
    "run.dir=" + "a" * 300: Wrong("usage", "cannot be made", "run.dir", "can be written"),
    "loop.eval_tasks=9": Wrong("tasks", "only 8 different ones", "list", "lower loop.eval_tasks"),
    "loop.eval_tasks=8": Wrong("tasks", "no tasks are left", "list", "lower loop.eval_tasks"),
    "model=": Wrong("declaration", "must be text", "Run(model", "built-in names"),
}
WORDS = {
    **{word: Wrong("config", what, "command line", fix) for word, (what, fix) in KEYS.items()},
    **{word: Wrong("config", what, word.partition("=")[0], fix) for word, (what, fix) in VALUES.items()},
    **OTHERS,
}


@pytest.mark.parametrize("words", WORDS, ids=lambda words: words[:40].replace("\0", "0"))
def test_wrong_words(tmp_path: Path, words: str):
    answer = train(tmp_path, GOOD, *words.split())
    hold(answer, WORDS[words])
    assert answer.left == []


VERBS = {
    "train absent.py": Wrong("declaration", "no such task file", "absent.py", "did you mean 'absence.py'"),
    "train .": Wrong("declaration", "a folder", ".", ".py"),
    "train notes.txt": Wrong("declaration", "is Python", "notes.txt", "rename"),
    "eval .": Wrong("declaration", "no config.json", ".", "croze ps"),
    "eval absence.py --tasks none": Wrong("usage", "--tasks", "croze eval", "--help"),
    "eval absence.py --samples 0": Wrong("usage", "--samples", "croze eval", "--help"),
    "eval absence.py --tasks 99": Wrong("tasks", "only 8 different", "list", "--tasks"),
    "eval absence.py stpes=3": Wrong("config", "unknown key 'stpes'", "command line", "did you mean 'steps'"),
    "eval absence.py --tasks 2 model=nowhere": Wrong(
        "model.not_found", "no such model", "nowhere", "tiny-calc"
    ),
    "resume nowhere": Wrong("usage", "no such run", "nowhere", "run folder"),
    "resume absence.py": Wrong("usage", "this is a file", "absence.py", "runs/NAME-ID"),
    "resume broken": Wrong("declaration", "config.json cannot be read", "broken", "put it back"),
    "trace nowhere": Wrong("usage", "no such run", "nowhere", "run folder"),
    "keys optimm.lr": Wrong("usage", "no key contains", "croze keys", "optim.lr"),
    "trian absence.py": Wrong("usage", "unknown verb", "croze", "did you mean 'train'"),
}


@pytest.mark.parametrize("words", VERBS)
def test_other_verbs(tmp_path: Path, words: str):
    (tmp_path / "absence.py").write_text(GOOD)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    answer = croze(tmp_path, *words.split())
    hold(answer, VERBS[words])
    assert answer.left == []


def test_what_a_file_prints_is_no_part_of_the_answer(tmp_path: Path):
    answer = train(tmp_path, "print('x' * 1_000_000)\n" + task_file(tasks="[]"))
    hold(answer, Wrong("tasks", "no rows", "list", "at least one"))
    assert len(answer.events) == 1 and "xxxxx" in answer.stderr


def test_a_file_that_never_ends_says_where_it_was_when_interrupted(tmp_path: Path):
    (tmp_path / "task.py").write_text("print('on', flush=True)\nwhile True:\n    pass\n")
    words = [*CROZE, "train", "task.py", "--json"]
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None and process.stderr.readline() == "on\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    answer = Answer(code=process.returncode, events=[json.loads(out)], stderr=err, left=os.listdir(tmp_path))
    hold(answer, Wrong("interrupted", "was running", "task.py:", "imported", code=4))
    assert answer.left == ["task.py"]


def test_a_run_of_no_steps_saves_what_it_was_given(tmp_path: Path):
    answer = train(tmp_path, GOOD, "steps=0", "run.dir=run")
    assert answer.code == 0 and [e["event"] for e in answer.events] == ["start", "done"]

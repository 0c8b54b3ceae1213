"""Events as lines."""

import json
import os

from croze.cli.output import Output, aligned, excerpt, printable
from croze.cli.progress import progress, words

STEP = {
    "event": "step",
    "step": 3,
    "reward_mean": 0.412345,
    "tokens": 1536,
    "phase_s": {"generate": 1.23456, "train": 0.5},
    "valid": 1.0,
    "weights_id": "0123456789abcdef",
}


def test_a_step_is_one_line_of_words():
    assert " ".join(words(STEP)) == (
        "step=3 reward_mean=0.4123 tokens=1536 generate_s=1.235 train_s=0.5 valid=1 weights_id=0123456789ab"
    )
    assert words({"event": "eval", "pass_at_1": 0.5})[0] == "eval"


def test_lines_go_to_stdout_and_the_opening_to_stderr(capsys):
    for quiet in (False, True):
        with progress(Output(json=False), quiet=quiet) as show:
            show({"event": "start", "run_dir": "runs/x"})
            show(STEP)
            show({"event": "done", "run_dir": "runs/x", "weights_id": "abc"})
        said = capsys.readouterr()
        assert said.out.splitlines() == ([] if quiet else [" ".join(words(STEP))]) + [
            "done run_dir=runs/x weights_id=abc"
        ]
        assert ("croze trace runs/x" in said.err) != quiet


def test_the_opening_says_where_log_probs_are_not_exact(capsys):
    for exact in (True, False):
        with progress(Output(json=False), quiet=False) as show:
            show({"event": "start", "run_dir": "runs/x", "exact": exact, "numerics": "not exact: why"})
        assert ("not exact: why" in capsys.readouterr().err) != exact


def test_json_is_one_object_a_line(capfd):
    with Output(json=True) as output, progress(output, quiet=False) as show:
        show(STEP | {"kl_rollout": float("nan")})
        os.system("echo from a child process")
        show({"event": "done", "run_dir": "runs/x", "weights_id": "abc"})
    said = capfd.readouterr()
    first, last = map(json.loads, said.out.splitlines())
    assert first == STEP | {"kl_rollout": None} and last["event"] == "done"
    assert "from a child process" in said.err


def test_columns_and_excerpts():
    assert aligned([["a", "bb"], ["ccc", "d"]]) == "a    bb\nccc  d"
    assert excerpt("x" * 10, 10) == "x" * 10
    assert excerpt("x" * 11, 10) == "x" * 9 + "…"
    assert excerpt("a\nb\x1b", 60) == "a\\nb\\x1b"
    assert printable("a\nb\u202e\ud800", lines=True) == "a\nb\\u202e\\ud800"

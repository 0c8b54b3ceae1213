"""The command line as a user and as a program meet it: real processes, exit codes, streams."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from croze import config
from croze.cli.keys import describe_keys
from croze.errors import ConfigError
from croze.trace.recorder import Recorder
from croze.types import Outcome, Rollout, Task, Turn, WeightsId, WeightsSpan
from traces import add_span

CROZE = [sys.executable, "-m", "croze.cli.main"]


def croze(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CROZE, *words], cwd=cwd, capture_output=True, text=True, timeout=60)


def only_error(done: subprocess.CompletedProcess[str]) -> dict:
    (line,) = done.stdout.splitlines()
    error = json.loads(line)
    assert error.keys() == {"event", "kind", "message", "where", "fix"} and error["event"] == "error"
    return error


def make_rollout(group: int, member: int, reply: str, prompt="1+1") -> Rollout:
    return Rollout(
        id=f"g{group}.{member}.0",
        group_id=f"g{group}",
        member=member,
        attempt=0,
        task=Task(id=f"0.{group}", prompt=prompt),
        step=1 + group,
        prompt_tokens=2,
        ids_T=np.array([5, 6, 7, 8], np.int32),
        logprobs_T=np.array([np.nan, np.nan, -0.5, -1.5], np.float32),
        mask_T=np.array([False, False, True, True]),
        turns=(Turn(producer="prompt", start=0, end=2), Turn(producer="model", start=2, end=4)),
        weights=(WeightsSpan(start=2, end=4, weights_id=WeightsId("w" * 40)),),
        finish="stop",
        reply=reply,
        outcome=Outcome(
            score=0.5 * member, parts={"runs": 0.1}, turns=({"called": 1.0}, {}, {"right": 0.25})
        ),
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "calc-1"
    with Recorder(folder / "trace") as recorder:
        add_span(recorder, "decode", 0.0, 1.0, step=1)
        for group in range(15):
            for member in range(2):
                recorder.rollout(make_rollout(group, member, f"reply {group}"), pieces=["a", "b", "\n", "d"])
        chat = [{"role": "user", "content": "two\nlines"}]
        recorder.rollout(
            make_rollout(99, 0, "\x1b[31mred\x07\nnext \ud800".encode("utf-8", "replace").decode(), chat)
        )
    return folder


def test_help_and_version():
    done = croze("--help")
    assert done.returncode == 0 and "croze train calc.py" in done.stdout
    for verb in ("train", "eval", "trace", "keys"):
        assert verb in done.stdout
        done_verb = croze(verb, "--help")
        assert done_verb.returncode == 0 and f"usage: croze {verb}" in done_verb.stdout
    assert croze("--version").stdout.startswith("croze 0.")


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ([], "usage", "no verb"),
        (["trian"], "usage", "train"),
        (["train"], "usage", "FILE"),
        (["train", "absent.py"], "declaration", "absent.py"),
        (["train", "steps=3"], "declaration", "task file first"),
        (["train", "calc.py", "steps"], "config", "key=value"),
        (["train", "calc.py", "steps=3", "steps=4"], "config", "twice"),
        (["train", "calc.py", "optim.lrr=3"], "config", "optim.lr"),
        (["train", "calc.py", "steps=many"], "config", "whole number"),
        (["train", "calc.py", "--loud"], "usage", "--loud"),
        (["train", "broken.py"], "declaration", "ZeroDivisionError"),
        (["eval", "calc.py", "--tasks", "0"], "usage", "--tasks"),
        (["eval", "."], "declaration", "config.json"),
        (["trace", "absent"], "usage", "no such run"),
        (["keys", "nothing-like-it"], "usage", "nothing-like-it"),
    ],
)
def test_wrong_use_ends_with_2_and_says_what_to_do(tmp_path, words, kind, said):
    (tmp_path / "calc.py").write_text("import croze as cz\nrun = cz.Run(model='m', tasks=[], reward=print)\n")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    done = croze(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error[{kind}]: ") and said in done.stderr
    assert "Traceback" not in done.stderr
    done = croze(*words, "--json", cwd=tmp_path)
    assert done.returncode == 2
    error = only_error(done)
    assert error["kind"] == kind and said in json.dumps(error)


def test_overrides_and_options_may_be_mixed(tmp_path):
    (tmp_path / "calc.py").write_text("import croze as cz\nrun = cz.Run(model='m', tasks=[], reward=print)\n")
    done = croze("train", "calc.py", "steps=1", "--json", "optim.lr=1e-3", "-q", "optim.nope=1", cwd=tmp_path)
    assert only_error(done)["message"] == "unknown key 'optim.nope'"


def test_what_a_task_file_prints_stays_out_of_the_json(tmp_path):
    (tmp_path / "loud.py").write_text("import os\nprint('hello')\nos.system('echo child')\n1 / 0\n")
    done = croze("train", "loud.py", "--json", cwd=tmp_path)
    assert only_error(done)["kind"] == "declaration"
    assert "hello" in done.stderr and "child" in done.stderr
    done = croze("train", "loud.py", cwd=tmp_path)
    assert "hello" in done.stdout and "child" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_4(tmp_path, number):
    (tmp_path / "slow.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(60)\n")
    words = [*CROZE, "train", "slow.py", "--json"]
    with subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None and process.stdout is not None
        assert process.stderr.readline() == "ready\n"
        process.send_signal(number)
        error = json.loads(process.stdout.read())
        assert process.wait(10) == 4
    assert error["kind"] == "interrupted"


def test_a_defect_keeps_its_traceback_and_ends_with_3():
    program = (
        "import croze.cli.trace as trace, croze.cli.main as cli, sys\n"
        "trace.run = lambda arguments, output: 1 / 0\n"
        "sys.exit(cli.main(['trace', 'x', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "Traceback" in done.stderr
    assert only_error(done) | {"message": ""} == {
        "event": "error",
        "kind": "internal",
        "message": "",
        "where": None,
        "fix": None,
    }


def test_a_reader_that_goes_away_is_no_defect(run_dir):
    with subprocess.Popen(
        [*CROZE, "trace", str(run_dir), "--limit", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(30) == 4
        assert process.stderr.read() == ""


def test_keys_lists_every_key_with_what_its_docstring_says():
    rows = [json.loads(line) for line in croze("keys", "--json").stdout.splitlines()]
    from croze.run import all_keys

    assert {r["key"] for r in rows} == set(all_keys())
    by_key = {r["key"]: r for r in rows}
    assert by_key["optim.lr"] == {
        "key": "optim.lr",
        "default": 1e-6,
        "type": "number",
        "range": [0, None],
        "doc": "Peak learning rate: about how far, in its own unit, one update can move a weight.",
    }
    assert by_key["group_size"]["doc"] == "Rollouts per task."
    assert by_key["model"]["default"] is None and by_key["sandbox.allow_unsafe"]["range"] is None
    said = croze("keys", "optim").stdout
    assert "optim.lr = 1e-06\n    number, at least 0. Peak learning rate: about" in said
    assert "lora.alpha = 32\n    number, 1e-09 to 1e+09. Scale" in croze("keys", "lora").stdout


def test_every_key_is_explained_with_its_unit():
    rows = describe_keys()
    assert [r["key"] for r in rows if not re.search(r"\w+.*[.)]$", r["doc"])] == []
    units = {"_s": "econds", "_mib": "MiB", "_steps": "steps", "_tokens": "tokens"}
    for row in rows:
        for ending, unit in units.items():
            assert not row["key"].endswith(ending) or unit in row["doc"], row
    assert set(config.RANGES) <= {r["key"] for r in rows}, "a range of no key"
    for row in rows:  # what is shown is what is held
        for bound, beyond in zip(row["range"] or (), (-1, 1), strict=False):
            if bound is not None:
                config.check_range(row["key"], bound)
                with pytest.raises(ConfigError, match=row["key"]):
                    config.check_range(row["key"], bound + beyond)


# ------------------------------------------------------------------------------------------------- trace


def test_trace_lists_and_says_what_it_left_out(run_dir):
    done = croze("trace", str(run_dir))
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["rollout", "step", "task", "score", "fault", "finish", "tokens", "reply"]
    assert lines[1].startswith("g0.0.0") and len(lines) == 22
    assert lines[-1] == "20 of 31 rollouts (--limit 0 shows all)"
    assert len(croze("trace", str(run_dir), "--limit", "0").stdout.splitlines()) == 32
    assert len(croze("trace", str(run_dir), "--json").stdout.splitlines()) == 31


def test_trace_where_and_sql(run_dir):
    rows = [
        json.loads(x)
        for x in croze("trace", str(run_dir), "--json", "--where", "score > 0").stdout.splitlines()
    ]
    assert len(rows) == 15 and all(r["member"] == 1 and r["parts"] == {"runs": 0.1} for r in rows)
    done = croze("trace", str(run_dir), "--sql", "SELECT stave, count(*) AS n FROM spans GROUP BY stave")
    assert done.stdout.split() == ["stave", "n", "decode", "1"]
    done = croze("trace", str(run_dir), "--json", "--sql", "SELECT sum(mask::INT) AS trained FROM tokens")
    assert json.loads(done.stdout) == {"trained": 62}
    third = "SELECT sum(turn_parts[3]['right']) AS right FROM rollouts"
    assert json.loads(croze("trace", str(run_dir), "--json", "--sql", third).stdout) == {"right": 31 * 0.25}
    done = croze("trace", str(run_dir), "--where", "scroe > 0")
    assert done.returncode == 2 and "score" in done.stderr


def test_trace_shows_one_rollout(run_dir):
    done = croze("trace", str(run_dir), "g3.1.0")
    assert "part runs         0.1\nturn 1 called     1\nturn 3 right      0.25\n" in done.stdout
    assert done.stdout.endswith("[prompt]\n1+1\n\n[reply]\nreply 3\n")
    row = json.loads(croze("trace", str(run_dir), "g99.0.0", "--json").stdout)
    assert row["turn_parts"] == [{"called": 1.0}, {}, {"right": 0.25}]
    assert row["prompt"] == [{"role": "user", "content": "two\nlines"}]
    done = croze("trace", str(run_dir), "g3")
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["rollout", "g3.0.0", "g3.1.0"]
    done = croze("trace", str(run_dir), "g3.1.7")
    assert done.returncode == 2 and "did you mean 'g3.1" in done.stderr


def test_trace_shows_tokens(run_dir):
    done = croze("trace", str(run_dir), "g3.1.0", "--tokens")
    lines = [line.split() for line in done.stdout.splitlines()]
    assert lines[1] == ["0", "5", "-", "False", "prompt", "-", "a"]
    assert lines[3] == ["2", "7", "-0.5", "True", "model", "w" * 40, "\\n"]
    rows = [
        json.loads(x)
        for x in croze("trace", str(run_dir), "g3.1.0", "--tokens", "--json").stdout.splitlines()
    ]
    assert [r["position"] for r in rows] == [0, 1, 2, 3] and rows[0]["logprob"] is None


def test_what_a_model_wrote_cannot_steer_the_terminal(run_dir):
    for words in ([], ["g99.0.0"]):
        out = croze("trace", str(run_dir), *words, "--limit", "0").stdout
        assert "\x1b" not in out and "\x07" not in out and "\\x1b[31mred\\x07" in out


@pytest.mark.parametrize(
    "words",
    [
        ["--tokens"],
        ["g1.0.0", "--where", "true"],
        ["--where", "true", "--sql", "SELECT 1"],
        ["--limit", "-1"],
    ],
)
def test_trace_options_that_exclude_each_other(run_dir, words):
    assert croze("trace", str(run_dir), *words).returncode == 2


# ------------------------------------------------------------------------------------------------- start


def test_help_is_quick():
    best = min(_timed("--help") for _ in range(5))
    assert best < 0.15


def _timed(*words: str) -> float:
    before = os.times()
    croze(*words)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def test_a_terminal_gets_a_live_table(tmp_path):
    program = (
        "from croze.cli.output import Output\nfrom croze.cli.progress import progress\n"
        "with Output(json=False) as output, progress(output, quiet=False) as show:\n"
        "    show({'event': 'start', 'run_dir': 'runs/x', 'steps': 2})\n"
        "    phases = {'generate': 1.0, 'train': 0.5}\n"
        "    show({'event': 'step', 'step': 1, 'reward_mean': 0.25, 'step_s': 1.5, 'phase_s': phases})\n"
        "    show({'event': 'done', 'run_dir': 'runs/x', 'weights_id': 'w' * 40})\n"
    )
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=theirs, env=os.environ | {"TERM": "xterm", "COLUMNS": "120"}
    ) as process:
        os.close(theirs)
        seen = b""
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            try:
                block = os.read(ours, 65536)
            except OSError:  # the other end is closed: how a terminal says end of file
                break
            if not block:
                break
            seen += block
    os.close(ours)
    text = seen.decode()
    assert process.returncode == 0
    assert "step 1 of 2" in text and "0.25" in text and "generate 67%" in text and "run runs/x" in text

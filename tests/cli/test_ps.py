"""``croze ps`` as a user and a program meet it."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from croze.cli import ps
from croze.cli.main import main
from croze.loop.status import RunStatus
from run_folders import dead, held, interrupted, saved, stepped

CROZE = [sys.executable, "-m", "croze.cli.main", "ps"]
FIELDS = {
    "name",
    "path",
    "state",
    "step",
    "steps",
    "reward_mean",
    "checkpoint",
    "pid",
    "host",
    "created",
    "active",
}
FIELDS |= {"note", "resumable"}


def croze(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CROZE, *words], cwd=cwd, capture_output=True, text=True, timeout=60)


def test_a_list_of_runs(tmp_path):
    runs = tmp_path / "runs"
    saved(stepped(interrupted(runs / "done"), 0.5), 9)
    stepped(dead(runs / "killed"), 0.25, 0.375)
    interrupted(runs / "odd\x1b[31m").joinpath("config.json").write_text("{")
    with held(runs / "calc-7f3a") as process:
        done = croze("--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        found = {one["name"]: one for one in json.loads(line)}
        assert all(one.keys() == FIELDS for one in found.values())
        assert next(iter(found)) == "calc-7f3a", "those that run come first"
        assert {name: one["state"] for name, one in found.items()} == {
            "calc-7f3a": "running",
            "done": "finished",
            "killed": "dead",
            "odd\x1b[31m": "broken",
        }
        assert found["calc-7f3a"]["pid"] == process.pid and found["killed"]["resumable"]
        lines = croze(cwd=tmp_path).stdout.splitlines()
    assert lines[0].split() == ["run", "state", "step", "reward", "saved", "pid", "age", "active", "folder"]
    assert lines[1].split()[:4] == ["calc-7f3a", "running", "0", "of"] and str(process.pid) in lines[1]
    (killed,) = (line for line in lines if line.startswith("killed"))
    assert killed.split()[:7] == ["killed", "dead", "2", "of", "9", "0.375", "-"]
    assert lines[-1].startswith("odd\\x1b[31m: config.json cannot be read"), "no terminal is steered"


def test_nothing_there(tmp_path):
    done = croze(cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "no runs in runs/\n")
    assert croze("--json", cwd=tmp_path).stdout == "[]\n"
    assert not (tmp_path / "runs").exists()


def test_folders_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    interrupted(tmp_path / "here" / "one")
    interrupted(tmp_path / "there" / "two")
    assert [one.name for one in ps.find(["here", "there/two", "here/one"])] == ["two", "one"]
    for words, said in ((["absent"], "no such folder"), (["here/one/lock"], "no folder")):
        assert main(["ps", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0s"), (-5, "0s"), (59, "59s"), (60, "1m"), (7200, "2h"), (200_000, "2d")]
)
def test_times(seconds, said):
    one = RunStatus(name="a", path="runs/a", state="dead", created=1e9, active=1e9)
    assert ps.table([one], 1e9 + seconds).splitlines()[1].split()[6:8] == [said, said]


def test_a_thousand_runs_are_listed_at_once(tmp_path):
    template = stepped(interrupted(tmp_path / "runs" / "0"), 1.0)
    texts = {p.name: p.read_bytes() for p in template.iterdir()}
    for number in range(1, 1000):
        folder = tmp_path / "runs" / str(number)
        folder.mkdir()
        for name, text in texts.items():
            (folder / name).write_bytes(text)
    began = time.process_time()
    assert len(ps.find([str(tmp_path / "runs")])) == 1000
    assert time.process_time() - began < 2.0

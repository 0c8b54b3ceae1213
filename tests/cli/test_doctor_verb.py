"""``croze doctor`` as a user and a program meet it: a real look at this machine."""

import json
import os
import subprocess
import sys
from pathlib import Path

from croze.plan.doctor import CHECKS

CROZE = [sys.executable, "-m", "croze.cli.main", "doctor"]


def croze(*words: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CROZE, *words], cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=100
    )


def test_a_look_at_this_machine(tmp_path):
    done = croze("--json", cwd=tmp_path)
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert all(f.keys() == {"check", "kind", "status", "message", "where", "fix"} for f in found)
    assert done.returncode == int(any(f["status"] == "fail" for f in found))
    assert [f["status"] for f in found] == sorted(
        (f["status"] for f in found), key=["fail", "warn", "ok"].index
    )
    assert {f["check"] for f in found} == {check.name for check in CHECKS}
    assert [f for f in found if f["status"] != "ok" and not (f["fix"] and f["kind"] and f["message"])] == []
    assert "internal" not in {f["kind"] for f in found}
    by_check = {f["check"]: f for f in found}
    assert (
        by_check["python"]["status"] == by_check["packages"]["status"] == by_check["torch"]["status"] == "ok"
    )
    assert "torch" in by_check["packages"]["message"]
    assert list(tmp_path.iterdir()) == []


def test_what_needs_a_fix_says_so_and_ends_with_1(tmp_path):
    broken = tmp_path / "modules"
    broken.mkdir()
    (broken / "transformers.py").write_text("raise ImportError('a stave is missing')\n")
    done = croze(cwd=tmp_path, PYTHONPATH=str(broken), HF_HUB_OFFLINE="1")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].split(None, 2) == ["FAIL", "torch", "transformers cannot be imported: a stave is missing"]
    assert lines[2].split(None, 1) == ["do:", "pip install --force-reinstall transformers"]
    assert lines[-1].endswith("1 failed")

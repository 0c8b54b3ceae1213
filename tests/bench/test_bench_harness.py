"""The harness measures real children: what a hostile reader would doubt of its figures."""

from __future__ import annotations

import importlib.util
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCH = Path(__file__).resolve().parents[2] / "bench"


def load(name: str) -> ModuleType:
    """A bench script as a module, found as the scripts find each other."""
    if str(BENCH) not in sys.path:
        sys.path.insert(0, str(BENCH))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


harness = load("harness")

BURN = "import time\nend = time.process_time() + {s}\nwhile time.process_time() < end: pass\n"


def child(tmp_path: Path, code: str) -> list[str]:
    script = tmp_path / "child.py"
    script.write_text(code)
    return [sys.executable, str(script)]


def test_cpu_time_counts_grandchildren_and_not_sleep(tmp_path):
    code = (
        "import subprocess, sys, time\n"
        f"subprocess.run([sys.executable, '-c', {BURN.format(s=0.4)!r}], check=True)\n"
        "time.sleep(0.5)\n"
        'print(\'{"event": "step"}\', flush=True)\n'
        "time.sleep(0.2)\n"
    )
    measured = harness.run(child(tmp_path, code))
    (line,) = measured.events("step")
    assert 0.35 < line.cpu_s < 1.2
    assert measured.cpu_s >= line.cpu_s - 0.05
    assert measured.wall_s > 1.0


def test_cpu_time_between_two_lines_is_the_work_between_them(tmp_path):
    step = 'print(\'{"event": "step"}\', flush=True)\ntime.sleep(0.1)\n'
    code = "import time\n" + step + BURN.format(s=0.5) + step
    first, second = harness.run(child(tmp_path, code)).events("step")
    assert 0.35 < second.cpu_s - first.cpu_s < 0.75


def test_peak_memory_is_the_sum_over_processes_living_at_once(tmp_path):
    hold = "import time\nb = b'x' * (80 << 20)\ntime.sleep(0.8)\n"
    code = (
        "import subprocess, sys\n"
        f"cs = [subprocess.Popen([sys.executable, '-c', {hold!r}]) for _ in range(2)]\n"
        "[c.wait() for c in cs]\n"
    )
    assert 160 < harness.run(child(tmp_path, code)).peak_rss_mib < 320


def test_a_failing_child_is_an_error_that_carries_its_words(tmp_path):
    with pytest.raises(harness.BenchError, match=r"(?s)ended with 3.*the reason"):
        harness.run(child(tmp_path, "import sys\nprint('the reason', file=sys.stderr)\nsys.exit(3)"))


def test_a_missing_event_is_an_error_not_a_zero(tmp_path):
    measured = harness.run(child(tmp_path, "print('nothing')"))
    with pytest.raises(harness.BenchError, match="no 'ready' event"):
        measured.last("ready")


def test_children_get_one_thread(tmp_path):
    code = "import json, os\nprint(json.dumps({'event': 'e', 'n': os.environ['OMP_NUM_THREADS']}))"
    assert harness.run(child(tmp_path, code), env={}).last("e")["n"] == "1"


def test_an_interrupted_bench_leaves_no_process(tmp_path):
    marker = tmp_path / "alive"
    beat = (
        f"import pathlib, time\nwhile 1:\n    pathlib.Path({str(marker)!r}).touch()\n    time.sleep(0.02)\n"
    )
    argv = child(tmp_path, f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {beat!r}])\n")
    bench = subprocess.Popen(
        [sys.executable, "-c", f"import harness\nharness.run({argv!r})"], cwd=BENCH, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 20
    while not marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    bench.send_signal(signal.SIGINT)
    assert bench.wait(10) != 0
    marker.unlink(missing_ok=True)
    time.sleep(0.3)
    assert not marker.exists()


@given(st.text())
def test_any_text_is_an_event_or_none(text):
    record = harness.parse_event(text)
    assert record is None or isinstance(record["event"], str)


@given(st.dictionaries(st.text(), st.integers() | st.text()), st.text(min_size=1))
def test_an_event_line_comes_through(values, name):
    record = {**values, "event": name}
    assert harness.parse_event(json.dumps(record) + "\n") == record


def test_an_environment_is_made_once_and_again_when_its_requirements_change(tmp_path):
    venv = harness.Venv(name="empty", requirements=())
    python = venv.python(tmp_path)
    assert python.exists()
    stamp = (tmp_path / "empty" / ".ready").stat().st_mtime_ns
    assert venv.python(tmp_path) == python
    assert (tmp_path / "empty" / ".ready").stat().st_mtime_ns == stamp
    (tmp_path / "empty" / "left").touch()
    with pytest.raises(harness.BenchError, match="no-such-directory"):
        harness.Venv(name="empty", requirements=("./no-such-directory",)).python(tmp_path)
    assert not (tmp_path / "empty" / "left").exists()
    assert not (tmp_path / "empty" / ".ready").exists()


def test_a_report_is_saved_with_how_it_was_measured(tmp_path, capsys):
    started = harness.machine()
    harness.report("b", started, ("side", "n"), [{"side": "x", "n": 1.25}, {"side": "longer", "n": 300.0}])
    assert "longer" in capsys.readouterr().out
    harness.save(tmp_path / "deep" / "r.json", "b", started, {"rows": [1]})
    saved = json.loads((tmp_path / "deep" / "r.json").read_text())
    assert saved["machine"]["cores"] >= 1 and saved["rows"] == [1] and saved["load_after"]


def test_steps_are_medians_between_lines():
    vs_trl = load("vs_trl")
    lines = tuple(
        harness.Line(record={"event": "step", "reward_mean": 0.5}, cpu_s=c, wall_s=2 * c)
        for c in (10, 12, 15, 17)
    )
    measured = harness.Measured(lines=lines, cpu_s=20, wall_s=40, peak_rss_mib=100)
    side = vs_trl.summary("TRL", measured, {}, 0.25)
    assert (side.cpu_s, side.wall_s, side.reward) == (2, 4, 0.5)
    ours = vs_trl.summary("croze", measured, {}, 0.25)
    assert vs_trl.ratios([ours], [side])[0]["cpu_ratio"] == 1.0
    with pytest.raises(harness.BenchError, match="at least 2"):
        vs_trl.summary("TRL", harness.Measured(lines=lines[:1], cpu_s=1, wall_s=1, peak_rss_mib=1), {}, 0)

"""What every bench shares: peers' environments, children watched from outside, how a figure was measured.

CPU time is the figure, since a busy machine changes it far less than wall time: user + system seconds of a
child and all its descendants, read from outside, so that both sides of a comparison are measured alike.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "bench" / "out"
PEERS = ROOT / "bench" / "peers"

ONE_THREAD = {
    **{f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS", "NUMBA", "NUMEXPR")},
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
}


class BenchError(RuntimeError):
    """A child failed, or a peer could not be installed; the message ends with what it printed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One ``{"event": ...}`` object a child printed, with its tree's CPU and wall seconds so far."""

    record: dict[str, Any]
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A finished child: its lines and the whole tree's use. ``peak_rss_mib`` is the largest sum of resident
    memory over the tree (pages shared between processes count once for each)."""

    lines: tuple[Line, ...]
    cpu_s: float
    wall_s: float
    peak_rss_mib: float

    def events(self, name: str) -> list[Line]:
        return [line for line in self.lines if line.record["event"] == name]

    def last(self, name: str) -> dict[str, Any]:
        found = self.events(name)
        if not found:
            raise BenchError(f"the child printed no {name!r} event")
        return found[-1].record


def run(argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> Measured:
    """Run a child to its end with one thread per library; other output than event lines is let pass.

    Raises BenchError with the end of its stderr where it fails.
    """
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        child = subprocess.Popen(
            [str(word) for word in argv],
            env={**os.environ, **ONE_THREAD, **(env or {})},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
        )
        watch = _MemoryWatch(child.pid)
        watch.start()
        lines = []
        try:
            assert child.stdout is not None
            for text in child.stdout:
                record = parse_event(text)
                if record is not None:
                    cpu_s, _ = tree_use(child.pid)
                    lines.append(Line(record=record, cpu_s=cpu_s, wall_s=time.monotonic() - started))
            child.wait()
        finally:
            watch.stop()
            _end_tree(child)
        if child.returncode != 0:
            stderr.seek(0)
            end = "\n".join([str(line.record) for line in lines[-3:]] + [stderr.read()[-3000:]])
            raise BenchError(f"{' '.join(map(str, argv))} ended with {child.returncode}:\n{end}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Measured(
        lines=tuple(lines), cpu_s=cpu_s, wall_s=time.monotonic() - started, peak_rss_mib=watch.peak / 2**20
    )


def parse_event(text: str) -> dict[str, Any] | None:
    """The object of an event line, None for any other text a library may print."""
    if not text.startswith("{"):
        return None
    try:
        record = json.loads(text)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("event"), str) else None


def tree_use(pid: int) -> tuple[float, int]:
    """CPU seconds and resident bytes of a process and all its descendants, ended and reaped ones included."""
    cpu_s, rss = 0.0, 0
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0.0, 0
    for process in tree:
        try:
            with process.oneshot():
                times = process.cpu_times()
                rss += process.memory_info().rss
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
        cpu_s += times.user + times.system + times.children_user + times.children_system
    return cpu_s, rss


class _MemoryWatch(threading.Thread):
    """Samples a tree's resident memory until stopped."""

    def __init__(self, pid: int, every_s: float = 0.1) -> None:
        super().__init__(daemon=True)
        self.pid = pid
        self.every_s = every_s
        self.peak = 0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self.every_s):
            self.peak = max(self.peak, tree_use(self.pid)[1])

    def stop(self) -> None:
        self._over.set()
        self.join()


def _end_tree(child: subprocess.Popen[str]) -> None:
    """Leave nothing behind when the bench itself is interrupted."""
    if child.poll() is None:
        for process in psutil.Process(child.pid).children(recursive=True):
            process.kill()
        child.kill()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Venv:
    """A peer's own environment under bench/out/venvs: what to install, and what to take away again."""

    name: str
    requirements: tuple[str, ...]
    remove: tuple[str, ...] = ()

    def python(self, base: Path = OUT / "venvs") -> Path:
        """Its interpreter; the environment is made first where it is absent, unfinished or out of date."""
        home, wanted = base / self.name, json.dumps([self.requirements, self.remove])
        ready, python = home / ".ready", home / "bin" / "python"
        if ready.exists() and ready.read_text() == wanted:
            return python
        print(f"making the environment {home} (minutes) ...", file=sys.stderr, flush=True)
        shutil.rmtree(home, ignore_errors=True)
        bare = not self.requirements and not self.remove
        _checked([sys.executable, "-m", "venv", *(["--without-pip"] if bare else []), home])
        pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        if self.requirements:
            _checked([*pip, "install", *self.requirements])
        if self.remove:
            _checked([*pip, "uninstall", "--yes", *self.remove])
        ready.write_text(wanted)
        return python


def _checked(argv: Sequence[str | Path]) -> None:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BenchError(f"{' '.join(map(str, argv))} ended with {done.returncode}:\n{done.stderr[-3000:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where and when a figure was measured. ``native_bf16``: the CPU multiplies bf16 in hardware; without it
    libraries emulate, and fp32 is a peer's best dtype."""

    cpu: str
    cores: int
    native_bf16: bool
    memory_gib: float
    kernel: str
    python: str
    load_before: tuple[float, float, float]
    when: str


def machine() -> Machine:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(_pair(line) for line in info.splitlines() if ":" in line)
    flags = fields.get("flags", "").split()
    return Machine(
        cpu=fields.get("model name", platform.processor()),
        cores=os.cpu_count() or 1,
        native_bf16=bool({"avx512_bf16", "amx_bf16"} & set(flags)),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        load_before=os.getloadavg(),
        when=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def _pair(line: str) -> tuple[str, str]:
    key, _, value = line.partition(":")
    return key.strip(), value.strip()


def versions(*names: str) -> dict[str, str]:
    """Installed versions of distributions in this interpreter."""
    return {name: importlib.metadata.version(name) for name in names}


def smollm2() -> Path:
    """The directory of smollm2-135m-instruct in Hugging Face layout, fetched and converted once."""
    from croze.models.source import resolve

    return resolve("smollm2-135m-instruct").path


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options every bench has."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--json", type=Path, metavar="FILE", help="write results and how they were measured")
    return made


def report(bench: str, started: Machine, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the machine and a table."""
    load = "/".join(f"{x:.1f}" for x in os.getloadavg())
    bf16 = "native bf16" if started.native_bf16 else "no native bf16"
    print(f"{bench}: {started.cpu}, {started.cores} cores, {bf16}, one thread, {started.when}, load {load}")
    table(columns, rows)


def table(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Numbers right, words left."""
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in cells)) for i, column in enumerate(columns)]
    print("  ".join(column.ljust(width) for column, width in zip(columns, widths, strict=True)))
    for row, line in zip(rows, cells, strict=True):
        aligned = [
            text.rjust(width) if isinstance(row.get(column), int | float) else text.ljust(width)
            for column, text, width in zip(columns, line, widths, strict=True)
        ]
        print("  ".join(aligned).rstrip())


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


def save(path: Path | None, bench: str, started: Machine, results: Mapping[str, Any]) -> None:
    """Write the JSON form: results, the machine, and the load at both ends."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"bench": bench, "machine": asdict(started), "load_after": os.getloadavg(), **results}
    path.write_text(json.dumps(document, indent=1, default=str) + "\n")

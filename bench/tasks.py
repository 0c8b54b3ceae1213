"""Large task files: seconds and memory to open one, rows a second in shuffled order, seconds to go on at a cursor.

Writes a .jsonl and a .parquet file of --rows short rows into a temporary folder (about 55 bytes a row each in .jsonl)
and reads each in a process of its own. Limits: opening against reading the file once and counting its newlines;
rows of .jsonl against seeking to a known offset and decoding the line there, without task, order or index.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

COLUMNS = ("file", "mib", "open_s", "count_s", "open_mib", "rows/s", "seek_rows/s", "stream_mib", "resume_ms")
GROUP_ROWS = 10_000
DRAWN = 20_000


def write(folder: Path, rows: int) -> list[Path]:
    """The same rows as .jsonl and as .parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    jsonl, parquet = folder / "rows.jsonl", folder / "rows.parquet"
    schema = pa.schema([("prompt", pa.string()), ("answer", pa.string())])
    with open(jsonl, "w") as lines, pq.ParquetWriter(parquet, schema) as groups:
        for start in range(0, rows, GROUP_ROWS):
            some = [
                {"prompt": f"add {at} and {at * 7 % 1000}", "answer": str(at + at * 7 % 1000)}
                for at in range(start, min(start + GROUP_ROWS, rows))
            ]
            lines.writelines(json.dumps(row) + "\n" for row in some)
            groups.write_table(pa.Table.from_pylist(some, schema=schema))
    return [jsonl, parquet]


def peak_mib() -> float:
    """This program's largest resident memory so far (``ru_maxrss`` would count its parent's)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line]
    return int(line.split()[1]) / 1024


def blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            yield block


def count_s(path: Path) -> float:
    """CPU seconds to read a file and count its newlines."""
    before = time.process_time()
    sum(block.count(b"\n") for block in blocks(path))
    return time.process_time() - before


def seek_rows(path: Path) -> float:
    """Rows per CPU second where the offset of each is known."""
    offsets, at = [], 0
    with open(path, "rb") as file:
        for line in itertools.islice(file, 1_000_000):
            offsets.append(at)
            at += len(line)
        drawn = random.Random(0).choices(offsets, k=DRAWN)
        before = time.process_time()
        for offset in drawn:
            file.seek(offset)
            json.loads(file.readline())
    return DRAWN / (time.process_time() - before)


def one(path: Path) -> dict[str, Any]:
    """Figures of one file, in a fresh process."""
    from croze.env.tasks import tasks

    if path.suffix == ".parquet":
        import pyarrow.parquet  # noqa: F401  # its 40 MiB are not the file's
    next(tasks([{"prompt": "loads what is loaded late"}]).stream(0))
    base = peak_mib()
    source = tasks(path)
    before = time.process_time()
    stream = source.stream(0)
    next(stream)
    open_s, open_mib = time.process_time() - before, peak_mib() - base
    before = time.process_time()
    for _ in range(DRAWN):
        next(stream)
    drawn_s, stream_mib = time.process_time() - before, peak_mib() - base
    before = time.process_time()
    resumed = source.stream(0, start=stream.cursor)
    same = next(resumed) == next(stream)
    resume_ms = (time.process_time() - before) * 1e3
    assert same
    return {
        "event": "file",
        "file": path.suffix,
        "mib": path.stat().st_size / 2**20,
        "open_s": open_s,
        "count_s": count_s(path),
        "open_mib": open_mib,
        "rows/s": DRAWN / drawn_s,
        "seek_rows/s": seek_rows(path) if path.suffix == ".jsonl" else None,
        "stream_mib": stream_mib,
        "resume_ms": resume_ms,
    }


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--one", type=Path, metavar="FILE", help="measure one file in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one)))
        return 0
    started = harness.machine()
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), args.rows)
        measured = [harness.run([sys.executable, __file__, "--one", file]) for file in files]
    rows = [run.last("file") for run in measured]
    harness.report("tasks", started, COLUMNS, rows)
    harness.save(args.json, "tasks", started, {"rows": rows, "drawn": DRAWN, "group_rows": GROUP_ROWS})
    return 0


if __name__ == "__main__":
    sys.exit(main())

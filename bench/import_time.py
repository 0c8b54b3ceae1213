"""How long `import croze` and `croze --help` take, and that neither loads torch, transformers or ray."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness

HEAVY = ("torch", "transformers", "ray")
LIMIT_MS = 150.0
COLUMNS = ("command", "min_ms", "median_ms", "python_ms", "heavy")
LIST_MODULES = "import json, sys; print(json.dumps(sorted(set({heavy!r}) & set(sys.modules))))"


def wall_ms(argv: Sequence[str | Path], times: int) -> list[float]:
    """Milliseconds from start to exit of each of ``times`` runs."""
    taken = []
    for _ in range(times):
        before = time.perf_counter()
        subprocess.run(argv, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL, check=True)
        taken.append((time.perf_counter() - before) * 1e3)
    return taken


def heavy_modules(code: str) -> list[str]:
    """Which heavy packages are loaded after ``code``, in a fresh interpreter."""
    whole = f"{code}\n{LIST_MODULES.format(heavy=HEAVY)}"
    done = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(times: int) -> list[dict[str, Any]]:
    """A row for each command; ``python_ms`` is an empty interpreter's share of it."""
    script = Path(sys.executable).with_name("croze")
    empty = min(wall_ms([sys.executable, "-c", ""], times))
    help_code = (
        "import contextlib, io\nfrom croze.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main(['--help'])"
    )
    commands = {
        "import croze": ([sys.executable, "-c", "import croze"], "import croze"),
        "croze --help": ([script, "--help"], help_code),
    }
    rows = []
    for name, (argv, code) in commands.items():
        wall_ms(argv, 1)  # compiles to .pyc and fills the page cache
        taken = wall_ms(argv, times)
        rows.append(
            {
                "command": name,
                "min_ms": min(taken),
                "median_ms": statistics.median(taken),
                "python_ms": empty,
                "heavy": " ".join(heavy_modules(code)) or "none",
            }
        )
    return rows


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--times", type=int, default=10)
    args = parser.parse_args()
    started = harness.machine()
    rows = measure(args.times)
    harness.report("import_time", started, COLUMNS, rows)
    harness.save(args.json, "import_time", started, {"rows": rows, "limit_ms": LIMIT_MS, "times": args.times})
    return int(any(row["min_ms"] >= LIMIT_MS or row["heavy"] != "none" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

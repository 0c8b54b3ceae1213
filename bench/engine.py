"""croze's engine against the limit of this CPU: the model's matrix products alone, with as many rows.

smollm2-135m-instruct, one thread, prompts of 41 tokens, 64 new tokens with log-probs, groups of 8 (one reply
where there is one row). The engine's rate is end to end: prefill, attention, sampling and bookkeeping are its
own cost. ``max_gap``: the largest difference to the trainer's log-prob of a sampled token.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import harness

COLUMNS = ("rows", "dtype", "tokens/cpu_s", "limit", "of_limit", "max_gap")


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--dtype", choices=("bf16", "fp32"), nargs="+", default=["bf16", "fp32"])
    args = parser.parse_args()
    started, model, rows = harness.machine(), harness.smollm2(), []
    for dtype in args.dtype:
        common = ["--model", model, "--dtype", dtype]
        limit = harness.run(
            [sys.executable, harness.PEERS / "linear_limit.py", *common, "--rows", *map(str, args.rows)]
        )
        limits = {line.record["rows"]: line.record["tokens_per_cpu_s"] for line in limit.events("limit")}
        for count in args.rows:
            siblings = min(8, count)
            words = ["--groups", str(count // siblings), "--siblings", str(siblings)]
            measured = harness.run([sys.executable, harness.PEERS / "croze_generate.py", *common, *words])
            rows.append(row(count, dtype, measured, limits[count]))
    harness.report("engine", started, COLUMNS, rows)
    harness.save(args.json, "engine", started, {"rows": rows})


def row(count: int, dtype: str, measured: harness.Measured, limit: float) -> dict[str, Any]:
    each = [line.record["tokens"] / line.record["cpu_s"] for line in measured.events("repeat")]
    got = statistics.median(each)
    return {
        "rows": count,
        "dtype": dtype,
        "tokens/cpu_s": got,
        "limit": limit,
        "of_limit": f"{100 * got / limit:.0f}%",
        "max_gap": max(line.record["max_gap"] for line in measured.events("repeat")),
        "each": each,
        "how": measured.last("ready"),
    }


if __name__ == "__main__":
    main()

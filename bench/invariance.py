"""What ``engine.invariant`` costs: the engine and a training step with and without fixed tiles.

smollm2-135m-instruct, one thread. Decoding: prompts of 41 tokens, 32 new ones with log-probs, end to end. Training:
optimizer steps on 4 x 128 tokens that share nothing. The two ways take turns, ``--turns`` processes each, and the
median over all repeats counts. ``gap``: the largest difference of the sampler's and the trainer's log-probs.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import harness

WAYS = {"limits": (), "tiles": ("--invariant",)}
COLUMNS = ("work", "dtype", "unit", "limits", "tiles", "times_cpu", "gap_limits", "gap_tiles", "gemm")


def generate(common: list[Any], rows: int, words: tuple[str, ...]) -> harness.Measured:
    siblings = min(8, rows)
    sizes = ["--groups", rows // siblings, "--siblings", siblings, "--new", 32, "--repeats", 2]
    script = harness.PEERS / "croze_generate.py"
    return harness.run([sys.executable, script, *common, *map(str, sizes), *words])


def train(common: list[Any], words: tuple[str, ...]) -> harness.Measured:
    script = harness.PEERS / "croze_train.py"
    return harness.run([sys.executable, script, *common, "--steps", "2", *words])


def decoding(common: list[Any], dtype: str, rows: int, turns: int) -> dict[str, Any]:
    each: dict[str, list[float]] = {way: [] for way in WAYS}
    gaps, gemm = dict.fromkeys(WAYS, 0.0), []
    for _ in range(turns):
        for way, words in WAYS.items():
            found = generate(common, rows, words)
            assert found.last("ready")["exact"], found.last("ready")
            gemm.append(found.last("ready")["gemm"])
            for line in found.events("repeat"):
                each[way].append(line.record["tokens"] / line.record["cpu_s"])
                gaps[way] = max(gaps[way], line.record["max_gap"])
    limits, tiles = (statistics.median(each[way]) for way in WAYS)
    return {
        "work": f"decode {rows} rows",
        "dtype": dtype,
        "unit": "tokens/cpu_s",
        "limits": limits,
        "tiles": tiles,
        "times_cpu": limits / tiles,
        "gap_limits": gaps["limits"],
        "gap_tiles": gaps["tiles"],
        "gemm": statistics.median(gemm),
        "each": each,
    }


def training(common: list[Any], dtype: str, turns: int) -> dict[str, Any]:
    each: dict[str, list[float]] = {way: [] for way in WAYS}
    gemm = []
    for _ in range(turns):
        for way, words in WAYS.items():
            found = train(common, words)
            each[way] += [line.record["cpu_s"] for line in found.events("step")]
            gemm.append(found.last("limits")["gemm"][dtype])
    limits, tiles = (statistics.median(each[way]) for way in WAYS)
    return {
        "work": "train 4 x 128",
        "dtype": dtype,
        "unit": "cpu_s/step",
        "limits": limits,
        "tiles": tiles,
        "times_cpu": tiles / limits,
        "gemm": statistics.median(gemm),
        "each": each,
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), nargs="+", help="default: the machine's own")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    started, model, rows = harness.machine(), harness.smollm2(), []
    for dtype in args.dtype or ["bf16" if started.native_bf16 else "fp32"]:
        common = ["--model", model, "--dtype", dtype]
        rows += [decoding(common, dtype, count, args.turns) for count in args.rows]
        rows.append(training(common, dtype, args.turns))
    harness.report("invariance", started, COLUMNS, rows)
    harness.save(args.json, "invariance", started, {"rows": rows})


if __name__ == "__main__":
    main()

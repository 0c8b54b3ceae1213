"""The limit of decoding a Llama on this CPU: only the matrix products of one token for M rows.

Prints tokens per CPU second for each M. Every layer has its own weights, so that they do not stay in cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from common import DTYPES, emit, gemm_gflops, timed


def shapes(config: dict) -> list[tuple[int, int]]:
    """(out, in) of a layer's linears, q k v together and gate and up together."""
    hidden, heads, wide = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    size = config.get("head_dim") or hidden // heads
    qkv = (heads + 2 * config["num_key_value_heads"]) * size
    return [(qkv, hidden), (hidden, heads * size), (2 * wide, hidden), (hidden, wide)]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dtype, config = DTYPES[args.dtype], json.loads((args.model / "config.json").read_text())
    layer = shapes(config)
    weights = [torch.randn(s).to(dtype) for s in layer * config["num_hidden_layers"]]
    weights.append(torch.randn(config["vocab_size"], config["hidden_size"]).to(dtype))
    emit("ready", torch=torch.__version__, gemm=gemm_gflops(dtype))
    for rows in args.rows:
        inputs = {size: torch.randn(rows, size).to(dtype) for size in {w.shape[1] for w in weights}}

        def token(inputs=inputs) -> None:
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

        token()
        used = statistics.median(timed(token) for _ in range(args.repeats))
        emit("limit", rows=rows, tokens_per_cpu_s=rows / used)


main()

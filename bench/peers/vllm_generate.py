"""vLLM's CPU build, in process: prompts x siblings, ``--new`` tokens each, with every sampled log-prob."""

from __future__ import annotations

import argparse
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import vllm
from common import DTYPES, cpu_s, emit, gemm_gflops, random_prompts
from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    parser.add_argument(
        "--block", type=int, default=None, help="KV block size; its own default where not given"
    )
    parser.add_argument("--compile", action="store_true", help="its inductor mode instead of eager")
    for name, value in (("groups", 4), ("siblings", 8), ("prompt", 41), ("new", 64), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    block = {} if args.block is None else {"block_size": args.block}
    llm = LLM(
        model=args.model,
        dtype="bfloat16" if args.dtype == "bf16" else "float32",
        enforce_eager=not args.compile,
        max_model_len=512,
        max_num_seqs=args.groups * args.siblings,
        disable_log_stats=True,
        **block,
    )
    emit("ready", vllm=vllm.__version__, torch=torch.__version__, gemm=gemm_gflops(DTYPES[args.dtype]))
    params = SamplingParams(
        n=args.siblings, temperature=1.0, max_tokens=args.new, ignore_eos=True, logprobs=0, detokenize=False
    )
    for repeat in range(args.repeats + 1):  # the first warms up
        prompts = [
            TokensPrompt(prompt_token_ids=ids) for ids in random_prompts(args.groups, args.prompt, repeat)
        ]
        before = cpu_s()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        used = cpu_s() - before
        replies = [reply for output in outputs for reply in output.outputs]
        assert len(replies) == args.groups * args.siblings
        assert all(len(r.token_ids) == len(r.logprobs or ()) == args.new for r in replies)
        if repeat:
            emit("repeat", tokens=sum(len(r.token_ids) for r in replies), cpu_s=used)
    sys.stdout.flush()
    os._exit(0)  # its teardown may wait on threads for seconds


main()

"""transformers.generate: prompts x siblings, ``--new`` tokens each, with every sampled log-prob."""

from __future__ import annotations

import argparse

import torch
import transformers
from common import DTYPES, cpu_s, emit, gemm_gflops, random_prompts
from transformers import AutoModelForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", choices=DTYPES, required=True)
    for name, value in (("groups", 4), ("siblings", 8), ("prompt", 41), ("new", 64), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPES[args.dtype]).eval()
    model.generation_config.eos_token_id = None  # every reply has all its tokens
    emit(
        "ready",
        transformers=transformers.__version__,
        torch=torch.__version__,
        gemm=gemm_gflops(DTYPES[args.dtype]),
    )
    for repeat in range(args.repeats + 1):  # the first warms up
        ids = torch.tensor(random_prompts(args.groups, args.prompt, repeat)).repeat_interleave(
            args.siblings, 0
        )
        before = cpu_s()
        tokens, logprobs = generate(model, ids, args.new)
        used = cpu_s() - before
        assert tokens.shape == logprobs.shape == (args.groups * args.siblings, args.new)
        if repeat:
            emit("repeat", tokens=tokens.numel(), cpu_s=used)


@torch.inference_mode()
def generate(model, ids_BP: torch.Tensor, new: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled ids [B, new] and their log-probs [B, new]."""
    out = model.generate(
        ids_BP,
        attention_mask=torch.ones_like(ids_BP),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=new,
        min_new_tokens=new,
        pad_token_id=2,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens_BT = out.sequences[:, ids_BP.shape[1] :]
    picked = [
        torch.log_softmax(logits_BV.float(), -1).gather(1, token_B[:, None])
        for logits_BV, token_B in zip(out.logits, tokens_BT.unbind(1), strict=True)
    ]
    return tokens_BT, torch.cat(picked, 1)


main()

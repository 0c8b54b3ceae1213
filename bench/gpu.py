"""The same engine and trainer on an accelerator, in one short run: tokens per second, the log-prob gap, a step.

python bench/gpu.py [--model smollm2-135m-instruct] [--device cuda] [--attention exact sdpa] [--prompt 41] [--json FILE]

Both forms of attention, one behind the other (see engine.attention). Wall time, after a warm-up, with the device
synchronised; the limit is a bf16 matrix product 4096^3 in the same run. The gap is that of the engine's sampled
log-probs to the trainer's: 0 on a CPU that is exact, small and shown on CUDA.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

import croze as cz
from croze.inference.core import EngineCore
from croze.inference.protocol import Request, SamplingParams
from croze.loop import build
from croze.sync.identity import Identity
from croze.train import algorithms
from croze.train.trainer import TorchTrainer
from croze.types import Batch, Sample

GROUP = 8


def reward(reply: str) -> float:
    return float(len(reply))


def timed(call: Callable[[], Any], device: str) -> tuple[Any, float]:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    value = call()
    if device == "cuda":
        torch.cuda.synchronize()
    return value, time.perf_counter() - start


def prompts_of(vocab: int, groups: int, length: int) -> list[np.ndarray]:
    rng = np.random.default_rng(groups)
    return [rng.integers(1, vocab, length).astype(np.int32) for _ in range(groups)]


def generate(
    core: EngineCore, prompts: list[np.ndarray], tokens: int
) -> dict[tuple[str, int], tuple[list, list]]:
    """Sampled ids and log-probs of GROUP siblings a prompt."""
    for g, prompt in enumerate(prompts):
        core.submit(
            Request(
                id=str(g),
                prompt_P=prompt,
                keys=tuple(range(g * GROUP, (g + 1) * GROUP)),
                params=SamplingParams(max_tokens=tokens),
            )
        )
    out: dict[tuple[str, int], tuple[list, list]] = {}
    while core.busy:
        for chunk in core.step():
            ids, logprobs = out.setdefault((chunk.request_id, chunk.sibling), ([], []))
            ids.extend(chunk.ids_T)
            logprobs.extend(chunk.logprobs_T)
    return out


def samples(prompts: list[np.ndarray], out: dict[tuple[str, int], tuple[list, list]]) -> tuple[Sample, ...]:
    made = []
    for (group, sibling), (ids, logprobs) in out.items():
        count = len(ids)
        made.append(
            Sample(
                rollout_id=f"{group}.{sibling}",
                group_id=group,
                prompt_P=prompts[int(group)],
                ids_S=np.array(ids, np.int32),
                mask_S=np.ones(count, bool),
                logprobs_S=np.array(logprobs, np.float32),
                anchor_S=np.array(logprobs, np.float32),
                advantages_S=np.full(count, (-1.0) ** sibling, np.float32),
                weights_S=np.full(count, 1 / (count * len(out)), np.float32),
            )
        )
    return tuple(made)


def measure(
    run: cz.Run, model: build.Model, trainer: TorchTrainer, tokens: int, length: int
) -> list[dict[str, Any]]:
    device = model.recipe.device
    weights_id = Identity().of(trainer.export())
    x = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device)
    timed(lambda: x @ x, device)
    limit = 2 * 4096**3 / timed(lambda: x @ x, device)[1] / 1e12
    rows = []
    for groups in (1, 4, 16):
        trainer.publish(weights_id)  # a backward pass frees the packed weights
        core = EngineCore(trainer.weights, run.engine, model.tokenizer)
        core.load(weights_id, None)
        prompts = prompts_of(model.arch.vocab, groups, length)
        generate(core, prompts, 4)
        out, seconds = timed(lambda c=core, p=prompts: generate(c, p, tokens), device)
        batch = Batch(step=1, samples=samples(prompts, out))
        found = trainer.logprobs(batch.samples)
        gaps = np.concatenate([np.abs(f - s.logprobs_S) for f, s in zip(found, batch.samples, strict=True)])
        trainer.forward_backward(batch)
        trainer.parameters.grads.clear()
        _, step_s = timed(lambda b=batch: trainer.forward_backward(b), device)
        trainer.parameters.grads.clear()
        made = sum(len(ids) for ids, _ in out.values())
        rows.append(
            {
                "attention": model.recipe.attention,
                "rows": groups * GROUP,
                "tokens_per_s": made / seconds,
                "gap_max": float(gaps.max()),
                "gap_mean": float(gaps.mean()),
                "forward_backward_s": step_s,
                "bf16_gemm_tflops": limit,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--attention", nargs="+", default=("exact", "sdpa"), choices=("exact", "sdpa"))
    parser.add_argument("--prompt", type=int, default=41)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    rows = [row for form in chosen.attention for row in one_form(chosen, form)]
    if chosen.json:
        chosen.json.write_text(json.dumps({"bench": "gpu", "device": chosen.device, "rows": rows}))


def one_form(chosen: argparse.Namespace, form: Literal["exact", "sdpa"]) -> list[dict[str, Any]]:
    engine = cz.EngineOptions(device=chosen.device, threads=1, attention=form)
    run = cz.Run(model=chosen.model, tasks=[{"prompt": "unused"}], reward=reward, engine=engine)
    model = build.build_model(run)
    trainer = build.build_trainer(run, model, algorithms.build(run.algo, run.sampling))
    rows = model.thread.run_now(measure, run, model, trainer, chosen.tokens, chosen.prompt)
    model.thread.close()
    print(f"{model.files.name} on {chosen.device}, {model.recipe.dtype}, {form}; {model.recipe.note}")
    for row in rows:
        words = (f"{k} {v if isinstance(v, str) else format(v, '.4g')}" for k, v in row.items())
        print("  ".join(words), flush=True)
    return rows


if __name__ == "__main__":
    main()

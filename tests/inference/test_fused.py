"""The fused form of attention: close to the exact one wherever both run, never taken for it, and it learns."""

import json
import random

import msgspec
import numpy as np
import pytest
import torch

import small_models as small
from croze.config import Optim
from croze.inference.fused import BLOCK_ROWS
from croze.inference.protocol import Request
from croze.loop.load import load_run
from croze.loop.start import train
from croze.models import numerics
from croze.models.architecture import from_config
from croze.models.weights import LoraSpec
from peer_models import WINDOWED, hugging_face, teacher_forced

ARCHS = {
    "grouped queries": {},
    "multi-head, biases": {"family": "qwen2", "qkv_bias": True, "kv_heads": 4},
    "many queries a key head": {"heads": 16, "kv_heads": 1, "head_dim": 10},
    "windows": {"family": "qwen3", "qk_norm": True, "windows": (9, 0), "head_dim": 32},
    "a window over prompt and reply": {"family": "mistral", "windows": (40, 40)},
}


def pair(name: str, *, dtype: str = "float32", **options: object) -> tuple[small.Rig, small.Rig]:
    """The same weights, exact and fused."""
    made = [
        small.make_rig(
            small.architecture(**ARCHS[name]),
            dtype=dtype,
            published=getattr(torch, dtype),
            measured=False,
            attention=form,
            optim=Optim(lr=1e-3, **options),  # type: ignore[arg-type]
        )
        for form in ("exact", "sdpa")
    ]
    return made[0], made[1]


def requests() -> list[Request]:
    """Beginnings shared and not, earlier turns, one group of more siblings than one block takes."""
    rng = random.Random(4)
    ids = [rng.randrange(307) for _ in range(300)]
    return [
        small.request("a", ids[:60], 3, suffixes=[ids[100:140], [], ids[:5]], max_tokens=12),
        small.request("b", [7], 1, max_tokens=30),
        small.request("c", ids[:33] + ids[200:210], 2, max_tokens=9),
        small.request("many", ids[50:75], BLOCK_ROWS // 4 + 3, max_tokens=7),
    ]


@pytest.mark.parametrize("name", ARCHS)
def test_the_engine_is_close_to_the_exact_one(name):
    """Same tokens (each is drawn with the same uniform), log-probs within 1e-4, in every schedule."""
    exact, fused = pair(name)
    wanted = small.drive(exact.engine(), requests())
    schedules = (
        ({}, None),
        ({"prefill_chunk": 7, "max_rows": 25}, [0, 2, 3, 9]),
        ({"prefill_chunk": 64}, [4, 1, 0, 0]),
    )
    for options, arrivals in schedules:
        found = small.drive(fused.engine(**options), requests(), arrivals)
        assert {k: r.ids for k, r in found.items()} == {k: r.ids for k, r in wanted.items()}
        for key, record in found.items():
            np.testing.assert_allclose(record.logprobs, wanted[key].logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", ARCHS)
def test_the_trainer_is_close_to_the_exact_one(name, share):
    """Log-probs and gradients, with and without recomputation, of prompts that begin alike and ragged siblings."""
    exact, fused = pair(name, share_prompt=share)
    samples = small.random_samples(307, [(7, (5, 9, 1)), (40, (33, 2, 16)), (1, (12,))])
    alike = np.concatenate([samples[3].prompt_P[:25], samples[0].prompt_P])
    samples += [msgspec.structs.replace(s, group_id="alike", prompt_P=alike) for s in samples[:2]]
    for found, wanted in zip(fused.trainer.logprobs(samples), exact.trainer.logprobs(samples), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4, rtol=0)
    wanted_loss, wanted = small.gradients(exact.trainer, samples)
    for checkpointing in (False, True):
        trainer = fused.with_optim(share_prompt=share, checkpointing=checkpointing)
        loss, found = small.gradients(trainer, samples)
        assert loss == pytest.approx(wanted_loss, rel=1e-4)
        assert small.relative_gap(found, wanted) < 1e-4


@pytest.mark.parametrize("name", ["llama, rope scaled", "qwen2", "qwen3, wide heads", *WINDOWED])
def test_scores_equal_transformers(name):
    model = hugging_face(name)
    rig = small.make_rig(
        from_config(model.config.to_dict()),
        tensors=model.state_dict(),
        published=torch.float32,
        measured=False,
        attention="sdpa",
    )
    ids = np.random.default_rng(0).integers(0, 97, 120).astype(np.int32)
    for prompt in (1, 60):
        found = rig.engine().score(ids[:prompt], ids[prompt:], 1.0)
        np.testing.assert_allclose(found, teacher_forced(model, ids, prompt), atol=1e-5)


@pytest.mark.parametrize("lora", [None, LoraSpec(rank=4, scale=2.0, targets=small.ALL_LINEARS)])
def test_the_gap_in_bf16_is_measured_and_small(lora):
    rig = small.make_rig(small.architecture(), dtype="bfloat16", lora=lora, attention="sdpa")
    records = small.drive(rig.engine(prefill_chunk=20), requests())
    stats = rig.trainer.forward_backward(small.batch(small.to_samples(requests(), records)))
    assert 0 < stats.max_logprob_gap < 0.2
    assert 0 < stats.kl_rollout < 1e-2


def test_garbage_in_kv_memory_does_not_matter():
    _, rig = pair("windows")
    core = rig.engine()
    wanted = small.drive(core, requests())
    with torch.inference_mode():
        for pool in (core.cache.prompt_k, core.cache.prompt_v, core.cache.suffix_k, core.cache.suffix_v):
            for tensor in pool:
                tensor.normal_(0, 1e4)
    assert small.drive(core, requests()) == wanted


def test_which_form_is_chosen_and_what_is_said_of_it():
    arch = small.architecture()
    assert numerics.choose(arch, "float32", "cpu", True).attention == "exact"
    assert numerics.choose(arch, "float32", "cpu", True, attention="exact").checked
    fused = numerics.choose(arch, "float32", "cpu", True, attention="sdpa")
    assert (fused.attention, fused.exact) == ("sdpa", False)
    assert "not exact" in fused.note and "engine.attention" in fused.note


TASK = """
import croze as cz
from croze.reward.expression import evaluate

TASKS = [{"prompt": f"add {a} and {b}, times 3=", "answer": str((a + b) * 3)}
         for a, b in [(2, 3), (4, 5), (6, 7), (8, 9), (3, 8), (5, 9), (7, 4), (9, 2)]]

def judged(reply, answer):
    return 1.0 if str(evaluate(reply)) == answer else 0.1 * (evaluate(reply) is not None)

run = cz.Run(model="tiny-calc", tasks=TASKS, reward=judged, steps=2, groups_per_step=4, group_size=4,
             sampling=cz.Sampling(max_tokens=12), optim=cz.Optim(lr=3e-4))
"""


def test_a_run_says_that_it_is_not_exact_and_by_how_much(tmp_path):
    (tmp_path / "task.py").write_text(TASK)
    words = {"engine.attention": "sdpa", "engine.threads": "1", "run.dir": str(tmp_path / "run")}
    events: list[dict] = []
    train(load_run(tmp_path / "task.py").override(words), on_event=events.append)
    (start,) = [e for e in events if e["event"] == "start"]
    assert start["exact"] is False and "not exact" in start["numerics"]
    steps = [e for e in events if e["event"] == "step"]
    assert len(steps) == 2 and all(e["groups_trained"] and not e["updates_skipped"] for e in steps)
    assert all(0 < e["max_logprob_gap"] < 0.1 for e in steps)
    told = json.loads((tmp_path / "run" / "config.json").read_text())["numerics"][-1]
    assert told["exact"] is False and "sdpa" in told["note"]

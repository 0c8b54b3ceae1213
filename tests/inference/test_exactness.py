"""Sampler, trainer and scorer agree bit for bit, whatever else is in the batch and however it is cut."""

import random

import msgspec
import numpy as np
import pytest
import torch

import small_models as small
from croze.config import Optim
from croze.inference.protocol import Request
from croze.models.weights import LoraSpec
from croze.types import Sample

GROUPS = {"a": 5, "b": 1, "c": 3, "d": 2}
PROMPTS = {"a": 41, "b": 5, "c": 130, "d": 77}
CASES = {
    # name: architecture, arithmetic, adapter, temperature, optimizer updates, share_prompt
    "bf16, grouped queries": ({}, "bfloat16", None, 1.0, 5, True),
    "bf16, demo's head shape": (
        {"hidden": 96, "heads": 3, "kv_heads": 1, "head_dim": 64, "intermediate": 1536},
        "bfloat16",
        None,
        0.7,
        2,
        True,
    ),
    "fp32, biases, own prompts": (
        {"family": "qwen2", "qkv_bias": True, "kv_heads": 4, "vocab": 300},
        "float32",
        None,
        0.7,
        5,
        False,
    ),
    "bf16, adapter everywhere": (
        {"family": "qwen3", "qk_norm": True, "head_dim": 32},
        "bfloat16",
        LoraSpec(rank=4, scale=2.0, targets=small.ALL_LINEARS),
        1.0,
        5,
        True,
    ),
    "bf16, windows shorter than prompts and replies": (
        {"family": "qwen3", "qk_norm": True, "windows": (0, 7)},
        "bfloat16",
        None,
        1.0,
        5,
        True,
    ),
    "fp32, a window over prompt and reply": (
        {"family": "mistral", "windows": (35, 35)},
        "float32",
        LoraSpec(rank=4, scale=2.0, targets=small.ALL_LINEARS),
        0.7,
        1,
        True,
    ),
    "fp32, adapter on some": (
        {"tied": False},
        "float32",
        LoraSpec(rank=3, scale=0.7, targets=("q_proj", "v_proj", "down_proj")),
        1.3,
        1,
        True,
    ),
}


def build(name: str) -> tuple[small.Rig, int, bool]:
    changes, dtype, lora, temperature, updates, share = CASES[name]
    rig = small.make_rig(
        small.architecture(**changes),
        dtype=dtype,
        lora=lora,
        temperature=temperature,
        optim=Optim(lr=1e-3, share_prompt=share),
    )
    skip_where_inexact(rig)
    return rig, updates, share


def skip_where_inexact(rig: small.Rig) -> None:
    if not rig.weights.recipe.exact:
        pytest.skip(f"numerics.measure says: {rig.weights.recipe.note}")


def ragged_requests(vocab: int, temperature: float) -> list[Request]:
    """Groups that begin alike and groups that do not, earlier turns behind some prompts, early stops."""
    rng = random.Random(7)
    start = [rng.randrange(vocab) for _ in range(30)]
    requests = []
    for name, siblings in GROUPS.items():
        prompt = (start if name in "ad" else []) + [rng.randrange(vocab) for _ in range(200)]
        suffixes = [[rng.randrange(vocab) for _ in range(rng.choice((0, 0, 5, 40)))] for _ in range(siblings)]
        requests.append(
            small.request(
                name,
                prompt[: PROMPTS[name]],
                siblings,
                suffixes=suffixes if name != "b" else [],
                max_tokens=rng.randint(9, 14),
                stop_ids=tuple(range(0, vocab, 23)),
                temperature=temperature,
            )
        )
    return requests


def alone(request: Request, sibling: int) -> Request:
    return msgspec.structs.replace(
        request, keys=request.keys[sibling : sibling + 1], suffixes=request.suffixes[sibling : sibling + 1]
    )


def assert_schedules_agree(rig: small.Rig, requests: list[Request]) -> small.Records:
    """Tokens and log-probs are the same in every schedule; returns them."""
    base = small.drive(rig.engine(prefill_chunk=64), requests, [0, 2, 3, 9])
    schedules = [
        ({"prefill_chunk": 7, "max_rows": 6}, requests[::-1], [0, 0, 1, 2]),
        ({"prefill_chunk": 5000}, requests, None),
        ({"prefill_chunk": 1, "max_rows": 5}, [requests[1], requests[0]], None),
    ]
    for options, order, arrivals in schedules:
        other = small.drive(rig.engine(**options), order, arrivals)
        assert all(other[k].tokens == base[k].tokens for k in other), options
    for request, sibling in ((requests[0], 4), (requests[2], 1), (requests[1], 0)):
        found = small.drive(rig.engine(prefill_chunk=5), [alone(request, sibling)])
        assert found[request.id, 0].tokens == base[request.id, sibling].tokens
    return base


def assert_trainer_agrees(rig: small.Rig, samples: list[Sample], temperature: float) -> None:
    """Zero difference under every order and micro-batch split, and through ``score``."""
    shuffled = random.Random(1).sample(samples, len(samples))
    share = rig.trainer.optim.share_prompt
    for order, budget in ((samples, 100_000), (samples, 1), (shuffled, 300)):
        trainer = rig.with_optim(tokens_per_microbatch=budget, share_prompt=share)
        for sample, found in zip(order, trainer.logprobs(order), strict=True):
            np.testing.assert_array_equal(found[sample.mask_S], sample.logprobs_S[sample.mask_S])
    core = rig.engine()
    for sample in samples[::3]:
        found = core.score(sample.prompt_P, sample.ids_S, temperature)
        np.testing.assert_array_equal(found[sample.mask_S], sample.logprobs_S[sample.mask_S])


@pytest.mark.parametrize("name", CASES)
def test_log_probs_are_equal_to_the_last_bit(name):
    rig, updates, share = build(name)
    requests = ragged_requests(rig.arch.vocab, rig.trainer.temperature)
    for update in range(updates + 1):
        if update in (0, updates):
            records, taken = assert_schedules_agree(rig, requests), requests
            samples = small.to_samples(taken, records)
            assert sum(len(r.ids) for r in records.values()) > 60
            assert_trainer_agrees(rig, samples, rig.trainer.temperature)
        else:
            taken = requests[:2]
            samples = small.to_samples(taken, small.drive(rig.engine(), taken))
        trainer = rig.with_optim(tokens_per_microbatch=250, share_prompt=share)
        stats = trainer.forward_backward(small.batch(samples))
        assert stats.max_logprob_gap == 0.0
        assert stats.kl_rollout == 0.0
        assert not trainer.step(update + 1).skipped
        rig.publish(f"w{update + 1}")


def test_updates_change_the_log_probs():
    """The equality above is no accident of weights that stand still."""
    rig, _, _ = build("bf16, grouped queries")
    requests = ragged_requests(rig.arch.vocab, 1.0)
    before = small.drive(rig.engine(), requests)
    train_once(rig, requests, before)
    after = small.drive(rig.engine(), requests)
    assert all(after[k].logprobs[0] != before[k].logprobs[0] for k in before)


def train_once(rig: small.Rig, requests: list[Request], records: small.Records) -> None:
    rig.trainer.forward_backward(small.batch(small.to_samples(requests, records)))
    rig.trainer.step(1)
    rig.publish("w1")


@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_prompts_longer_than_a_tile(dtype, window):
    """Three tiles of values, several regions, a long earlier turn; the trainer sees it with short neighbours."""
    rig = small.make_rig(small.architecture(layers=1, head_dim=64, windows=(window,)), dtype=dtype)
    skip_where_inexact(rig)
    rng = random.Random(3)
    ids = [rng.randrange(307) for _ in range(1000)]
    requests = [
        small.request("long", ids[:700], 3, suffixes=[ids[700:960], [], ids[:3]], max_tokens=6),
        small.request("short", ids[:300], 2, max_tokens=6),
    ]
    base = small.drive(rig.engine(prefill_chunk=129), requests, [3, 0])
    other = small.drive(rig.engine(prefill_chunk=10_000), requests)
    assert {k: r.tokens for k, r in base.items()} == {k: r.tokens for k, r in other.items()}
    assert_trainer_agrees(rig, small.to_samples(requests, base), 1.0)


def test_what_lies_in_kv_memory_does_not_matter():
    rig, _, _ = build("bf16, grouped queries")
    requests = ragged_requests(rig.arch.vocab, 1.0)
    core = rig.engine(prefill_chunk=30)
    first = small.drive(core, requests)
    cache = core.cache
    with torch.inference_mode():
        for pool in (cache.prompt_k, cache.prompt_v, cache.suffix_k, cache.suffix_v):
            for tensor in pool:
                tensor.normal_(0, 1e4)
    second = small.drive(core, requests[::-1], [0, 1, 1, 5])
    assert {k: r.tokens for k, r in first.items()} == {k: r.tokens for k, r in second.items()}


def test_a_new_prompt_borrows_nothing_from_older_weights():
    """KV is copied between prompts that begin alike, but never across a change of the weights."""
    rig, _, _ = build("bf16, grouped queries")
    requests = ragged_requests(rig.arch.vocab, 1.0)
    old, new = requests[0], requests[3]
    core = rig.engine()
    records: small.Records = {}
    core.submit(old)
    for _ in range(2):
        small.collect(core, records)
    train_once(rig, requests, small.drive(rig.engine(), requests))
    core.load(rig.weights.weights_id, None)
    core.submit(new)
    while core.busy:
        small.collect(core, records)
    assert {w for s in range(2) for w in records["d", s].weights} == {"w1"}
    fresh = small.drive(rig.engine(), [new])
    assert [records["d", s].tokens for s in range(2)] == [fresh["d", s].tokens for s in range(2)]


def test_tokens_follow_key_and_seed_alone():
    rig = small.make_rig(small.architecture(), measured=False)
    one = small.request("x", [1, 2, 3], keys=(9, 9, 10), max_tokens=20)
    records = small.drive(rig.engine(), [one])
    assert records["x", 0].tokens == records["x", 1].tokens != records["x", 2].tokens
    other = small.request("y", [1, 2, 3], keys=(9,), max_tokens=20, seed=6)
    assert small.drive(rig.engine(), [other])["y", 0].ids != records["x", 0].ids

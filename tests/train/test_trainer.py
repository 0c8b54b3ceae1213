"""The trainer's log-probs and gradients: against transformers' autograd, and however a batch is cut or shared."""

import random

import msgspec
import numpy as np
import pytest
import torch

import small_models as small
from croze.config import Optim
from croze.errors import EngineFault
from croze.models.architecture import from_config
from croze.types import Sample
from peer_models import hugging_face

FAMILIES = {
    "llama": {},
    "qwen2": {"family": "qwen2", "qkv_bias": True, "tied": False},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 24, "kv_heads": 1},
}
GROUPS = [(7, (5, 9, 1)), (40, (33, 2, 16)), (1, (12,)), (64, (20, 20))]


def rig(family: str = "llama", *, algorithm: small.LogProbs | None = None, **options: object) -> small.Rig:
    """fp32 all through, so that gradients can be compared closely."""
    return small.make_rig(
        small.architecture(**FAMILIES[family]),
        published=torch.float32,
        algorithm=algorithm,
        optim=Optim(**options),  # type: ignore[arg-type]
        measured=False,
    )


def odd_samples(vocab: int = 307) -> list[Sample]:
    """Ragged groups with holes in their masks, one sample of which only the first token is trained, one of which
    none is, one whose last tokens are not, and two groups whose prompts begin alike."""
    samples = small.random_samples(vocab, GROUPS)
    first, nothing = [True] + [False] * 8, [False] * 2
    samples[1] = small.masked(samples[1], first)
    samples[4] = small.masked(samples[4], nothing)
    samples[5] = small.masked(samples[5], [True, False, True, True] + [False] * 12)
    alike = np.concatenate([samples[3].prompt_P[:25], samples[0].prompt_P])
    return samples + [
        msgspec.structs.replace(s, group_id="alike", rollout_id=f"alike/{i}", prompt_P=alike)
        for i, s in enumerate(samples[:2])
    ]


@pytest.mark.parametrize("name", ["llama, rope scaled", "llama, untied", "qwen2", "qwen3, wide heads"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_gradients_equal_autograd_through_transformers(name, temperature):
    model = hugging_face(name)
    model.zero_grad()
    own = small.make_rig(
        from_config(model.config.to_dict()),
        tensors=model.state_dict() | {},
        published=torch.float32,
        temperature=temperature,
        measured=False,
    )
    samples = odd_samples(97)
    found_logprobs = own.trainer.logprobs(samples)
    loss, found = small.gradients(own.trainer, samples)
    wanted_loss = 0.0
    for sample, logprobs in zip(samples, found_logprobs, strict=True):
        ids = torch.from_numpy(np.concatenate([sample.prompt_P, sample.ids_S]).astype(np.int64))[None]
        logits = model(ids).logits[0].float() / temperature
        start = len(sample.prompt_P)
        reference = torch.log_softmax(logits, -1)[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        mask = sample.mask_S
        np.testing.assert_allclose(logprobs[mask], reference.detach().numpy()[mask], atol=1e-5)
        assert not logprobs[~mask].any()
        share = -(reference * torch.from_numpy(sample.advantages_S * sample.weights_S)).sum()
        share.backward()
        wanted_loss += share.item()
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert small.relative_gap(found, wanted) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_sharing_prompts_changes_no_gradient(family):
    own, samples = rig(family), odd_samples()
    loss, shared = small.gradients(own.with_optim(share_prompt=True), samples)
    plain_loss, plain = small.gradients(own.with_optim(share_prompt=False), samples)
    assert loss == pytest.approx(plain_loss, rel=1e-6)
    assert small.relative_gap(shared, plain) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("share", [True, False])
def test_a_micro_batch_split_changes_neither_loss_nor_gradient(family, share):
    """One micro-batch, one a sample, groups cut in the middle, samples shuffled."""
    own, samples = rig(family), odd_samples()
    wanted_loss, wanted = small.gradients(
        own.with_optim(share_prompt=share, tokens_per_microbatch=10**6), samples
    )
    shuffled = random.Random(2).sample(samples, len(samples))
    for order, budget in ((samples, 1), (samples, 60), (shuffled, 100), (shuffled, 10**6)):
        loss, found = small.gradients(own.with_optim(share_prompt=share, tokens_per_microbatch=budget), order)
        assert loss == pytest.approx(wanted_loss, rel=1e-6)
        assert small.relative_gap(found, wanted) < 1e-5


def test_what_is_shared_is_computed_once():
    own, samples = rig(), small.random_samples(307, [(50, (10, 10, 10))], holes=0.0)
    tokens = {}
    for share in (True, False):
        trainer = own.with_optim(share_prompt=share)
        tokens[share] = trainer.forward_backward(small.batch(samples)).tokens_computed
    assert tokens == {True: 50 + 3 * 9, False: 3 * 59}
    alike = [msgspec.structs.replace(s, group_id=f"g{i}") for i, s in enumerate(samples)]
    longer = msgspec.structs.replace(
        alike[2], prompt_P=np.r_[alike[2].prompt_P[:30], alike[2].prompt_P].astype(np.int32)
    )
    computed = own.with_optim().forward_backward(small.batch([*alike[:2], longer])).tokens_computed
    assert computed == 30 + 20 + 20 + 50 + 3 * 9


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_checkpointing_changes_no_gradient(family):
    own, samples = rig(family), odd_samples()
    loss, kept = small.gradients(own.with_optim(), samples)
    other, again = small.gradients(own.with_optim(checkpointing=True), samples)
    assert loss == other
    assert small.relative_gap(again, kept) == 0.0


def test_accumulation_adds_up():
    own, samples = rig(), odd_samples()
    _, once = small.gradients(own.trainer, samples)
    own.trainer.forward_backward(small.batch(samples[:4]))
    _, both = small.gradients(own.trainer, samples[4:])
    assert small.relative_gap(both, once) < 1e-5


def test_nothing_to_train_computes_nothing():
    own = rig()
    silent = [small.masked(s, [False] * len(s.ids_S)) for s in odd_samples()]
    stats = own.trainer.forward_backward(small.batch(silent))
    assert (stats.tokens_trained, stats.loss, stats.max_logprob_gap) == (0, 0.0, 0.0)
    assert not own.trainer.parameters.grads
    assert all(not lp.any() for lp in own.trainer.logprobs(silent))
    still = [msgspec.structs.replace(s, advantages_S=np.zeros_like(s.advantages_S)) for s in odd_samples()]
    stats = own.trainer.forward_backward(small.batch(still))
    assert stats.tokens_trained > 0
    assert not own.trainer.parameters.grads  # a zero gradient needs no backward pass
    assert own.trainer.forward_backward(small.batch([])).tokens_computed == 0


def test_entropy_reaches_the_gradient():
    """d(sum of weight x entropy) against autograd through transformers."""
    model = hugging_face("llama, grouped queries")
    model.zero_grad()
    own = small.make_rig(
        from_config(model.config.to_dict()),
        tensors=model.state_dict(),
        published=torch.float32,
        algorithm=small.LogProbs(entropy=0.3),
        measured=False,
    )
    samples = [
        msgspec.structs.replace(s, advantages_S=np.zeros_like(s.advantages_S)) for s in odd_samples(97)
    ]
    loss, found = small.gradients(own.trainer, samples)
    total = 0.0
    for s in samples:
        ids = torch.from_numpy(np.concatenate([s.prompt_P, s.ids_S]).astype(np.int64))[None]
        logits = model(ids).logits[0][len(s.prompt_P) - 1 : -1]
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        share = -0.3 * (entropy * torch.from_numpy(s.weights_S)).sum()
        share.backward()
        total += share.item()
    assert loss == pytest.approx(total, rel=1e-5)
    assert small.relative_gap(found, {n: p.grad for n, p in model.named_parameters()}) < 1e-5


def test_stats_tell_the_gap_to_the_sampler():
    own, samples = rig(), small.random_samples(307, [(5, (8, 8))], holes=0.0)
    exact = [
        msgspec.structs.replace(s, logprobs_S=lp)
        for s, lp in zip(samples, own.trainer.logprobs(samples), strict=True)
    ]
    stats = own.trainer.forward_backward(small.batch(exact))
    assert (stats.max_logprob_gap, stats.kl_rollout, stats.tokens_trained) == (0.0, 0.0, 16)
    moved = [msgspec.structs.replace(s, logprobs_S=s.logprobs_S - np.float32(0.5)) for s in exact]
    stats = own.trainer.forward_backward(small.batch(moved))
    assert stats.max_logprob_gap == pytest.approx(0.5, abs=1e-5)
    assert stats.kl_rollout == pytest.approx(np.exp(0.5) - 1 - 0.5, rel=1e-4)
    assert stats.figures == {"tokens": 16.0}


def test_training_raises_what_is_rewarded():
    own = rig(lr=3e-3)
    samples = [
        msgspec.structs.replace(s, advantages_S=np.ones_like(s.advantages_S))
        for s in small.random_samples(307, [(10, (6, 6))])
    ]
    before = np.concatenate(own.trainer.logprobs(samples)).sum()
    for step in range(1, 4):
        own.trainer.forward_backward(small.batch(samples))
        assert own.trainer.step(step).grad_norm > 0
        assert not own.trainer.parameters.grads
    assert np.concatenate(own.trainer.logprobs(samples)).sum() > before + 1


def test_the_forward_runs_on_the_published_weights():
    """Masters differ from what was published by less than bf16 shows: log-probs are those of the rounded ones."""
    arch = small.architecture()
    tensors = small.random_tensors(arch)
    fine = small.make_rig(arch, tensors=tensors, published=torch.bfloat16, measured=False)
    rounded = {n: t.bfloat16().float() for n, t in tensors.items()}
    coarse = small.make_rig(arch, tensors=rounded, published=torch.float32, measured=False)
    samples = small.random_samples(307, [(9, (12,))])
    for a, b in zip(fine.trainer.logprobs(samples), coarse.trainer.logprobs(samples), strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(t.dtype == torch.bfloat16 for _, t in fine.trainer.export())


def test_publish_follows_the_masters():
    """After a step nobody published, log-probs are already the new ones; the engine's id tells the difference."""
    own = rig(lr=1e-2)
    samples = small.random_samples(307, [(9, (12,))])
    old = own.trainer.logprobs(samples)[0]
    own.trainer.forward_backward(small.batch(samples))
    own.trainer.step(1)
    assert own.weights.weights_id == "w0"
    new = own.trainer.logprobs(samples)[0]
    assert own.weights.weights_id not in ("w0", "w1", "")
    own.publish("w1")
    assert own.weights.weights_id == "w1"
    np.testing.assert_array_equal(own.trainer.logprobs(samples)[0], new)
    assert not np.array_equal(old, new)
    own.trainer.forward_backward(small.batch(samples))
    own.trainer.step(2)
    own.trainer.forward_backward(small.batch(samples))  # "unpublished" twice in a row is not the same weights
    second = own.trainer.logprobs(samples)[0]
    own.trainer.step(3)
    assert not np.array_equal(own.trainer.logprobs(samples)[0], second)


def test_the_reference_stays_where_training_began():
    class Anchored(small.LogProbs):
        needs_reference = True

    own = rig(algorithm=Anchored(), lr=1e-2)
    samples = small.random_samples(307, [(9, (12,))])
    start = own.trainer.logprobs(samples)[0]
    own.trainer.forward_backward(small.batch(samples))
    own.trainer.step(1)
    np.testing.assert_array_equal(own.trainer.reference_logprobs(samples)[0], start)
    assert not np.array_equal(own.trainer.logprobs(samples)[0], start)


def test_released_weights_come_back():
    """Freed before the last backward pass: the same gradients, served by nobody, rebuilt when next needed."""
    samples = odd_samples()
    kept = small.make_rig(small.architecture(), measured=False)
    freed = small.make_rig(small.architecture(), measured=False, release=True)
    for optim in ({"tokens_per_microbatch": 60}, {}):
        loss, wanted = small.gradients(kept.with_optim(**optim), samples)
        assert kept.weights.weights_id == "w0"
        engine = freed.engine()
        found_loss, found = small.gradients(freed.with_optim(**optim), samples)
        assert found_loss == loss
        assert small.relative_gap(found, wanted) == 0.0
        assert freed.weights.weights_id == ""
        with pytest.raises(EngineFault, match="not the committed ones"):
            engine.score(samples[0].prompt_P, samples[0].ids_S, 1.0)
        _, again = small.gradients(freed.trainer, samples)  # nothing was published: built anew
        assert small.relative_gap(again, small.gradients(kept.trainer, samples)[1]) == 0.0
        freed.publish("w0")
        np.testing.assert_array_equal(freed.trainer.logprobs(samples)[0], kept.trainer.logprobs(samples)[0])

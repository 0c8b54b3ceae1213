"""Adapters: peft's own numbers and gradients, and what is trained and what is not."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

import small_models as small
from croze.config import Lora, Optim
from croze.models.architecture import from_config
from croze.models.weights import LoraSpec
from croze.train.trainer import lora_spec
from peer_models import hugging_face

pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
TARGETS = [small.ALL_LINEARS, ("q_proj", "v_proj"), ("k_proj", "up_proj", "down_proj")]


def pair(name: str, targets: tuple[str, ...], rank: int = 4):
    """transformers' model under peft's adapter, and ours with the same tensors."""
    base = hugging_face(name)
    config = base.config.to_dict()
    tensors = {n: t.clone() for n, t in base.state_dict().items()}
    twin = type(base)(base.config).float().eval()
    twin.load_state_dict(base.state_dict())
    peer = get_peft_model(
        twin, LoraConfig(r=rank, lora_alpha=rank * 3 // 2, target_modules=list(targets), lora_dropout=0.0)
    ).eval()
    own = small.make_rig(
        from_config(config),
        tensors=tensors,
        published=torch.float32,
        lora=LoraSpec(rank=rank, scale=1.5, targets=targets),
        measured=False,
    )
    theirs = dict(peer.named_parameters())
    with torch.no_grad():
        for n, t in own.trainer.export():
            theirs[n.replace(".weight", ".default.weight")].copy_(t)
    return peer, own


@pytest.mark.parametrize("targets", TARGETS, ids=len)
@pytest.mark.parametrize("name", ["llama, grouped queries", "qwen2", "qwen3"])
def test_log_probs_and_gradients_equal_peft(name, targets):
    peer, own = pair(name, targets)
    samples = small.random_samples(97, [(7, (5, 9)), (33, (12,))])
    found_logprobs = own.trainer.logprobs(samples)
    loss, found = small.gradients(own.trainer, samples)
    wanted_loss = 0.0
    for s, logprobs in zip(samples, found_logprobs, strict=True):
        ids = torch.from_numpy(np.concatenate([s.prompt_P, s.ids_S]).astype(np.int64))[None]
        start = len(s.prompt_P)
        whole = torch.log_softmax(peer(ids).logits[0], -1)
        reference = whole[start - 1 : -1].gather(1, ids[0, start:, None])[:, 0]
        np.testing.assert_allclose(logprobs[s.mask_S], reference.detach().numpy()[s.mask_S], atol=1e-5)
        share = -(reference * torch.from_numpy(s.advantages_S * s.weights_S)).sum()
        share.backward()
        wanted_loss += share.item()
    assert loss == pytest.approx(wanted_loss, rel=1e-5)
    wanted = {
        n.replace(".default.weight", ".weight"): p.grad
        for n, p in peer.named_parameters()
        if p.grad is not None
    }
    assert small.relative_gap(found, wanted) < 1e-5


def test_an_adapter_at_birth_changes_nothing():
    arch = small.architecture()
    tensors = small.random_tensors(arch)
    spec = lora_spec(Lora(rank=8, alpha=16.0))
    assert spec is not None
    assert (spec.scale, spec.targets) == (2.0, small.ALL_LINEARS)
    assert lora_spec(Lora()) is None
    plain = small.make_rig(arch, tensors=tensors, measured=False)
    adapted = small.make_rig(arch, tensors=tensors, lora=spec, measured=False)
    for name, master in adapted.trainer.parameters.masters.items():
        if "lora_B" in name:
            master.zero_()
        else:
            bound = 1 / np.sqrt(master.shape[1])
            assert 0.5 * bound < master.abs().max() <= bound
    adapted.trainer.step(1)
    samples = small.random_samples(307, [(9, (12,))])
    np.testing.assert_array_equal(adapted.trainer.logprobs(samples)[0], plain.trainer.logprobs(samples)[0])


def test_only_the_adapter_is_trained_and_exported():
    spec = LoraSpec(rank=2, scale=1.0, targets=("q_proj", "gate_proj"))
    own = small.make_rig(small.architecture(), lora=spec, optim=Optim(lr=1e-2), measured=False)
    frozen = {n: t.clone() for n, t in own.trainer.frozen()}
    before = {n: t.clone() for n, t in own.trainer.export()}
    assert len(before) == 2 * 2 * 2
    assert all(".lora_" in n for n in before)
    samples = small.random_samples(307, [(9, (12, 3))])
    for step in (1, 2):
        own.trainer.forward_backward(small.batch(samples))
        own.trainer.step(step)
    assert all(torch.equal(t, frozen[n]) for n, t in own.trainer.frozen())
    assert all(not torch.equal(t, before[n]) for n, t in own.trainer.export())


def test_the_reference_of_an_adapter_is_its_base():
    class Anchored(small.LogProbs):
        needs_reference = True

    spec = LoraSpec(rank=2, scale=1.0, targets=("q_proj",))
    arch = small.architecture()
    own = small.make_rig(arch, lora=spec, algorithm=Anchored(), measured=False)
    plain = small.make_rig(arch, measured=False)
    samples = small.random_samples(307, [(9, (12,))])
    np.testing.assert_array_equal(
        own.trainer.reference_logprobs(samples)[0], plain.trainer.logprobs(samples)[0]
    )

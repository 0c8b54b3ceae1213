"""The same code on an accelerator, in both forms of attention: right in fp32, close in bf16, and it learns."""

import random
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch

import small_models as small
from croze.config import EngineOptions, Optim
from croze.inference.core import EngineCore
from croze.models import numerics
from croze.models.architecture import Architecture, from_config
from croze.models.weights import LoraSpec, ModelWeights
from croze.train.trainer import TorchTrainer
from croze.types import WeightsId
from peer_models import WINDOWED, hugging_face, teacher_forced

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FAMILIES = {
    "llama": {},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
    "qwen3": {"family": "qwen3", "qk_norm": True},
    "mistral, window": {"family": "mistral", "windows": (29, 29)},
}
FORMS = ("exact", "sdpa")
ADAPTER = LoraSpec(rank=8, scale=2.0, targets=small.ALL_LINEARS)


def gpu_rig(
    arch: Architecture,
    *,
    dtype: str,
    published: torch.dtype,
    tensors: dict[str, torch.Tensor] | None = None,
    lora: LoraSpec | None = None,
    lr: float = 1e-3,
    form: Literal["auto", "exact", "sdpa"] = "auto",
) -> small.Rig:
    recipe = numerics.choose(arch, dtype, "cuda", True, attention=form)
    assert recipe.device == "cuda"
    assert recipe.attention == ("sdpa" if form == "auto" else form) and not recipe.exact
    weights = ModelWeights(arch, recipe, lora)
    trainer = TorchTrainer(
        weights,
        (tensors or small.random_tensors(arch)).items(),
        small.LogProbs(),
        Optim(lr=lr, tokens_per_microbatch=400),
        steps=10,
        published=published,
    )
    rig = small.Rig(weights, trainer)
    rig.publish("w0")
    return rig


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "name", ["llama, rope scaled", "llama, untied", "qwen2", "qwen3, wide heads", *WINDOWED]
)
def test_scores_equal_transformers_in_fp32(name, form):
    model = hugging_face(name)
    arch = from_config(model.config.to_dict())
    tensors = dict(model.state_dict())
    rig = gpu_rig(arch, dtype="float32", published=torch.float32, tensors=tensors, form=form)
    ids = np.random.default_rng(0).integers(0, 97, 120).astype(np.int32)
    found = rig.engine().score(ids[:40], ids[40:], 1.0)
    np.testing.assert_allclose(found, teacher_forced(model, ids, 40), atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lora", [None, ADAPTER], ids=["full", "adapter"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_gap_between_sampler_and_trainer_is_measured_and_small(family, lora, form, record_property):
    arch = small.architecture(hidden=256, heads=4, head_dim=64, intermediate=512, **FAMILIES[family])
    tensors = small.random_tensors(arch, scale=0.05)
    rig = gpu_rig(arch, dtype="bfloat16", published=torch.bfloat16, tensors=tensors, lora=lora, form=form)
    rng = random.Random(0)
    requests = [
        small.request(f"r{i}", rng.choices(range(307), k=length), 4, max_tokens=24)
        for i, length in enumerate((41, 5, 130))
    ]
    records = small.drive(rig.engine(prefill_chunk=64), requests, [0, 2, 5])
    stats = rig.trainer.forward_backward(small.batch(small.to_samples(requests, records)))
    record_property("max_logprob_gap", stats.max_logprob_gap)
    assert stats.tokens_trained == 3 * 4 * 24
    assert stats.max_logprob_gap < 0.1


@pytest.mark.parametrize("lora", [None, ADAPTER], ids=["full", "adapter"])
def test_one_step_lowers_the_loss(lora):
    rig = gpu_rig(small.architecture(), dtype="bfloat16", published=torch.bfloat16, lora=lora, lr=3e-3)
    samples = [
        msgspec.structs.replace(s, advantages_S=np.ones_like(s.advantages_S))
        for s in small.random_samples(307, [(20, (16, 9)), (3, (12,))])
    ]
    losses = []
    for step in (1, 2, 3):
        losses.append(rig.trainer.forward_backward(small.batch(samples)).loss)
        assert not rig.trainer.step(step).skipped
        rig.publish(f"w{step}")
    assert losses[2] < losses[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_forms_give_the_same_tokens_in_fp32(family, form):
    """Decoding in blocks, chunks, earlier turns, more siblings than a block takes: as the CPU decodes them."""
    arch = small.architecture(**FAMILIES[family])
    rng = random.Random(1)
    ids = rng.choices(range(307), k=120)
    requests = [
        small.request("a", ids[:60], 3, suffixes=[ids[60:100], [], ids[:5]], max_tokens=12),
        small.request("many", ids[50:75], 40, max_tokens=7),
    ]
    plain = small.make_rig(arch, published=torch.float32, measured=False)
    wanted = small.drive(plain.engine(), requests)
    rig = gpu_rig(arch, dtype="float32", published=torch.float32, form=form)
    found = small.drive(rig.engine(prefill_chunk=50), requests, [0, 2])
    same = [found[k].ids == wanted[k].ids for k in wanted]
    assert sum(same) >= len(same) - 1  # a uniform may fall between two nearly equal sums
    for key in wanted:
        if found[key].ids == wanted[key].ids:
            np.testing.assert_allclose(found[key].logprobs, wanted[key].logprobs, atol=1e-3)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_of_the_cpu(family, form):
    arch = small.architecture(**FAMILIES[family])
    samples = small.random_samples(307, [(40, (16, 9)), (3, (12,))])
    _, wanted = small.gradients(
        small.make_rig(arch, published=torch.float32, measured=False).trainer, samples
    )
    rig = gpu_rig(arch, dtype="float32", published=torch.float32, form=form)
    loss, found = small.gradients(rig.trainer, samples)
    assert np.isfinite(loss)
    assert small.relative_gap({n: g.cpu() for n, g in found.items()}, wanted) < 1e-3


def test_an_engine_takes_weights_that_come_from_elsewhere():
    arch = small.architecture()
    trainer = gpu_rig(arch, dtype="bfloat16", published=torch.bfloat16)
    weights = ModelWeights(arch, trainer.weights.recipe)
    core = EngineCore(weights, EngineOptions())
    core.load(WeightsId("w0"), [(n, t.cpu()) for n, t in trainer.trainer.export()])
    requests = [small.request("x", range(30), 2, max_tokens=6)]
    assert small.drive(core, requests) == small.drive(trainer.engine(), requests)

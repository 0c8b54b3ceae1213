"""Canonical tensors in fused buffers and in a model's weights: nothing missing, unknown or misshapen gets in."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import small_models as small
from croze.config import EngineOptions
from croze.errors import ModelError
from croze.inference.core import EngineCore
from croze.models.layout import Layout, read_tensors
from croze.models.numerics import Recipe
from croze.models.weights import LoraSpec, ModelWeights
from croze.types import WeightsId

ARCHS = {
    "llama": small.architecture(),
    "untied": small.architecture(tied=False),
    "qwen2": small.architecture(family="qwen2", qkv_bias=True),
    "qwen3": small.architecture(family="qwen3", qk_norm=True, head_dim=24),
}
RECIPE = small.make_rig(ARCHS["llama"], measured=False).weights.recipe


@pytest.mark.parametrize("name", ARCHS)
def test_fused_buffers_hold_every_tensor_once(name):
    arch = ARCHS[name]
    layout, tensors = Layout(arch), small.random_tensors(arch)
    fused = layout.fill(reversed(tensors.items()), layout.empty(torch.float32))
    assert dict(layout.canonical(fused)).keys() == tensors.keys()
    assert all(torch.equal(t, tensors[n]) for n, t in layout.canonical(fused))
    assert (
        sum(t.numel() for t in fused.values()) == sum(t.numel() for t in tensors.values()) == arch.parameters
    )


def fill(arch, tensors):
    layout = Layout(arch)
    return layout.fill(tensors.items(), layout.empty(torch.float32))


def update(arch, tensors):
    return ModelWeights(arch, RECIPE).update(WeightsId("x"), tensors.items())


@pytest.mark.parametrize("take", [fill, update])
@pytest.mark.parametrize("name", ARCHS)
def test_wrong_tensors_are_named(name, take):
    arch = ARCHS[name]
    tensors = small.random_tensors(arch)
    victim = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(ModelError, match=victim):
        take(arch, {n: t for n, t in tensors.items() if n != victim})
    with pytest.raises(ModelError, match=victim):
        take(arch, {**tensors, victim: tensors[victim].t().contiguous()})
    with pytest.raises(ModelError, match=r"layers\.2"):
        take(arch, {**tensors, "model.layers.2.mlp.up_proj.weight": torch.zeros(96, 64)})
    with pytest.raises(ModelError, match="lora_A"):
        take(
            arch, {**tensors, "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(4, 64)}
        )


def test_a_failed_update_leaves_no_id():
    weights = small.make_rig(ARCHS["llama"], measured=False).weights
    assert weights.weights_id == "w0"
    with pytest.raises(ModelError):
        weights.update(WeightsId("w1"), [])
    assert weights.weights_id == ""


@pytest.mark.parametrize("name", ARCHS)
def test_tensors_may_come_in_any_order(name):
    arch, ids = ARCHS[name], [3, 1, 4, 1, 5]
    tensors = small.random_tensors(arch)
    reference = small.make_rig(arch, tensors=tensors, published=torch.float32, measured=False).engine()
    for order in (sorted(tensors), sorted(tensors, reverse=True)):
        weights = ModelWeights(arch, RECIPE)
        weights.update(WeightsId("w0"), [(n, tensors[n]) for n in order])
        core = EngineCore(weights, EngineOptions())
        core.load(WeightsId("w0"), None)
        prompt, suffix = np.array(ids, "int32"), np.arange(9, dtype="int32")
        assert (core.score(prompt, suffix, 1.0) == reference.score(prompt, suffix, 1.0)).all()


@pytest.mark.parametrize("packed", [True, False])
def test_weights_are_copies(packed):
    """A trainer that goes on must not change what an engine serves."""
    arch = ARCHS["qwen2"]
    tensors = small.random_tensors(arch)
    weights = ModelWeights(arch, Recipe(packed=packed and RECIPE.packed))
    weights.update(WeightsId("w0"), tensors.items())
    core = EngineCore(weights, EngineOptions())
    core.load(WeightsId("w0"), None)
    prompt, suffix = np.array([1, 2], "int32"), np.arange(9, dtype="int32")
    before = core.score(prompt, suffix, 1.0)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    assert (core.score(prompt, suffix, 1.0) == before).all()


def test_exported_tensors_are_copies():
    for lora in (None, LoraSpec(rank=2, scale=1.0, targets=("q_proj", "down_proj"))):
        rig = small.make_rig(ARCHS["llama"], published=torch.float32, lora=lora, measured=False)
        for _, tensor in rig.trainer.export():
            tensor.fill_(float("nan"))
        assert all(m.isfinite().all() for m in rig.trainer.parameters.masters.values())


def test_an_adapter_must_come_whole_and_may_come_alone():
    arch, lora = ARCHS["qwen2"], LoraSpec(rank=2, scale=1.0, targets=("q_proj", "up_proj"))
    rig = small.make_rig(arch, lora=lora, measured=False)
    prompt, suffix = np.array([1, 2], "int32"), np.arange(9, dtype="int32")
    before = rig.engine().score(prompt, suffix, 1.0)
    adapter, base = dict(rig.trainer.export()), dict(rig.trainer.frozen())
    rig.weights.update(WeightsId("w1"), adapter.items())
    assert (rig.engine().score(prompt, suffix, 1.0) == before).all()
    layer = {n: t for n, t in base.items() if ".layers.1.self_attn" in n and n.endswith("weight")}
    rig.weights.update(WeightsId("w2"), (adapter | layer).items())
    assert (rig.engine().score(prompt, suffix, 1.0) == before).all()
    victim = min(adapter)
    with pytest.raises(ModelError, match=victim):
        rig.weights.update(WeightsId("w3"), [(n, t) for n, t in adapter.items() if n != victim])
    with pytest.raises(ModelError, match="missing"):
        rig.weights.update(WeightsId("w3"), adapter.items())  # after a failure, everything is wanted


def test_a_head_that_belies_its_tie(tmp_path):
    arch = ARCHS["llama"]
    tensors = small.random_tensors(arch)
    twin = tensors["model.embed_tokens.weight"]
    fill(arch, {**tensors, "lm_head.weight": twin.clone()})
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        fill(arch, {**tensors, "lm_head.weight": twin + 1})
    with pytest.raises(ModelError, match="int8"):
        fill(arch, {**tensors, "model.norm.weight": torch.zeros(64, dtype=torch.int8)})


def test_directories_of_weights(tmp_path):
    tensors = small.random_tensors(ARCHS["llama"])
    names = sorted(tensors)
    with pytest.raises(ModelError, match=r"safetensors"):
        list(read_tensors(tmp_path))
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({n: tensors[n] for n in part}, tmp_path / file)
    assert {n for n, _ in read_tensors(tmp_path)} == set(names)
    index = {"weight_map": {n: file for file, part in halves.items() for n in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"optimizer.state": torch.zeros(2)}, tmp_path / "other.safetensors")
    assert {n: t.sum() for n, t in read_tensors(tmp_path)} == {n: t.sum() for n, t in tensors.items()}
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        list(read_tensors(tmp_path))
    (tmp_path / "b.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:100])
    with pytest.raises(ModelError, match=r"b\.safetensors"):
        list(read_tensors(tmp_path))

"""The forward pass against transformers' own, in fp32, for every family and for odd shapes."""

import numpy as np
import pytest
import torch

import small_models as small
from croze.config import EngineOptions
from croze.inference.core import EngineCore
from croze.models.architecture import from_config, read_architecture
from croze.models.layout import read_tensors
from croze.models.numerics import Recipe
from croze.models.weights import ModelWeights
from croze.types import WeightsId
from peer_models import CASES, WINDOWED, hugging_face, teacher_forced


def serve(arch, tensors) -> EngineCore:
    weights = ModelWeights(arch, Recipe())
    weights.update(WeightsId("w0"), tensors)
    core = EngineCore(weights, EngineOptions())
    core.load(WeightsId("w0"), None)
    return core


@pytest.mark.parametrize("name", CASES)
def test_scores_equal_transformers(name):
    model = hugging_face(name)
    core = serve(from_config(model.config.to_dict()), model.state_dict().items())
    rng = np.random.default_rng(0)
    for prompt, suffix, temperature in ((1, 1, 1.0), (1, 40, 1.0), (33, 70, 0.7), (200, 56, 1.0)):
        ids = rng.integers(0, model.config.vocab_size, prompt + suffix).astype(np.int32)
        found = core.score(ids[:prompt], ids[prompt:], temperature)
        np.testing.assert_allclose(found, teacher_forced(model, ids, prompt, temperature), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama, rope scaled", "qwen2", "qwen3, wide heads", *WINDOWED])
def test_greedy_decoding_equals_transformers(name):
    """Through the KV cache, in chunks, with a neighbour: the likeliest token of transformers each time."""
    model = hugging_face(name)
    core = serve(from_config(model.config.to_dict()), model.state_dict().items())
    core.scheduler.options = EngineOptions(prefill_chunk=5)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 97, n).astype(np.int32) for n in (58, 3)]
    requests = [
        small.request(str(i), p, temperature=0.0, max_tokens=20, suffixes=[[7, 8]] if i else [])
        for i, p in enumerate(prompts)
    ]
    records = small.drive(core, requests)
    for i, r in enumerate(requests):
        given = np.concatenate([r.prompt_P, *r.suffixes])
        ids = np.r_[given, records[str(i), 0].ids]
        with torch.no_grad():
            likeliest = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].argmax(-1)
        assert likeliest[len(given) - 1 : -1].tolist() == records[str(i), 0].ids
        np.testing.assert_allclose(
            records[str(i), 0].logprobs, teacher_forced(model, ids, len(given)), atol=1e-5
        )


@pytest.mark.parametrize("name", ["llama, grouped queries", "llama, untied", "qwen2", "qwen3", *WINDOWED])
@pytest.mark.parametrize("shard", ["50GB", "40KB"])
def test_a_saved_directory_loads(name, shard, tmp_path):
    model = hugging_face(name)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) > (shard == "40KB")
    core = serve(read_architecture(tmp_path), read_tensors(tmp_path))
    ids = np.random.default_rng(2).integers(0, 97, 60).astype(np.int32)
    np.testing.assert_allclose(core.score(ids[:20], ids[20:], 1.0), teacher_forced(model, ids, 20), atol=1e-5)

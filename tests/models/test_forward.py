"""The forward pass against transformers' own, in fp32, for every family and for odd shapes."""

import functools

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

import small_models as small
from croze.models.architecture import from_config, read_architecture
from croze.models.layout import read_tensors
from croze.models.weights import ModelWeights
from croze.types import WeightsId

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CASES = {
    "llama, grouped queries": (LlamaConfig, {}),
    "llama, multi-head": (LlamaConfig, {"num_key_value_heads": 4}),
    "llama, one key head": (LlamaConfig, {"num_key_value_heads": 1}),
    "llama, untied": (LlamaConfig, {"tie_word_embeddings": False}),
    "llama, rope scaled": (LlamaConfig, {"rope_parameters": LLAMA3}),
    "llama, other base": (LlamaConfig, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "llama, head_dim apart": (LlamaConfig, {"head_dim": 6, "num_key_value_heads": 4, "hidden_size": 40}),
    "llama, odd sizes": (
        LlamaConfig,
        {"vocab_size": 301, "intermediate_size": 51, "hidden_size": 44, "head_dim": 10},
    ),
    "qwen2": (Qwen2Config, {}),
    "qwen2, untied": (Qwen2Config, {"tie_word_embeddings": False, "num_key_value_heads": 4}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3, wide heads": (Qwen3Config, {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen3, one key head": (Qwen3Config, {"head_dim": 8, "num_key_value_heads": 1}),
}


@functools.cache
def hugging_face(name: str):
    """transformers' model of a case, norms and biases random too."""
    kind, changes = CASES[name]
    torch.manual_seed(len(name))
    config = kind(
        **{
            "vocab_size": 97,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.1,
            "tie_word_embeddings": True,
            **changes,
        }
    )
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
        elif "bias" in parameter_name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    return model


def reference(model, ids: np.ndarray, start: int, temperature: float = 1.0) -> np.ndarray:
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double()
    logprobs = torch.log_softmax(logits / temperature, -1)
    return (
        logprobs[start - 1 : -1]
        .gather(1, torch.from_numpy(ids[start:].astype(np.int64))[:, None])[:, 0]
        .numpy()
    )


def serve(arch, tensors) -> small.EngineCore:
    weights = ModelWeights(arch, small.Recipe())
    weights.update(WeightsId("w0"), tensors)
    core = small.EngineCore(weights, small.EngineOptions())
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
        np.testing.assert_allclose(found, reference(model, ids, prompt, temperature), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama, rope scaled", "qwen2", "qwen3, wide heads"])
def test_greedy_decoding_equals_transformers(name):
    """Through the KV cache, in chunks, with a neighbour: the likeliest token of transformers each time."""
    model = hugging_face(name)
    core = serve(from_config(model.config.to_dict()), model.state_dict().items())
    core.scheduler.options = small.EngineOptions(prefill_chunk=5)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, 97, n).astype(np.int32) for n in (38, 3)]
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
        np.testing.assert_allclose(records[str(i), 0].logprobs, reference(model, ids, len(given)), atol=1e-5)


@pytest.mark.parametrize("name", ["llama, grouped queries", "llama, untied", "qwen2", "qwen3"])
@pytest.mark.parametrize("shard", ["50GB", "40KB"])
def test_a_saved_directory_loads(name, shard, tmp_path):
    model = hugging_face(name)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) > (shard == "40KB")
    core = serve(read_architecture(tmp_path), read_tensors(tmp_path))
    ids = np.random.default_rng(2).integers(0, 97, 60).astype(np.int32)
    np.testing.assert_allclose(core.score(ids[:20], ids[20:], 1.0), reference(model, ids, 20), atol=1e-5)

"""config.json -> Architecture: what is known is read, what would change the forward pass is refused."""

import json

import pytest

from croze.errors import ModelError, ModelUnsupported
from croze.models.architecture import from_config, read_architecture

LLAMA = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_what_is_left_out_means_what_the_families_say():
    sparse = {k: v for k, v in LLAMA.items() if not k.startswith(("max_", "rms", "tie", "num_key"))}
    arch = from_config(sparse)
    assert (arch.kv_heads, arch.head_dim, arch.context, arch.tied) == (4, 16, 2048, False)
    assert from_config({**sparse, "model_type": "qwen2"}).context == 32768
    assert from_config({**sparse, "model_type": "qwen3"}).head_dim == 128
    assert from_config({**LLAMA, "head_dim": 32}).head_dim == 32
    assert (from_config({**LLAMA, "model_type": "qwen2"}).qkv_bias, arch.qkv_bias) == (True, False)
    assert (from_config({**LLAMA, "model_type": "qwen3"}).qk_norm, arch.qk_norm) == (True, False)


def test_rope_of_old_and_new_files_is_the_same():
    old = from_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3"}})
    new = from_config({**LLAMA, "rope_parameters": {**LLAMA3, "rope_theta": 5e5}})
    assert old.rope == new.rope
    assert (new.rope.theta, new.rope.factor, new.rope.original_context) == (5e5, 8.0, 64)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"model_type": "qwen2_moe"},
        {"hidden_act": "gelu"},
        {"mlp_bias": True},
        {"attention_bias": True},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 128},
        {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
    ],
)
def test_unknown_ways_of_computing_are_refused(change):
    with pytest.raises(ModelUnsupported):
        from_config({**LLAMA, **change})


def test_a_window_that_never_closes_is_no_window():
    config = {**LLAMA, "model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False}
    assert from_config(config).context == 512
    assert from_config({**config, "use_sliding_window": True, "sliding_window": 512}).context == 512
    assert from_config({**config, "use_sliding_window": True, "sliding_window": None}).context == 512


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "no number"),
        ({"vocab_size": "many"}, "no number"),
        ({"num_attention_heads": 0}, "no number"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 15}, "even"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
    ],
)
def test_senseless_fields_are_named(change, words):
    with pytest.raises(ModelError, match=words):
        from_config({**LLAMA, **change})


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size"])
def test_a_missing_field_is_named(field):
    with pytest.raises(ModelError, match=field):
        from_config({k: v for k, v in LLAMA.items() if k != field})


def test_files_that_are_no_configuration(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not JSON"):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError):
        read_architecture(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_architecture(tmp_path) == from_config(LLAMA)

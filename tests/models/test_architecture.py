"""config.json -> Architecture: what is known is read, what would change the forward pass is refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import MistralConfig, Qwen2Config, Qwen3Config

from croze.errors import ModelError, ModelUnsupported
from croze.models.architecture import from_config, read_architecture

SLIDES, SEES = "sliding_attention", "full_attention"
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
        {"model_type": "mixtral"},
        {"model_type": "qwen3_next"},
        {"model_type": "mistral", "attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 128},
        {"sliding_window": 128, "layer_types": [SEES, SLIDES]},
        {"model_type": "mistral", "layer_types": [SEES, SLIDES]},
        {"model_type": "qwen3", "layer_types": [SEES, "linear_attention"]},
        {"model_type": "qwen3", "layer_types": [SEES]},
    ],
)
def test_unknown_ways_of_computing_are_refused(change):
    with pytest.raises(ModelUnsupported):
        from_config({**LLAMA, **change})


def test_each_layer_has_the_window_that_transformers_gives_it():
    qwen = {**LLAMA, "model_type": "qwen2", "num_hidden_layers": 3, "use_sliding_window": True}
    for family in ("qwen2", "qwen3"):
        config = {**qwen, "model_type": family, "sliding_window": 100}
        assert from_config({**config, "max_window_layers": 1}).windows == (0, 100, 100)
        assert from_config({**config, "max_window_layers": 0}).windows == (100, 100, 100)
        assert (
            from_config(config).windows == ()
        )  # the first 28 layers see everything unless it says otherwise
        told = from_config({**config, "max_window_layers": 0, "layer_types": [SLIDES, SEES, SLIDES]})
        assert told.windows == (100, 0, 100)
        assert [told.window(i) for i in range(3)] == [100, 0, 100]
        assert told.distinct_windows == {0, 100}
    assert (
        from_config({**qwen, "max_window_layers": 0, "max_position_embeddings": 9000}).windows == (4096,) * 3
    )
    mistral = {**LLAMA, "model_type": "mistral"}
    assert from_config({**mistral, "sliding_window": 100}).windows == (100, 100)
    assert from_config({**mistral, "sliding_window": None}).windows == ()
    assert from_config({**mistral, "max_position_embeddings": 9000}).windows == (4096, 4096)
    del mistral["num_key_value_heads"], mistral["max_position_embeddings"]
    sparse = from_config({**mistral, "num_attention_heads": 16})
    assert (sparse.kv_heads, sparse.context) == (8, 131072)
    # transformers' Llama reads neither of these
    assert from_config({**LLAMA, "sliding_window": 100}).distinct_windows == {0}
    assert from_config({**LLAMA, "layer_types": [SEES, SEES]}).window(1) == 0


@given(
    family=st.sampled_from(["mistral", "qwen2", "qwen3"]),
    window=st.none() | st.integers(1, 40),
    use=st.booleans(),
    first=st.integers(0, 5),
    types=st.none() | st.lists(st.sampled_from([SEES, SLIDES]), min_size=3, max_size=3),
)
def test_windows_are_those_of_transformers_own_reading(family, window, use, first, types):
    own = {"sliding_window": window, "num_hidden_layers": 3, "max_position_embeddings": 32}
    if family == "mistral":
        theirs = MistralConfig(**own)
        wanted = [theirs.sliding_window] * 3
    else:
        own |= {"use_sliding_window": use, "max_window_layers": first}
        own |= {} if types is None else {"layer_types": types}
        theirs = {"qwen2": Qwen2Config, "qwen3": Qwen3Config}[family](**own)
        wanted = [theirs.sliding_window if t == SLIDES else None for t in theirs.layer_types]
        if theirs.sliding_window is None and SLIDES in theirs.layer_types:  # its forward pass raises
            with pytest.raises(ModelError, match="no sliding_window"):
                from_config({**LLAMA, "model_type": family, **own})
            return
    closes = [w if w is not None and w < 32 else 0 for w in wanted]
    for config in ({**LLAMA, "model_type": family, **own}, {**LLAMA, **theirs.to_dict()}):
        found = from_config({**config, "num_attention_heads": 4, "num_key_value_heads": 2})
        assert [found.window(i) for i in range(3)] == closes


def test_a_window_that_never_closes_is_no_window():
    config = {
        **LLAMA,
        "model_type": "qwen2",
        "sliding_window": 128,
        "use_sliding_window": False,
        "max_window_layers": 0,
    }
    assert from_config(config).windows == ()
    assert from_config({**config, "use_sliding_window": True, "sliding_window": 512}).windows == ()
    assert from_config({**config, "use_sliding_window": True, "sliding_window": 511}).windows == (511, 511)
    assert from_config({**config, "use_sliding_window": True, "sliding_window": None}).windows == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "no number"),
        ({"vocab_size": "many"}, "no number"),
        ({"num_attention_heads": 0}, "no number"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"head_dim": 15}, "even"),
        ({"model_type": "mistral", "sliding_window": 0}, "no sliding_window"),
        ({"model_type": "mistral", "sliding_window": "wide"}, "no number"),
        ({"model_type": "qwen2", "layer_types": [SLIDES, SEES]}, "no sliding_window"),
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

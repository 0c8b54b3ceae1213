import json
import random
from pathlib import Path

import gguf as gguf_package
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_gguf import HEADS, KV_HEADS, LAYERS, original_weights, to_gguf_layout, write_gguf
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from croze.errors import CrozeError, ModelError, ModelUnsupported
from croze.models.gguf import convert
from croze.models.source import verify


def converted(source: Path, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    out.mkdir()
    convert(source, out)
    verify(out)
    return out


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_unquantised_weights_come_back_bit_for_bit(tmp_path, family: str, tied: bool):
    weights = original_weights(family, tied=tied)
    out = converted(write_gguf(tmp_path / "m.gguf", family, weights), tmp_path)
    found = load_file(out / "model.safetensors")
    assert set(found) == set(weights)
    for name, values in weights.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_config_says_what_the_original_said(tmp_path, family: str):
    source = write_gguf(tmp_path / "m.gguf", family, original_weights(family, tied=False))
    config = json.loads((converted(source, tmp_path) / "config.json").read_text())
    assert config["model_type"] == family
    assert config["architectures"] == [
        {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family] + "ForCausalLM"
    ]
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (HEADS, KV_HEADS)
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 1e6, "not the nearest float32's digits"
    assert config["tie_word_embeddings"] is False and config["eos_token_id"] == 2


def test_llama_heads_rotate_as_before():
    """llama.cpp pairs neighbours where Hugging Face pairs halves: rows 2i, 2i+1 are i, i + dim/2."""
    weights = original_weights("llama", tied=True)
    name = "model.layers.0.self_attn.q_proj.weight"
    stored = to_gguf_layout("llama", name, weights[name])
    dim = stored.shape[0] // HEADS
    for head in range(HEADS):
        for i in range(dim // 2):
            np.testing.assert_array_equal(stored[head * dim + 2 * i], weights[name][head * dim + i])
            np.testing.assert_array_equal(
                stored[head * dim + 2 * i + 1], weights[name][head * dim + i + dim // 2]
            )


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q5_0"])
def test_quantised_weights_become_what_they_stand_for(tmp_path, kind: str):
    weights = original_weights("qwen3", tied=True)
    quantisation = GGMLQuantizationType[kind]
    out = converted(write_gguf(tmp_path / "m.gguf", "qwen3", weights, quantisation), tmp_path)
    found = load_file(out / "model.safetensors")
    for name, values in weights.items():
        if values.ndim == 2:
            stored = gguf_package.quantize(values, quantisation)
            np.testing.assert_array_equal(found[name], gguf_package.dequantize(stored, quantisation))
        else:
            np.testing.assert_array_equal(found[name], values)


def test_tokenizer_and_template_survive(tmp_path):
    template = "{%- for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\r\n{% endfor %}\n\n"
    out = converted(write_gguf(tmp_path / "m.gguf", template=template), tmp_path)
    assert (out / "chat_template.jinja").read_bytes() == template.encode()
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.encode("<|im_start|>a<|im_end|>").tokens == ["<|im_start|>", "a", "<|im_end|>"]
    assert tokenizer.decode([1, *tokenizer.encode("héllo 漢").ids, 2]) == "héllo 漢"
    config = json.loads((out / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("pre", "text", "tokens"),
    [
        ("smollm", "x  42", ["x", "ĠĠ", "4", "2"]),
        ("gpt-2", "x  42", ["x", "Ġ", "Ġ", "42"]),
        ("qwen2", "x  42", ["x", "Ġ", "Ġ", "4", "2"]),
        ("llama-bpe", "x  42", ["x", "Ġ", "Ġ", "42"]),
    ],
)
def test_text_is_cut_as_the_original_cuts_it(tmp_path, pre: str, text: str, tokens: list[str]):
    out = converted(write_gguf(tmp_path / "m.gguf", pre=pre, merges=["Ġ Ġ", "4 2"]), tmp_path)
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode(text).tokens == tokens


def test_bos_is_put_first_only_where_the_model_wants_it(tmp_path):
    out = converted(write_gguf(tmp_path / "m.gguf", extra={"tokenizer.ggml.add_bos_token": True}), tmp_path)
    assert Tokenizer.from_file(str(out / "tokenizer.json")).encode("a").tokens == ["<|im_start|>", "a"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma3"}, "architecture 'gemma3' is not one of"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type"),
        ({"extra": {"llama.expert_count": 8}}, "expert_count"),
        ({"extra": {"llama.rope.dimension_count": 8}}, "rotate a part"),
        ({"extra": {"tokenizer.ggml.model": "llama"}}, "tokenizers of kind 'llama'"),
        ({"pre": "tekken"}, "cut text as 'tekken'"),
        (
            {"add": {"rope_freqs.weight": np.ones(8, np.float32)}},
            "'rope_freqs.weight' has no known counterpart",
        ),
        ({"add": {"blk.0.ssm_a.weight": np.ones(8, np.float32)}}, "no known counterpart"),
    ],
)
def test_what_would_be_converted_wrongly_is_refused(tmp_path, change: dict, message: str):
    with pytest.raises(ModelUnsupported, match=message) as error:
        converted(write_gguf(tmp_path / "m.gguf", **change), tmp_path)
    assert error.value.fix and "m.gguf" in str(error.value.where)


def test_a_missing_tensor_is_named(tmp_path):
    weights = original_weights("llama", tied=True)
    del weights[f"model.layers.{LAYERS - 1}.mlp.up_proj.weight"]
    with pytest.raises(ModelError, match=r"lacks 1 tensors, among them model\.layers\.1\.mlp\.up_proj"):
        converted(write_gguf(tmp_path / "m.gguf", weights=weights), tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> bytes:
    return write_gguf(tmp_path_factory.mktemp("made") / "m.gguf").read_bytes()


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_a_cut_file_is_a_model_error(tmp_path_factory, made: bytes, data):
    path = tmp_path_factory.mktemp("cut")
    (path / "m.gguf").write_bytes(made[: data.draw(st.integers(0, len(made) - 1))])
    with pytest.raises(ModelError):
        convert(path / "m.gguf", path)


def test_a_damaged_file_is_converted_or_refused(tmp_path, made: bytes):
    rng = random.Random(7)
    for _ in range(60):
        damaged = bytearray(made)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randint(0, 8000)] = rng.randint(0, 255)
        (tmp_path / "m.gguf").write_bytes(damaged)
        try:
            convert(tmp_path / "m.gguf", tmp_path)
        except CrozeError as error:
            assert error.fix


def test_not_a_gguf_at_all(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="not a whole GGUF"):
        convert(tmp_path / "m.gguf", tmp_path)

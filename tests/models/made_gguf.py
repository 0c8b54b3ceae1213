"""Small GGUF files for tests, written with the gguf package as llama.cpp's converter lays them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from tokenizers import pre_tokenizers

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, LAYERS = 64, 4, 2, 16, 96, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def original_weights(family: str, *, tied: bool, vocab: int = 260, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights under Hugging Face names."""
    rng = np.random.default_rng(seed)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (vocab, HIDDEN)
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
            "self_attn.q_proj.weight": (q, HIDDEN),
            "self_attn.k_proj.weight": (kv, HIDDEN),
            "self_attn.v_proj.weight": (kv, HIDDEN),
            "self_attn.o_proj.weight": (HIDDEN, q),
            "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
        if family == "qwen2":
            parts |= {f"self_attn.{p}_proj.bias": (q if p == "q" else kv,) for p in "qkv"}
        if family == "qwen3":
            parts |= {f"self_attn.{p}_norm.weight": (HEAD_DIM,) for p in "qk"}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def to_gguf_layout(family: str, name: str, values: np.ndarray) -> np.ndarray:
    """What llama.cpp stores for a weight: of a Llama's q and k heads, the two rotated halves interleaved."""
    if family != "llama" or not ("q_proj" in name or "k_proj" in name):
        return values
    heads = HEADS if "q_proj" in name else KV_HEADS
    halves = values.reshape(heads, 2, HEAD_DIM // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if stem in top:
        return f"{top[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def write_gguf(
    path: Path,
    family: str = "llama",
    weights: dict[str, np.ndarray] | None = None,
    quantisation: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    architecture: str | None = None,
    pre: str = "smollm",
    merges: list[str] | None = None,
    template: str = TEMPLATE,
    extra: dict[str, Any] | None = None,
    add: dict[str, np.ndarray] | None = None,
) -> Path:
    """A GGUF of ``weights`` (2-D ones quantised) with a tokenizer of 3 special tokens, 256 bytes, merges."""
    merges = merges or ["Ġ t"]
    tokens = [*SPECIALS, *ALPHABET, *(m.replace(" ", "") for m in merges)]
    weights = weights if weights is not None else original_weights(family, tied=True, vocab=len(tokens))
    family = architecture or family
    values: dict[str, Any] = {
        f"{family}.block_count": LAYERS,
        f"{family}.context_length": 256,
        f"{family}.embedding_length": HIDDEN,
        f"{family}.feed_forward_length": INTERMEDIATE,
        f"{family}.attention.head_count": HEADS,
        f"{family}.attention.head_count_kv": KV_HEADS,
        f"{family}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{family}.rope.freq_base": 1e6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": template,
        **(extra or {}),
    }
    writer = GGUFWriter(path, family)
    for key, value in values.items():
        _add(writer, key, value)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(tokens) - len(SPECIALS)))
    writer.add_token_merges(merges)
    for name, tensor in weights.items():
        stored = to_gguf_layout(family, name, tensor)
        if stored.ndim == 2 and quantisation != GGMLQuantizationType.F32:
            writer.add_tensor(gguf_name(name), quantize(stored, quantisation), raw_dtype=quantisation)
        else:
            writer.add_tensor(gguf_name(name), stored)
    for name, tensor in (add or {}).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    adders = {
        bool: writer.add_bool,
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
    }
    adders[type(value)](key, value)

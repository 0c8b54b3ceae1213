"""GGUF to the Hugging Face layout: config.json, model.safetensors (float32), tokenizer.json.

Read with the ``gguf`` package and written here, rather than through transformers: that path needs
accelerate, drops tensors it does not know, marks the result quantised so that it cannot be saved, and cuts
text differently from the original tokenizer (it ignores ``tokenizer.ggml.pre``). What this file does not
know is an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from croze.errors import ModelError, ModelUnsupported

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

FORMAT = 1
"""Raised whenever the same GGUF would be converted into other files."""

_USE_SAFETENSORS = "use the model's hub id or a directory with safetensors instead"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QWEN3_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_NAME = re.compile(r"(\w+)\.(weight)")
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type

_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT = _QWEN_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def convert(path: Path, directory: Path) -> None:
    """Write the model in the GGUF file ``path`` into ``directory``, weights as the float32 they stand for.

    Raises ModelError for a damaged file, ModelUnsupported for an unknown architecture, tensor or tokenizer.
    """
    from gguf import GGUFReader

    try:
        _convert(_Source(path, GGUFReader(path)), directory)
    except (ValueError, TypeError, LookupError, ArithmeticError, MemoryError) as error:
        raise ModelError(
            f"not a whole GGUF file: {error!r:.300}", where=str(path), fix="download it again"
        ) from error


def _convert(source: _Source, directory: Path) -> None:
    config = _config(source)
    tokens = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", tokens)
    _write_tokenizer(source, directory)
    _write_weights(source, config, directory / "model.safetensors")


class _Source:
    """A GGUF's metadata by key, with errors that name file and key."""

    def __init__(self, path: Path, reader: GGUFReader) -> None:
        self.path = path
        self.reader = reader
        self.architecture = str(self.want("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        field = self.reader.fields.get(key)
        return default if field is None else field.contents()

    def want(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ModelError(f"the GGUF has no {key}", where=str(self.path), fix=_USE_SAFETENSORS)
        return value

    def of_model(self, key: str, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", default)

    def want_of_model(self, key: str) -> Any:
        return self.want(f"{self.architecture}.{key}")

    def incomplete(self, message: str) -> ModelError:
        fix = "it may be one part of a split GGUF: merge the parts first (llama-gguf-split --merge)"
        return ModelError(message, where=str(self.path), fix=fix)

    def unsupported(self, message: str) -> ModelUnsupported:
        return ModelUnsupported(message, where=str(self.path), fix=_USE_SAFETENSORS)


def _config(source: _Source) -> dict[str, Any]:
    if source.architecture not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise source.unsupported(f"GGUF architecture {source.architecture!r} is not one of {known}")
    for key in ("rope.scaling.type", "rope.scaling.factor", "expert_count", "attention.sliding_window"):
        if source.of_model(key) not in (None, 0, "none"):
            raise source.unsupported(f"GGUF models with {source.architecture}.{key} are not converted")
    heads, hidden = source.want_of_model("attention.head_count"), source.want_of_model("embedding_length")
    head_dim = source.of_model("attention.key_length", hidden // heads)
    if source.of_model("rope.dimension_count", head_dim) != head_dim:
        raise source.unsupported("GGUF models that rotate a part of each head are not converted")
    names, layers = {t.name for t in source.reader.tensors}, source.want_of_model("block_count")
    if layers > len(names):
        raise source.incomplete(f"{layers} layers, but only {len(names)} tensors")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[source.architecture]],
        "model_type": source.architecture,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": source.want_of_model("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": source.of_model("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": source.want_of_model("context_length"),
        "rms_norm_eps": _as_written(source.want_of_model("attention.layer_norm_rms_epsilon")),
        "rope_theta": _as_written(source.of_model("rope.freq_base", 10000.0)),
        "vocab_size": len(source.want("tokenizer.ggml.tokens")),
        "tie_word_embeddings": "output.weight" not in names,
        "dtype": "float32",
    }
    if source.architecture != "qwen2":  # whose q, k and v always have a bias, which its config does not say
        config["attention_bias"] = "blk.0.attn_q.bias" in names
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = source.get(f"tokenizer.ggml.{theirs}_token_id")
        if token is not None:
            config[f"{ours}_token_id"] = token
    return config


def _as_written(value: float) -> float:
    """The shortest decimal that gives this float32: 1e-05 rather than 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_weights(source: _Source, config: dict[str, Any], path: Path) -> None:
    """Safetensors, one tensor in memory at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, tensors = 0, {_hf_name(source, t.name): t for t in source.reader.tensors}
    _complete(source, config, set(tensors))
    for name, tensor in tensors.items():
        start, end = end, end + 4 * int(tensor.n_elements)
        shape = [int(n) for n in reversed(tensor.shape)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            values = _dequantised(source, config, name, tensor)
            if list(values.shape) != header[name]["shape"]:
                raise ModelError(f"tensor {name} has shape {values.shape}", where=str(source.path))
            file.write(values.data)


def _dequantised(source: _Source, config: dict[str, Any], name: str, tensor: ReaderTensor) -> np.ndarray:
    """float32, C order. llama.cpp interleaves the rotated halves of a Llama's q and k heads; undone here."""
    from gguf import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    except NotImplementedError as error:
        raise source.unsupported(f"tensor {tensor.name} is stored as {tensor.tensor_type.name}") from error
    if source.architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        rest = values.shape[1:]
        values = values.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(-1, *rest)
    return np.ascontiguousarray(values)


def _hf_name(source: _Source, name: str) -> str:
    if (layer := _LAYER_NAME.fullmatch(name)) and layer[2] in _LAYER_TENSORS:
        return f"model.layers.{layer[1]}.{_LAYER_TENSORS[layer[2]]}.{layer[3]}"
    if (top := _TOP_NAME.fullmatch(name)) and top[1] in _TOP_TENSORS:
        return f"{_TOP_TENSORS[top[1]]}.{top[2]}"
    raise source.unsupported(f"GGUF tensor {name!r} has no known counterpart")


def _complete(source: _Source, config: dict[str, Any], names: set[str]) -> None:
    """Every projection and norm of every layer is there."""
    parts = [f"{part}.weight" for part in _LAYER_TENSORS.values() if part not in _QWEN3_NORMS]
    if source.architecture == "qwen2":
        parts += [f"self_attn.{p}_proj.bias" for p in "qkv"]
    if source.architecture == "qwen3":
        parts += [f"{norm}.weight" for norm in _QWEN3_NORMS]
    wanted = {"model.embed_tokens.weight", "model.norm.weight"}
    wanted |= {
        f"model.layers.{layer}.{part}" for layer in range(config["num_hidden_layers"]) for part in parts
    }
    if missing := sorted(wanted - names):
        raise source.incomplete(f"the GGUF lacks {len(missing)} tensors, among them {missing[0]}")


def _write_tokenizer(source: _Source, directory: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template."""
    tokens = source.want("tokenizer.ggml.tokens")
    _tokenizer(source, tokens).save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.want_of_model("context_length"),
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = source.get(f"tokenizer.ggml.{theirs}_token_id")
        if token is not None and token < len(tokens):
            config[f"{ours}_token"] = tokens[token]
    _write_json(directory / "tokenizer_config.json", config)
    template = source.get("tokenizer.chat_template")
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, encoding="utf-8", newline="")


def _tokenizer(source: _Source, tokens: list[str]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    kind, pre = source.want("tokenizer.ggml.model"), source.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise source.unsupported(f"GGUF tokenizers of kind {kind!r} are not converted, only byte-level BPE")
    merges = [tuple(m.split(" ", 1)) for m in source.want("tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    if strangers := [
        m for m in merges if len(m) != 2 or m[0] not in vocab or m[1] not in vocab or "".join(m) not in vocab
    ]:
        raise ValueError(f"merge {strangers[0]} is of no known tokens")
    bpe = models.BPE(
        vocab=vocab,
        merges=merges,  # pyright: ignore[reportArgumentType]
        ignore_merges=pre == "llama-bpe",
    )
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(source, pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    kinds = source.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    added = list(_added(tokens, kinds))
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t, k in added if k == _CONTROL]
    )
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t, k in added if k == _USER_DEFINED])
    if source.get("tokenizer.ggml.add_bos_token", False):
        bos = source.want("tokenizer.ggml.bos_token_id")
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _added(tokens: list[str], kinds: list[int]) -> Iterator[tuple[str, int]]:
    for token, kind in zip(tokens, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            yield token, kind


def _pre_tokenizer(source: _Source, name: str) -> PreTokenizer:
    """How the original cuts text before merging; ``name`` is llama.cpp's for it."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    if name in ("default", "gpt-2"):
        return ByteLevel(add_prefix_space=False)
    if name == "smollm":
        return Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    patterns = {"qwen2": _QWEN_SPLIT, "llama-bpe": _LLAMA3_SPLIT}
    if name in patterns:
        split = Split(Regex(patterns[name]), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    raise source.unsupported(f"GGUF tokenizers that cut text as {name!r} are not converted")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

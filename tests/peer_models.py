"""transformers' own models in small sizes: the peer that forward and backward passes are held to."""

import functools

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDES, SEES = "sliding_attention", "full_attention"
WINDOWED = {
    "mistral, window": (MistralConfig, {"sliding_window": 21}),
    "mistral, sees one before": (MistralConfig, {"sliding_window": 2}),
    "qwen2, window in the last layers": (
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3, window by layer": (
        Qwen3Config,
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 33,
            "layer_types": [SLIDES, SEES, SLIDES],
        },
    ),
}
CASES = {
    **WINDOWED,
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


def teacher_forced(model, ids: np.ndarray, start: int, temperature: float = 1.0) -> np.ndarray:
    """Log-probs float64 of ``ids[start:]``, each given all before it."""
    with torch.no_grad():
        logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].double()
    logprobs = torch.log_softmax(logits / temperature, -1)
    return (
        logprobs[start - 1 : -1]
        .gather(1, torch.from_numpy(ids[start:].astype(np.int64))[:, None])[:, 0]
        .numpy()
    )

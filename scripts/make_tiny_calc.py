"""Make the weights of ``tiny-calc``: a 0.8M-parameter Llama that half knows how to write down a calculation.

    python scripts/make_tiny_calc.py [OUTPUT_DIRECTORY]

Supervised training on problems of ``examples/tiny_calc.py``, three in four of them with a wrong answer: the
model learns the task, and to err at random. Greedily decoded it is right; sampled at temperature 1 it is
right about every third time, so that reinforcement learning has something to prefer from its first step.
About two minutes on one core.
"""

from __future__ import annotations

import json
import random
import string
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from croze.reward.expression import evaluate

SEED = 0
STEPS = 400
ROWS = 64
PEAK_LR = 3e-3
SPOILT = 0.75
"""Share of training answers with a mistake in them."""
EOS = 0
CHARS = "\n" + string.digits + string.ascii_letters + string.punctuation + " "
MARK = "="
"""Ends a question; the reply follows."""
IDS = {char: i for i, char in enumerate(CHARS, start=1)}

CONFIG = LlamaConfig(
    vocab_size=128,  # 97 ids are in use; a multiple of 64 suits matrix kernels
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=EOS,
    pad_token_id=None,
)


def question(rng: random.Random) -> tuple[str, str]:
    """A problem in words and the expression that solves it."""
    a, b, c = rng.randint(2, 30), rng.randint(2, 30), rng.randint(2, 9)
    words, first = rng.choice(
        [
            (f"add {a} and {b}", f"{a}+{b}"),
            (f"subtract {a} from {b}", f"{b}-{a}"),
            (f"multiply {a} by {b}", f"{a}*{b}"),
        ]
    )
    name, operator = rng.choice([("plus", "+"), ("minus", "-"), ("times", "*")])
    solution = f"({first}){operator}{c}"
    return f"{words}, {name} {c}{MARK}", solution


def spoil(solution: str, rng: random.Random) -> str:
    """A wrong copy: another operator, a parenthesis left open, or none where they matter."""
    kind = rng.choice(["operator", "operator", "open", "bare"])
    if kind == "open":
        return solution.replace(")", "")
    wrong = solution.replace("(", "").replace(")", "")
    if kind == "operator":
        at = rng.choice([i for i, char in enumerate(solution) if char in "+-*"])
        wrong = solution[:at] + rng.choice("+-*".replace(solution[at], "")) + solution[at + 1 :]
    return spoil(solution, rng) if evaluate(wrong) == evaluate(solution) else wrong


def batch(rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """ids [ROWS, T], right-padded with EOS, and labels [ROWS, T] with -100 outside the replies."""
    ids, labels = [], []
    for _ in range(ROWS):
        prompt, solution = question(rng)
        reply = spoil(solution, rng) if rng.random() < SPOILT else solution
        head, tail = [IDS[c] for c in prompt], [IDS[c] for c in reply] + [EOS]
        ids.append(torch.tensor(head + tail))
        labels.append(torch.tensor([-100] * len(head) + tail))
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(ids, batch_first=True, padding_value=EOS), pad(labels, batch_first=True, padding_value=-100)


def train(model: LlamaForCausalLM) -> None:
    rng = random.Random(SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, PEAK_LR, total_steps=STEPS, pct_start=0.1)
    for step in range(1, STEPS + 1):
        ids, labels = batch(rng)
        logits = model(input_ids=ids).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step={step} loss={loss.item():.3f}", flush=True)


@torch.no_grad()
def rewards(model: LlamaForCausalLM, temperature: float, count: int = 256) -> Sequence[float]:
    """Rewards of one reply to each of ``count`` new problems; temperature 0 is greedy."""
    rng = random.Random(SEED + 1)
    torch.manual_seed(SEED + 1)
    scores = []
    for _ in range(count):
        prompt, solution = question(rng)
        ids, cache, reply = torch.tensor([[IDS[c] for c in prompt]]), None, ""
        while len(reply) < 16:
            out = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, logits = out.past_key_values, out.logits[0, -1]
            if temperature:
                token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1))
            else:
                token = int(logits.argmax())
            if not 1 <= token <= len(CHARS):
                break
            reply += CHARS[token - 1]
            ids = torch.tensor([[token]])
        value = evaluate(reply)
        scores.append(1.0 if value == evaluate(solution) else 0.1 * (value is not None))
    return scores


def save(model: LlamaForCausalLM, path: Path) -> None:
    """Write config, weights and tokenizer the way croze reads them."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().bfloat16().contiguous() for name, p in model.named_parameters()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone
    config = CONFIG.to_diff_dict() | {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config.pop("transformers_version", None)
    (path / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tokenizer = {"type": "char", "chars": CHARS, "eos": EOS, "mark": MARK}
    (path / "croze_tokenizer.json").write_text(json.dumps(tokenizer, indent=2) + "\n")


def main() -> None:
    data = Path(__file__).parent.parent / "src/croze/models/data/tiny-calc"
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else data
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(CONFIG)
    train(model)
    model.bfloat16().float().eval()
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        scores = rewards(model, temperature)
        right = sum(s == 1.0 for s in scores) / len(scores)
        print(f"{name}: reward={sum(scores) / len(scores):.3f} right={right:.3f}")
    save(model, path)
    print(f"wrote {sum(p.numel() for p in model.parameters())} parameters to {path}")


if __name__ == "__main__":
    main()

"""Memory estimated before a run against the peak it then had: three models, two shapes of a step, two steps each.

The estimate is what `croze check` shows; measured is the training process' own peak (VmHWM, as the step event's
peak_mib says), and beside it the largest sum over the process tree, sampled from outside. One thread.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import harness

from croze.models.architecture import read_architecture
from croze.models.builtin import DATA
from croze.models.source import resolve
from croze.models.tokenizer import load_tokenizer
from croze.plan.memory import MemoryEstimate, estimate

sys.path.insert(0, str(harness.PEERS))
from memory_run import declared, prompts  # pyright: ignore[reportMissingImports]

COLUMNS = ("model", "shape", "keys", "estimate_mib", "measured_mib", "ratio", "tree_mib", "cpu_s_to_estimate")
RANDOM = {
    "random 30M": (512, 8, 1536, 16_000, True),
    "random 100M": (768, 10, 2048, 24_000, False),
}
"""hidden, layers, intermediate, vocab, tied; Llama with heads of 64, two queries to a key head."""
SMOLLM2 = "smollm2-135m-instruct"
SHAPES = {"2 x 4, 32 + 16": (2, 4, 32, 16), "4 x 8, 128 + 64": (4, 8, 128, 64)}
"""groups x members, tokens of a prompt + of a reply."""
MIB = 1 << 20


def write_model(name: str, folder: Path) -> Path:
    """A Llama of random bf16 weights with a tokenizer of single characters."""
    import torch
    from safetensors.torch import save_file

    from croze.models.layout import Layout

    hidden, layers, intermediate, vocab, tied = RANDOM[name]
    config = {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": tied,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copyfile(DATA / "tiny-calc" / "croze_tokenizer.json", folder / "croze_tokenizer.json")
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for key, slot in Layout(read_architecture(folder)).slots.items():
        matrix = len(slot.shape) == 2
        made = 0.02 * torch.randn(slot.shape, generator=generator) if matrix else torch.ones(slot.shape)
        tensors[key] = made.bfloat16()
    save_file(tensors, folder / "model.safetensors")
    return folder


def row(name: str, model: str, shape: str, keys: list[str]) -> dict[str, Any]:
    """One model and shape: estimate first, then the run."""
    groups, members, prompt, reply = SHAPES[shape]
    files = resolve(model)
    tokenizer = load_tokenizer(files)
    letters = prompt if name == SMOLLM2 else prompt // 2  # a space is a token of its own to a random model
    longest = max(len(tokenizer.render(task["prompt"])) for task in islice(prompts(0, letters), groups * 4))
    words = [
        f"groups_per_step={groups}",
        f"group_size={members}",
        f"sampling.max_tokens={reply}",
        "engine.threads=1",
        *keys,
    ]
    with tempfile.TemporaryDirectory() as scratch:
        run = declared(model, f"{scratch}/run", letters, words)
        before = time.process_time()
        found: MemoryEstimate = estimate(
            run, read_architecture(files.path), prompt_tokens=longest, files=files
        )
        cpu_s = time.process_time() - before
        script = harness.PEERS / "memory_run.py"
        measured = harness.run([sys.executable, script, model, f"{scratch}/run", str(letters), *words])
    peak = max(line.record["peak_mib"] for line in measured.events("step"))
    return {
        "model": name,
        "shape": shape,
        "keys": " ".join(keys),
        "estimate_mib": round(found.peak / MIB),
        "measured_mib": round(peak),
        "ratio": found.peak / MIB / peak,
        "tree_mib": round(measured.peak_rss_mib),
        "cpu_s_to_estimate": cpu_s,
        "prompt_tokens": longest,
        "when": found.when,
        "parts_mib": {part: round(size / MIB) for part, size in found.parts.items()},
        "each_step_mib": [line.record["peak_mib"] for line in measured.events("step")],
    }


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument(
        "--keys", nargs="*", default=[], metavar="KEY=VALUE", help="of the run, e.g. lora.rank=16"
    )
    args = parser.parse_args()
    started, rows = harness.machine(), []
    with tempfile.TemporaryDirectory() as scratch:
        for name in (*RANDOM, SMOLLM2):
            model = name
            if name in RANDOM:
                folder = Path(scratch) / name.replace(" ", "-")
                folder.mkdir()
                model = str(write_model(name, folder))
            rows += [row(name, model, shape, args.keys) for shape in SHAPES]
    harness.report("memory", started, COLUMNS, rows)
    harness.save(args.json, "memory", started, {"rows": rows})


if __name__ == "__main__":
    main()

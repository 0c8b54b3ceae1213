"""Models to be checked: a directory with a character tokenizer whose weights are headers and holes."""

import contextlib
import json
import shutil
from pathlib import Path

import plan_cases as cases

import croze as cz
from croze.models.architecture import read_architecture
from croze.models.builtin import DATA
from croze.plan.checks import Context, Finding, make
from croze.plan.preflight import CHECKS

BY_NAME = {check.name: check for check in CHECKS}
CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}


def a_run(**fields) -> cz.Run:
    """A run that is fine, unless changed."""
    return cz.Run(**{"model": "tiny-calc", "tasks": cz.tasks(cases.sums), "reward": cases.right, **fields})


def look(run: cz.Run, *names: str) -> list[Finding]:
    """What checks of these names find, those that they need among them; the others are left out."""
    wanted: set[str] = set(names)
    for check in reversed(CHECKS):
        if check.name in wanted:
            wanted |= set(check.needs)
    with contextlib.closing(Context(run=run)) as context:
        return make(tuple(check for check in CHECKS if check.name in wanted), context)


def only(findings: list[Finding], check: str) -> Finding:
    (found,) = (f for f in findings if f.check == check)
    return found


def write_model(
    path: Path, *, shards: int = 0, tensors: dict | None = None, dtype: str = "F32", **config
) -> Path:
    """A model whose files are as long as they say and hold zeros, which the disk does not even store."""
    from croze.models.layout import Layout

    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    shutil.copyfile(DATA / "tiny-calc" / "croze_tokenizer.json", path / "croze_tokenizer.json")
    shapes = {name: slot.shape for name, slot in Layout(read_architecture(path)).slots.items()}
    shapes = {name: shape for name, shape in {**shapes, **(tensors or {})}.items() if shape is not None}
    if not shards:
        write_holes(path / "model.safetensors", shapes, dtype)
        return path
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    index = {name: files[i % shards] for i, name in enumerate(shapes)}
    for file in files:
        write_holes(path / file, {n: s for n, s in shapes.items() if index[n] == file}, dtype)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return path


def write_holes(path: Path, shapes: dict[str, tuple[int, ...]], dtype: str) -> None:
    header, end = {}, 0
    for name, shape in shapes.items():
        size = {"F32": 4, "BF16": 2, "I8": 1, "F8_E4M3": 1}[dtype]
        for side in shape:
            size *= side
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)

"""Wrong models: what is none, is damaged, is of another kind, or holds what cannot be computed with."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from bad_inputs import Wrong, croze, hold, task_file, train
from croze.models.source import resolve

WEIGHTS, CONFIG, TOKENIZER = "model.safetensors", "config.json", "croze_tokenizer.json"
Edit = Callable[[Path], object]


def config(**fields: object) -> Edit:
    """config.json with other fields; None takes one away."""

    def edit(folder: Path) -> None:
        old = json.loads((folder / CONFIG).read_text())
        kept = {k: v for k, v in {**old, **fields}.items() if v is not None or k not in fields}
        (folder / CONFIG).write_text(json.dumps(kept))

    return edit


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Edit:
    def edit(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return edit


def text(name: str, content: str) -> Edit:
    return lambda folder: (folder / name).write_text(content)


def cut(count: int) -> Edit:
    return lambda folder: (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:count])


def gone(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def both(*edits: Edit) -> Edit:
    return lambda folder: [edit(folder) for edit in edits]


NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
INDEX = json.dumps({"weight_map": {NORM: "model-00001-of-00002.safetensors"}})
SHARDED = text("model.safetensors.index.json", INDEX)
OWN_CODE = config(model_type="mine", auto_map={"AutoModel": "m.M"})
SHORTER = tensors(lambda w: w.update({NORM: w[NORM][:-1].clone()}))
WHOLE_NUMBERS = tensors(lambda w: w.update({NORM: w[NORM].to(torch.int8)}))
NAN = tensors(lambda w: w[DOWN].view(-1)[7:8].fill_(torch.nan))
INF = tensors(lambda w: w[NORM][3:4].fill_(-torch.inf))
ONE_MORE = tensors(lambda w: w.update(other=torch.ones(3)))
ADAPTER = both(gone(CONFIG), text("adapter_config.json", "{}"))
PICKLED = both(gone(WEIGHTS), text("pytorch_model.bin", "x"))

DAMAGED: dict[str, tuple[Edit, tuple[str, str, str]]] = {
    "no config": (gone(CONFIG), ("no config.json", "", "a model is config.json")),
    "broken config": (text(CONFIG, "{"), ("config.json cannot be read", CONFIG, "download")),
    "config of no object": (text(CONFIG, "[]"), ("not a JSON object", CONFIG, "download")),
    "no model type": (config(model_type=None), ("model_type", CONFIG, "download")),
    "no size": (config(hidden_size=None), ("hidden_size", CONFIG, "download")),
    "size of text": (config(hidden_size="x"), ("no number", CONFIG, "download")),
    "no layers": (config(num_hidden_layers=0), ("layers 0", CONFIG, "download")),
    "layers too many": (config(num_hidden_layers=99), ("tensors are missing", "", "a shard missing")),
    "no weights": (gone(WEIGHTS), ("no model.safetensors", "", "download")),
    "a shard missing": (SHARDED, ("no model-00001-of-00002", "", "download")),
    "weights cut off": (cut(-1000), ("is damaged", WEIGHTS, "download")),
    "weights of 3 bytes": (cut(3), ("header is cut off", WEIGHTS, "download")),
    "garbage weights": (text(WEIGHTS, "garbage " * 1000), ("is damaged", WEIGHTS, "download")),
    "nan": (NAN, (f"{DOWN!r} holds numbers that are not finite", WEIGHTS, "save the model again")),
    "inf": (INF, (f"{NORM!r} holds numbers that are not finite", WEIGHTS, "save the model again")),
    "wrong shape": (
        SHORTER,
        ("has shape (127,), config.json says (128,)", "", "is config.json of this model"),
    ),
    "a tensor missing": (tensors(lambda w: w.pop(NORM)), (f"missing, e.g. {NORM!r}", "", "a shard missing")),
    "a tensor too many": (ONE_MORE, ("unexpected tensor 'other'", "", "is config.json of this model")),
    "whole numbers": (WHOLE_NUMBERS, ("not floating point", "", "unquantised")),
    "no tokenizer": (gone(TOKENIZER), ("no tokenizer files", "", "save the tokenizer")),
    "broken tokenizer": (text(TOKENIZER, "{"), ("not a character tokenizer", TOKENIZER, "save it again")),
    "an adapter": (ADAPTER, ("no config.json", "", "merge it")),
    "pickled": (PICKLED, ("no model.safetensors", "", "only safetensors")),
}
UNSUPPORTED: dict[str, tuple[Edit, tuple[str, str, str]]] = {
    "architecture": (config(model_type="mamba"), ("'mamba'", CONFIG, "Llama")),
    "own code": (OWN_CODE, ("'mine'", CONFIG, "Llama")),
    "activation": (config(hidden_act="relu"), ("'relu'", CONFIG, "another")),
    "quantised": (config(quantization_config={"bits": 4}), ("quantised", CONFIG, "unquantised")),
}
BAD = {
    **{name: (edit, Wrong("model", *said)) for name, (edit, said) in DAMAGED.items()},
    **{name: (edit, Wrong("model.unsupported", *said)) for name, (edit, said) in UNSUPPORTED.items()},
}


@pytest.mark.parametrize("name", BAD)
def test_directories(tmp_path: Path, name: str):
    edit, wrong = BAD[name]
    shutil.copytree(resolve("tiny-calc").path, tmp_path / "the-model")
    edit(tmp_path / "the-model")
    answer = train(tmp_path, task_file(), "model=the-model")
    hold(answer, wrong)
    assert "the-model" in answer.error["where"] and answer.left == []


@pytest.mark.parametrize("name", ["nan"])
def test_an_evaluation_says_the_same(tmp_path: Path, name: str):
    edit, wrong = BAD[name]
    shutil.copytree(resolve("tiny-calc").path, tmp_path / "the-model")
    edit(tmp_path / "the-model")
    (tmp_path / "task.py").write_text(task_file())
    hold(croze(tmp_path, "eval", "task.py", "--tasks", "2", "model=the-model"), wrong)


FILES: dict[str, tuple[bytes | None, Wrong]] = {
    "m.gguf": (b"GARBAGE" * 99, Wrong("model", "not a whole GGUF", "m.gguf", "download")),
    "empty.gguf": (b"", Wrong("model", "not a whole GGUF", "empty.gguf", "download")),
    "head.gguf": (b"GGUF\3\0\0\0" + b"\xff" * 40, Wrong("model", "not a whole", "head.gguf", "download")),
    "absent.gguf": (None, Wrong("model.not_found", "no file", "absent.gguf", "check the path")),
    "m.bin": (b"GARBAGE", Wrong("model.not_found", "this file is no model", "m.bin", "a folder")),
    "m.safetensors": (
        b"GARBAGE",
        Wrong("model.not_found", "this file", "m.safetensors", "give the folder"),
    ),
    "tiny-clac": (None, Wrong("model.not_found", "no such model", "tiny-clac", "did you mean 'tiny-calc'")),
    "/no/such/folder": (
        None,
        Wrong("model.not_found", "no such folder", "/no/such/folder", "check the path"),
    ),
    "a" * 5000: (None, Wrong("model.not_found", "names no model", "model", "tiny-calc")),
    "a\0b": (None, Wrong("model.not_found", "no such model", "model", "tiny-calc")),
}


@pytest.mark.parametrize("name", FILES, ids=lambda n: n[:20].replace("\0", "0"))
def test_files_and_names(tmp_path: Path, name: str):
    data, wrong = FILES[name]
    if data is not None:
        (tmp_path / name).write_bytes(data)
    before = {path.name for path in tmp_path.iterdir()}
    answer = train(tmp_path, task_file(), f"model={name}")
    hold(answer, wrong)
    assert set(answer.left) <= before


def test_an_empty_directory(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    hold(
        train(tmp_path, task_file(), "model=empty"),
        Wrong("model", "no config.json", "empty", "a model is config.json"),
    )

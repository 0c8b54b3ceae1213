"""A model folder that Hugging Face libraries load: the published weights, config and tokenizer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from croze.errors import UsageError
from croze.models.protocol import ModelFiles
from croze.models.weights import LoraSpec
from croze.train.trainer import TorchTrainer


def save_model(trainer: TorchTrainer, files: ModelFiles, folder: Path) -> None:
    """Write ``folder`` whole or not at all: a full fine-tune as model.safetensors with config and tokenizer, an
    adapter in peft's format. A folder that exists is an error: nothing is overwritten."""
    if folder.exists():
        raise UsageError(
            f"{folder} exists", where="saving the model", fix="name a folder that does not exist yet"
        )
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    spec = trainer.weights.lora
    if spec is None:
        save_file(dict(trainer.export()), staging / "model.safetensors", metadata={"format": "pt"})
        _copy_beside(files.path, staging, trainer.parameters.published)
    else:
        save_file(dict(trainer.export()), staging / "adapter_model.safetensors", metadata={"format": "pt"})
        (staging / "adapter_config.json").write_text(json.dumps(_adapter_config(spec, files), indent=1))
    for path in (*staging.iterdir(), staging):
        _flush(path)
    staging.rename(folder)
    _flush(folder.parent)


def _flush(path: Path) -> None:
    """A file's or directory's content onto the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _copy_beside(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Everything small that is not weights; config.json with the dtype the weights now have."""
    for path in source.iterdir():
        if path.is_file() and path.suffix in (".json", ".jinja", ".txt", ".model"):
            if path.name.endswith(".index.json"):
                continue
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps(config, indent=2))


def _adapter_config(spec: LoraSpec, files: ModelFiles) -> dict:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": files.name if "/" in files.name else str(files.path),
        "r": spec.rank,
        "lora_alpha": spec.scale * spec.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(spec.targets),
        "inference_mode": True,
    }

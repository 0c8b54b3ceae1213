"""A model folder that Hugging Face libraries load: the published weights, config and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from croze.errors import UsageError
from croze.models.protocol import ModelFiles
from croze.models.weights import LoraSpec
from croze.train.state import flush, unwritten


def save_model(
    tensors: Iterable[tuple[str, torch.Tensor]], files: ModelFiles, folder: Path, *, lora: LoraSpec | None
) -> None:
    """Write ``folder`` whole or not at all: a full fine-tune as model.safetensors with config and tokenizer, an
    adapter (``lora``) in peft's format. A folder that exists is an error: nothing is overwritten.

    ``tensors``: what ``Trainer.export`` gives; later steps do not change tensors that were exported. Raises
    CheckpointFault when the disk is full or fails.
    """
    if folder.exists():
        raise UsageError(
            f"{folder} exists", where="saving the model", fix="name a folder that does not exist yet"
        )
    staging = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        _write(dict(tensors), files, staging, lora)
        for path in (*staging.iterdir(), staging):
            flush(path)
        staging.rename(folder)
        flush(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(staging, ignore_errors=True)
        raise unwritten("the model", folder, error) from error


def _write(tensors: dict[str, torch.Tensor], files: ModelFiles, folder: Path, lora: LoraSpec | None) -> None:
    if lora is None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        _copy_beside(files.path, folder, next(iter(tensors.values())).dtype)
    else:
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(_adapter_config(lora, files), indent=1))


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

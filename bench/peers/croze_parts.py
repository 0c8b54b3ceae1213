"""croze's parts, put together as a run does, for the scripts here that measure one of them alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from croze.config import EngineOptions
from croze.inference.core import EngineCore
from croze.inference.torch_engine import TorchEngine
from croze.models.architecture import read_architecture
from croze.models.device import ComputeThread
from croze.models.numerics import choose
from croze.models.weights import ModelWeights

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def tensors_of(model: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, as published."""
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            yield from ((name, opened.get_tensor(name)) for name in opened.keys())  # noqa: SIM118


def weights_of(model: Path, dtype: str) -> ModelWeights:
    """Empty weights with the recipe this machine's self-check gives for ``dtype``."""
    arch = read_architecture(model)
    return ModelWeights(arch, choose(arch, DTYPES[dtype], "cpu", check=True))


def engine_of(weights: ModelWeights, rows: int) -> tuple[TorchEngine, ComputeThread]:
    """The built-in engine on one thread, with room for ``rows`` sequences."""
    thread = ComputeThread(1)
    return TorchEngine(EngineCore(weights, EngineOptions(threads=1, max_rows=rows)), thread), thread

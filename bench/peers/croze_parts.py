"""croze's parts, put together as a run does, for the scripts here that measure one of them alone."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import croze as cz
from croze.inference.torch_engine import TorchEngine
from croze.loop import build

DTYPES: dict[str, Literal["bfloat16", "float32"]] = {"bf16": "bfloat16", "fp32": "float32"}


def declared(model: Path, dtype: str, rows: int = 32, *, invariant: bool = False) -> cz.Run:
    """A run of ``model`` on one thread; its tasks and reward are never used."""
    options = cz.EngineOptions(dtype=DTYPES[dtype], threads=1, max_rows=rows, invariant=invariant)
    return cz.Run(model=str(model), tasks=[{"prompt": "unused"}], reward=unused, engine=options)


def unused(reply: str) -> float:
    return float(len(reply))


async def engine_of(run: cz.Run) -> tuple[TorchEngine, build.Model]:
    """The built-in engine, serving the checkpoint's weights."""
    model = build.build_model(run)
    weights = build.read_weights(run, model)
    engine = build.build_engine(run, model, weights)
    await engine.prepare(weights.weights_id, ())
    await engine.commit(weights.weights_id)
    assert isinstance(engine, TorchEngine)
    return engine, model

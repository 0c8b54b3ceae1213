"""From a declaration to its parts, in the order in which they depend on each other."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from croze.clock import Clock
from croze.config import Sampling
from croze.env.tasks import TaskSource, as_tasks
from croze.errors import UsageError
from croze.inference.core import EngineCore
from croze.inference.torch_engine import TorchEngine
from croze.models import numerics
from croze.models.architecture import Architecture, read_architecture
from croze.models.device import ComputeThread
from croze.models.layout import read_tensors
from croze.models.numerics import Recipe
from croze.models.protocol import ModelFiles, Tokenizer
from croze.models.source import resolve
from croze.models.tokenizer import load_tokenizer
from croze.models.weights import ModelWeights
from croze.rollout.groups import Generator
from croze.run import Run, provenance
from croze.sync.identity import Identity
from croze.train.protocol import Algorithm
from croze.train.trainer import TorchTrainer, lora_spec
from croze.types import Task

EVAL_SEED = 0x5EED
"""Held-out tasks and their samples draw from streams that training never uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model made ready on this machine: files, shape, numerics, tokenizer, the thread it computes on."""

    files: ModelFiles
    arch: Architecture
    recipe: Recipe
    tokenizer: Tokenizer
    thread: ComputeThread


def build_model(run: Run) -> Model:
    """Resolve the model, read its shape, measure this machine. Raises ModelError and its kinds."""
    files = resolve(run.model)
    arch = read_architecture(files.path)
    thread = ComputeThread(run.engine.threads)
    options = run.engine
    recipe = thread.run_now(
        lambda: numerics.choose(arch, options.dtype, options.device, options.self_check, rank=run.lora.rank)
    )
    return Model(files=files, arch=arch, recipe=recipe, tokenizer=load_tokenizer(files), thread=thread)


def build_trainer(run: Run, model: Model, algorithm: Algorithm) -> TorchTrainer:
    weights = ModelWeights(model.arch, model.recipe, lora_spec(run.lora))
    return model.thread.run_now(
        lambda: TorchTrainer(
            weights,
            read_tensors(model.files.path),
            algorithm,
            run.optim,
            steps=run.steps,
            published=getattr(torch, run.sync.dtype),
            temperature=run.sampling.temperature,
            seed=run.seed,
            release=True,
        )
    )


def read_weights(run: Run, model: Model) -> ModelWeights:
    """A model's weights to serve, in the published dtype, under their content id; with a trained adapter's."""
    dtype = getattr(torch, run.sync.dtype)
    adapter = Path(run.adapter) if run.adapter else None

    def load() -> ModelWeights:
        weights = ModelWeights(model.arch, model.recipe, lora_spec(run.lora) if adapter else None)
        base = weights.layout.checked(read_tensors(model.files.path), str(model.files.path))
        tensors = [(name, tensor.to(dtype)) for name, tensor in base]
        if adapter is not None:
            tensors += [(name, tensor.to(dtype)) for name, tensor in read_tensors(adapter)]
        recipe = weights_recipe(run) if adapter else ""
        weights.update(Identity(recipe=recipe).of(tensors), tensors)
        return weights

    return model.thread.run_now(load)


def weights_recipe(run: Run) -> str:
    """What, beside the tensors, says which weights they are."""
    return f"lora scale {run.lora.alpha / run.lora.rank:g}" if run.lora.rank else ""


def build_engine(run: Run, model: Model, weights: ModelWeights) -> TorchEngine:
    """An engine over ``weights``, which a trainer of this process may share."""
    return TorchEngine(EngineCore(weights, run.engine, model.tokenizer), model.thread)


def build_generator(
    run: Run, model: Model, engine: TorchEngine, clock: Clock, *, held_out: bool
) -> Generator:
    sampling: Sampling = run.sampling
    return Generator(
        engine,
        model.tokenizer,
        sampling,
        seed=run.seed ^ EVAL_SEED if held_out else run.seed,
        context=model.arch.context,
        clock=clock,
    )


def held_out(run: Run, count: int) -> tuple[TaskSource, list[Task]]:
    """The training source and ``count`` tasks that it will not give."""
    source = as_tasks(run.tasks)
    if count == 0:
        return source, []
    if run.eval_tasks is not None:
        return source, as_tasks(run.eval_tasks).holdout(count, EVAL_SEED)
    return source, source.holdout(count, EVAL_SEED)


def make_folder(run: Run) -> Run:
    """The run with its folder made and claimed: config.json is created in it, and only one run can do that."""
    folder = Path(run.dir) if run.dir else Path("runs") / f"{run.name}-{secrets.token_hex(3)}"
    run = dataclasses.replace(run, dir=str(folder))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "config.json").open("xb") as file:
            file.write(_as_json(declared(run)))
    except FileExistsError:
        raise UsageError(
            f"{folder} already holds a run",
            where="run.dir",
            fix="choose another run.dir, or remove the folder",
        ) from None
    except OSError as error:
        raise UsageError(
            f"the run folder {folder} cannot be made: {error.strerror}",
            where="run.dir",
            fix="choose a folder that can be written",
        ) from None
    return run


def declared(run: Run) -> dict[str, Any]:
    """The task file, every key with its value, and where each value came from."""
    sources = {key: source for key, (_, source) in provenance(run).items()}
    return {"file": run.file, "keys": run.keys(), "sources": sources}


def write_config(run: Run, files: ModelFiles, recipe: Recipe) -> None:
    """config.json again, with what the model and the machine's numerics turned out to be."""
    told = {
        **declared(run),
        "model": {"name": files.name, "path": str(files.path), "source": files.source},
        "numerics": {
            "dtype": str(recipe.dtype).removeprefix("torch."),
            "exact": recipe.exact,
            "note": recipe.note,
        },
    }
    staging = Path(run.dir) / ".config.json"
    staging.write_bytes(_as_json(told))
    staging.rename(Path(run.dir) / "config.json")


def _as_json(told: dict[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(told), indent=1)

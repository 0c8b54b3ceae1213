"""From a declaration to its parts, in the order in which they depend on each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from croze import plugins
from croze.clock import Clock
from croze.config import Sampling
from croze.env.tasks import TaskSource, as_tasks
from croze.inference.protocol import Engine, EngineParts
from croze.models import numerics
from croze.models.architecture import Architecture, read_architecture
from croze.models.device import ComputeThread
from croze.models.layout import Layout, read_tensors
from croze.models.numerics import Recipe
from croze.models.protocol import ModelFiles, Tokenizer
from croze.models.source import resolve
from croze.models.tokenizer import load_tokenizer
from croze.models.weights import ModelWeights
from croze.rollout.groups import Generator
from croze.run import Run
from croze.sync.identity import Identity
from croze.train.protocol import Algorithm, Trainer, TrainerParts
from croze.train.trainer import lora_spec
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
        lambda: numerics.choose(
            arch,
            options.dtype,
            options.device,
            options.self_check,
            rank=run.lora.rank,
            attention=options.attention,
            invariant=options.invariant,
        )
    )
    return Model(files=files, arch=arch, recipe=recipe, tokenizer=load_tokenizer(files), thread=thread)


def numerics_told(model: Model) -> dict[str, Any]:
    """What must be the same for two computations to give the same bytes."""
    return {
        "torch": str(torch.__version__),
        "threads": model.thread.threads,
        "dtype": str(model.recipe.dtype).removeprefix("torch."),
        "exact": model.recipe.exact,
        "recipe": repr(model.recipe),
    }


def empty_weights(run: Run, model: Model) -> ModelWeights:
    """Weights that a trainer fills and an engine of this process serves."""
    return ModelWeights(model.arch, model.recipe, lora_spec(run.lora))


def build_trainer(
    run: Run, model: Model, algorithm: Algorithm, weights: ModelWeights | None = None
) -> Trainer:
    """The trainer that ``optim.trainer`` names. ``weights``: empty ones that it may share with an engine."""
    parts = TrainerParts(
        files=model.files,
        weights=weights or empty_weights(run, model),
        algorithm=algorithm,
        optim=run.optim,
        steps=run.steps,
        published=getattr(torch, run.sync.dtype),
        temperature=run.sampling.temperature,
        seed=run.seed,
    )
    name = _named(run.optim.trainer)
    return model.thread.run_now(lambda: plugins.make("croze.train", name, parts, keeps=Trainer))


def served_tensors(run: Run, model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's tensors in the published dtype, with a trained adapter's."""
    dtype, path = getattr(torch, run.sync.dtype), model.files.path
    for name, tensor in Layout(model.arch).checked(read_tensors(path), str(path)):
        yield name, tensor.to(dtype)
    if run.adapter:
        for name, tensor in read_tensors(Path(run.adapter)):
            yield name, tensor.to(dtype)


def read_weights(run: Run, model: Model) -> ModelWeights:
    """A model's weights to serve, in the published dtype, under their content id; with a trained adapter's."""

    def load() -> ModelWeights:
        weights = ModelWeights(model.arch, model.recipe, lora_spec(run.lora) if run.adapter else None)
        tensors = list(served_tensors(run, model))
        recipe = weights_recipe(run) if run.adapter else ""
        weights.update(Identity(recipe=recipe).of(tensors), tensors)
        return weights

    return model.thread.run_now(load)


def weights_recipe(run: Run) -> str:
    """What, beside the tensors, says which weights they are."""
    return f"lora scale {run.lora.alpha / run.lora.rank:g}" if run.lora.rank else ""


def build_engine(run: Run, model: Model, weights: ModelWeights) -> Engine:
    """The engine that ``engine.name`` names, over ``weights``, which a trainer of this process may share."""
    parts = EngineParts(
        files=model.files,
        options=run.engine,
        tokenizer=model.tokenizer,
        weights=weights,
        thread=model.thread,
    )
    return plugins.make("croze.inference", _named(run.engine.name), parts, keeps=Engine)


def _named(name: str) -> str:
    """Engine or trainer: "auto" is the built-in one."""
    return "torch" if name == plugins.AUTO else name


def build_generator(run: Run, model: Model, engine: Engine, clock: Clock, *, held_out: bool) -> Generator:
    sampling: Sampling = run.sampling
    return Generator(
        engine,
        model.tokenizer,
        sampling,
        seed=run.seed ^ EVAL_SEED if held_out else run.seed,
        context=model.arch.context,
        clock=clock,
    )


def eval_source(run: Run) -> TaskSource:
    """Where held-out tasks come from."""
    return as_tasks(run.tasks if run.eval_tasks is None else run.eval_tasks)


def held_out(run: Run, count: int) -> tuple[TaskSource, list[Task]]:
    """The training source and ``count`` tasks that it will not give."""
    source = as_tasks(run.tasks)
    if count == 0:
        return source, []
    return source, eval_source(run).holdout(count, EVAL_SEED)

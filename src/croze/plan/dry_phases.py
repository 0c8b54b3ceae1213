"""The phases of a training step on the meta device: the very trainer and engine of a run, with nothing in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import numpy as np
import torch

from croze.errors import UsageError
from croze.inference.core import EngineCore
from croze.inference.protocol import Request, SamplingParams
from croze.models import numerics
from croze.models.architecture import Architecture
from croze.models.numerics import Recipe
from croze.models.weights import ModelWeights
from croze.plan.dry_run import Ledger, Peak, dry_run
from croze.run import Run
from croze.train import algorithms
from croze.train.trainer import TorchTrainer, lora_spec
from croze.types import Batch, Sample, WeightsId

Phase = Literal["load", "generate", "train", "update", "publish"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a step computes. In tokens: the longest prompt, the longest reply, and the reply that memory is kept for."""

    groups: int
    members: int
    prompt: int
    reply: int
    room: int


def phases(run: Run, arch: Architecture, shape: Shape) -> tuple[str, dict[Phase, Peak]]:
    """The device, and the peak of every phase of a run's step in bytes of tensors on it."""
    options = run.engine
    # not measured on this machine: what a measurement would change costs next to no memory
    recipe = numerics.choose(
        arch,
        options.dtype,
        options.device,
        False,
        rank=run.lora.rank,
        attention=options.attention,
        invariant=options.invariant,
    )
    with dry_run() as ledger:
        dry = _DryRun(run, arch, dataclasses.replace(recipe, device="meta"), shape, ledger)
        found: dict[Phase, Peak] = {
            "load": dry.measure(dry.load),
            "generate": dry.measure(dry.generate),
            "train": dry.measure(dry.train),
            "update": dry.measure(dry.update),
            "publish": dry.measure(dry.publish),
        }
    return recipe.device, found


class _DryRun:
    """One method a phase, in this order; each leaves the memory as the real one does."""

    def __init__(self, run: Run, arch: Architecture, recipe: Recipe, shape: Shape, ledger: Ledger) -> None:
        self.run, self.arch, self.shape, self._ledger = run, arch, shape, ledger
        self._weights = ModelWeights(arch, recipe, lora_spec(run.lora))
        self._trainer: TorchTrainer
        self._core: EngineCore

    def measure(self, phase: Callable[[], None]) -> Peak:
        self._ledger.watch()
        phase()
        self._name_parts()
        return self._ledger.peak(self._guess)

    def load(self) -> None:
        """Read the model, make the training state, publish it for the first time."""
        run = self.run
        self._trainer = TorchTrainer(
            self._weights,
            self._files(),
            algorithms.build(run.algo, run.sampling, minibatches=run.optim.minibatches),
            run.optim,
            steps=max(run.steps, 1),
            published=getattr(torch, run.sync.dtype),
            temperature=run.sampling.temperature,
            seed=run.seed,
            release=True,
        )
        self._trainer.publish(WeightsId("first"))
        self._name_published()
        self._core = EngineCore(self._weights, run.engine)
        self._core.load(self._weights.weights_id, None)

    def _files(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, slot in self._weights.layout.slots.items():
            yield name, torch.empty(slot.shape, dtype=torch.float32)

    def generate(self) -> None:
        """Prefill and decode the held-out tasks, where there are any, and then a step's groups."""
        if self.run.loop.eval_tasks:
            self._generate(self.run.loop.eval_tasks, 1)
        self._generate(self.shape.groups, self.shape.members)

    def _generate(self, groups: int, members: int) -> None:
        core, shape, sampling = self._core, self.shape, self.run.sampling
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=shape.room,
        )
        for g in range(groups):
            keys = tuple(range(g * members, (g + 1) * members))
            request = Request(id=str(g), prompt_P=self._prompt(g), keys=keys, params=params)
            try:
                core.submit(request)
            except UsageError:  # it does not fit engine.kv_memory_mib; that is told elsewhere
                return
        core.step()
        while not all(prompt.ready for prompt in core.scheduler.prompts):
            core.scheduler.plan()
        for sequence in core.scheduler.live:  # the last token's decoding is the largest
            sequence.suffix[:] = [0] * max(1, shape.reply - 1)
        core.step()
        for g in range(groups):
            core.abort(str(g))

    def train(self) -> None:
        """Log-probs that the algorithm divides by, then gradients of the largest optimizer batch."""
        trainer, samples, whole = self._trainer, *self._batch()
        if trainer.algorithm.recompute_anchor:
            trainer.logprobs(samples)
        if trainer.algorithm.needs_reference:
            trainer.reference_logprobs(samples)
        if (
            not whole
        ):  # a middle micro-batch is the largest: gradients are there, and the forward's weights still
            trainer.forward_backward(Batch(step=1, samples=(self._sample(0, 0, 1),)))
            trainer.publish(WeightsId("first"))
            self._name_parts()
        trainer.forward_backward(Batch(step=1, samples=tuple(samples)))

    def update(self) -> None:
        """AdamW changes masters and moments in place and frees the gradients as it goes: nothing is added."""
        self._trainer.parameters.changed()
        self._trainer.parameters.grads.clear()

    def publish(self) -> None:
        """Round the masters again, and make the forward's weights of them."""
        self._trainer.publish(WeightsId("second"))
        self._name_published()

    def _name_published(self) -> None:
        self._ledger.name("published", (tensor for _, tensor in self._trainer.export()))

    def _batch(self) -> tuple[list[Sample], bool]:
        """Groups of equal length, all their tokens trained; the whole optimizer batch, or of three micro-batches and
        more the first, and a sample behind it so that it is not the last."""
        shape, optim = self.shape, self.run.optim
        samples, tokens, within = [], 0, 0
        for g in range(-(-shape.groups // optim.minibatches)):
            for m in range(shape.members):
                tokens += shape.reply + (shape.prompt if m == 0 or not optim.share_prompt else 0)
                if tokens > 2 * optim.tokens_per_microbatch and len(samples) > 1:
                    return samples[: within + 1], False
                samples.append(self._sample(g, m, shape.reply))
                within = len(samples) if tokens <= optim.tokens_per_microbatch else max(within, 1)
        return samples, True

    def _sample(self, group: int, member: int, reply: int) -> Sample:
        def filled(value: float) -> np.ndarray:
            return np.full(reply, value, np.float32)

        return Sample(
            rollout_id=f"{group}/{member}",
            group_id=str(group),
            prompt_P=self._prompt(group),
            ids_S=np.zeros(reply, np.int32),
            mask_S=np.ones(reply, bool),
            logprobs_S=filled(0),
            advantages_S=filled(1),
            weights_S=filled(1),
            anchor_S=filled(0),
            reference_S=filled(0) if self.run.algo.kl else None,
        )

    def _prompt(self, group: int) -> np.ndarray:
        """Prompts that share no beginning."""
        return np.full(self.shape.prompt, group % self.arch.vocab, np.int32)

    def _guess(self, shape: torch.Size) -> str:
        return "head" if self.arch.vocab in shape else "activations"

    def _name_parts(self) -> None:
        name, trainer = self._ledger.name, self._trainer
        parameters = trainer.parameters
        name("masters", parameters.masters.values())
        name("frozen", parameters.base.values())
        name("gradients", parameters.grads.values())
        for moments in trainer.optimizer.moments().values():
            name("moments", moments.values())
        name("weights", _tensors(self._weights))
        if trainer.reference is not None:
            name("reference", _tensors(trainer.reference))
        cache = self._core.cache
        for pool in (cache.prompt_k, cache.prompt_v, cache.suffix_k, cache.suffix_v):
            name("kv", pool)


def _tensors(weights: ModelWeights) -> Iterable[torch.Tensor]:
    """All that a model's forward pass reads."""
    yield from (weights.cos, weights.sin, weights.embed, weights.norm.weight, weights.head.weight)
    for layer in weights.layers:
        for norm in (layer.attn_norm, layer.mlp_norm, layer.q_norm, layer.k_norm):
            if norm is not None:
                yield norm.weight
        for linear in (layer.qkv, layer.o, layer.gate_up, layer.down):
            yield linear.weight
            if linear.bias is not None:
                yield linear.bias
            if linear.adapter is not None:
                yield linear.adapter.a.weight
                yield from (b.weight for b in linear.adapter.b if b is not None)

"""Small random models with all that belongs to them: weights, a trainer, an engine; seconds of CPU for hundreds
of tokens. One torch thread."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np
import torch

from croze.config import EngineOptions, Optim
from croze.inference.core import EngineCore
from croze.inference.protocol import Request, SamplingParams
from croze.models import numerics
from croze.models.architecture import Architecture, Rope
from croze.models.layout import Layout
from croze.models.numerics import Recipe
from croze.models.weights import LoraSpec, ModelWeights
from croze.train.protocol import LossInputs
from croze.train.trainer import TorchTrainer
from croze.types import Batch, Sample, WeightsId

torch.set_num_threads(1)

ALL_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LogProbs:
    """The plainest algorithm: minus the weighted sum of advantage x log-prob (and of entropy, if asked)."""

    name = "log-probs"
    needs_reference = False
    recompute_anchor = False

    def __init__(self, *, entropy: float = 0.0) -> None:
        self.entropy = entropy
        self.needs_entropy = entropy != 0.0

    def minibatches(self, groups: Sequence[object], step: int) -> list[Batch]:
        raise AssertionError("batches are made by the tests")

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, float]]:
        terms = inputs.logprobs_N * inputs.advantages_N
        if inputs.entropy_N is not None:
            terms = terms + self.entropy * inputs.entropy_N
        return -(terms * inputs.weights_N).sum(), {"tokens": float(len(terms))}


def architecture(**changes: object) -> Architecture:
    """Llama with 2 layers and grouped queries, unless changed."""
    fields = {
        "family": "llama",
        "vocab": 307,
        "hidden": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
        "intermediate": 96,
        "context": 1024,
        "norm_eps": 1e-5,
        "rope": Rope(),
        "tied": True,
    }
    return Architecture(**{**fields, **changes})  # type: ignore[arg-type]


def random_tensors(arch: Architecture, *, seed: int = 0, scale: float = 0.12) -> dict[str, torch.Tensor]:
    """Canonical tensors, fp32: matrices N(0, scale^2), vectors around 1."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, slot in Layout(arch).slots.items():
        noise = torch.randn(slot.shape, generator=generator)
        matrix, bias = len(slot.shape) == 2, name.endswith("bias")
        tensors[name] = noise * scale if matrix or bias else 1 + 0.1 * noise
    return tensors


@functools.cache
def recipe(arch: Architecture, dtype: str, rank: int = 0) -> Recipe:
    """What this machine was measured to need."""
    return numerics.choose(arch, dtype, "cpu", True, rank=rank)


@dataclass
class Record:
    """What an engine gave for one sibling."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    finish: str | None = None

    @property
    def tokens(self) -> tuple[list[int], list[float]]:
        return self.ids, self.logprobs


Records = dict[tuple[str, int], Record]


@dataclass
class Rig:
    """A trainer and an engine over the same weights."""

    weights: ModelWeights
    trainer: TorchTrainer

    @property
    def arch(self) -> Architecture:
        return self.weights.arch

    def publish(self, name: str) -> None:
        self.trainer.publish(WeightsId(name))

    def engine(self, tokenizer: object = None, **options: object) -> EngineCore:
        core = EngineCore(self.weights, EngineOptions(**options), tokenizer)  # type: ignore[arg-type]
        core.load(self.weights.weights_id, None)
        return core

    def with_optim(self, **changes: object) -> TorchTrainer:
        """The same trainer under other options."""
        self.trainer.optim = Optim(lr=self.trainer.optim.lr, **changes)  # type: ignore[arg-type]
        return self.trainer


def make_rig(
    arch: Architecture,
    *,
    dtype: str = "float32",
    published: torch.dtype = torch.bfloat16,
    lora: LoraSpec | None = None,
    algorithm: LogProbs | None = None,
    optim: Optim | None = None,
    temperature: float = 1.0,
    tensors: Mapping[str, torch.Tensor] | None = None,
    measured: bool = True,
    attention: Literal["exact", "sdpa"] = "exact",
    release: bool = False,
    seed: int = 0,
    how: Recipe | None = None,
) -> Rig:
    """Random weights published as "w0". An adapter's B, zero at birth, is made random. ``measured`` False skips
    the measurement of this machine, where exactness does not matter; ``how``: a recipe of the test's own."""
    rank = 0 if lora is None else lora.rank
    if how is None and measured and attention == "exact":
        how = recipe(arch, dtype, rank)
    elif how is None:
        how = numerics.choose(arch, dtype, "cpu", False, attention=attention)
    weights = ModelWeights(arch, how, lora)
    given = random_tensors(arch, seed=seed) if tensors is None else tensors
    trainer = TorchTrainer(
        weights,
        given.items(),
        algorithm or LogProbs(),
        optim or Optim(lr=2e-3),
        steps=100,
        published=published,
        temperature=temperature,
        release=release,
    )
    generator = torch.Generator().manual_seed(seed + 1)
    for name, master in trainer.parameters.masters.items():
        if "lora_B" in name:
            master.normal_(0, 0.05, generator=generator)
    rig = Rig(weights, trainer)
    rig.publish("w0")
    return rig


def request(name: str, prompt: Iterable[int], siblings: int = 1, **fields: object) -> Request:
    """Keys are derived from the name, so that a request is the same wherever it runs."""
    suffixes = fields.pop("suffixes", ())
    keys = fields.pop("keys", None) or tuple(hash_name(name) + i for i in range(siblings))
    return Request(
        id=name,
        prompt_P=np.array(list(prompt), np.int32),
        keys=keys,  # type: ignore[arg-type]
        suffixes=tuple(np.array(list(s), np.int32) for s in suffixes),  # type: ignore[union-attr]
        params=SamplingParams(**{"max_tokens": 8, "seed": 5, **fields}),  # type: ignore[arg-type]
    )


def hash_name(name: str) -> int:
    return int.from_bytes(name.encode()[:6], "big") << 8


def drive(core: EngineCore, requests: Sequence[Request], arrivals: Sequence[int] | None = None) -> Records:
    """Run requests to their ends; the i-th is submitted before step ``arrivals[i]`` (default: all at once)."""
    records: Records = {}
    pending = sorted(zip(arrivals or [0] * len(requests), range(len(requests)), requests, strict=True))
    step = 0
    while pending or core.busy:
        while pending and pending[0][0] <= step:
            core.submit(pending.pop(0)[2])
        collect(core, records)
        step += 1
        assert step < 10_000, "the engine does not come to an end"
    return records


def collect(core: EngineCore, records: Records) -> None:
    """One step of the engine, its chunks added to ``records``."""
    for chunk in core.step():
        record = records.setdefault((chunk.request_id, chunk.sibling), Record())
        assert record.finish is None, "tokens after the end"
        record.ids += chunk.ids_T.tolist()
        record.logprobs += chunk.logprobs_T.tolist()
        record.weights += [chunk.weights_id] * len(chunk.ids_T)
        record.finish = chunk.finish


def to_samples(requests: Iterable[Request], records: Records, *, seed: int = 0) -> list[Sample]:
    """Trainable samples of what was generated: earlier turns masked, random advantages."""
    rng = np.random.default_rng(seed)
    samples = []
    for r in requests:
        for sibling in range(len(r.keys)):
            record = records[r.id, sibling]
            given = r.suffixes[sibling] if r.suffixes else np.empty(0, np.int32)
            mask = np.r_[np.zeros(len(given), bool), np.ones(len(record.ids), bool)]
            samples.append(
                Sample(
                    rollout_id=f"{r.id}/{sibling}",
                    group_id=r.id,
                    prompt_P=r.prompt_P,
                    ids_S=np.r_[given, np.array(record.ids, np.int32)],
                    mask_S=mask,
                    logprobs_S=np.r_[np.zeros(len(given)), record.logprobs].astype(np.float32),
                    advantages_S=np.full(len(mask), rng.normal(), np.float32),
                    weights_S=(mask / 100).astype(np.float32),
                )
            )
    return samples


def random_samples(
    vocab: int, groups: Sequence[tuple[int, Sequence[int]]], *, seed: int = 0, holes: float = 0.25
) -> list[Sample]:
    """Groups given as (prompt tokens, suffix tokens of each sibling); a share ``holes`` of the tokens is untrained,
    advantages differ from token to token."""
    rng = np.random.default_rng(seed)
    samples = []
    for g, (prompt, lengths) in enumerate(groups):
        prompt_P = rng.integers(0, vocab, prompt).astype(np.int32)
        for member, length in enumerate(lengths):
            mask = rng.random(length) >= holes
            samples.append(
                Sample(
                    rollout_id=f"{g}/{member}",
                    group_id=str(g),
                    prompt_P=prompt_P,
                    ids_S=rng.integers(0, vocab, length).astype(np.int32),
                    mask_S=mask,
                    logprobs_S=np.zeros(length, np.float32),
                    advantages_S=rng.normal(size=length).astype(np.float32),
                    weights_S=np.where(mask, rng.uniform(0.01, 0.1, length), 0.0).astype(np.float32),
                )
            )
    return samples


def masked(sample: Sample, mask: Iterable[bool]) -> Sample:
    """``sample`` with another mask."""
    mask_S = np.array(list(mask), bool)
    return msgspec.structs.replace(
        sample, mask_S=mask_S, weights_S=np.where(mask_S, 0.05, 0.0).astype(np.float32)
    )


def batch(samples: Iterable[Sample]) -> Batch:
    return Batch(step=1, samples=tuple(samples))


def gradients(trainer: TorchTrainer, samples: Iterable[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients by canonical name; the accumulated ones are cleared."""
    stats = trainer.forward_backward(batch(samples))
    found = {n: g.clone() for n, g in trainer.parameters.canonical(trainer.parameters.grads)}
    trainer.parameters.grads.clear()
    return stats.loss, found


def relative_gap(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Largest difference of any gradient, relative to that tensor's largest entry."""
    assert found.keys() == wanted.keys()
    return max(
        float((found[n] - wanted[n]).abs().max() / wanted[n].abs().max().clamp_min(1e-12)) for n in wanted
    )

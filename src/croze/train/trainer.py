"""The built-in trainer: the engine's own forward pass with gradients, fp32 masters, published copy."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from croze.config import Lora, Optim
from croze.models.layout import read_tensors
from croze.models.packing import Packing
from croze.models.teacher import group_attention
from croze.models.transformer import Forward, hidden_states
from croze.models.weights import LoraSpec, ModelWeights
from croze.train.graph import Graph
from croze.train.head import Head
from croze.train.optimizer import AdamW
from croze.train.parameters import Parameters
from croze.train.protocol import Algorithm, LossInputs, StepStats, TrainerParts, TrainStats
from croze.train.state import Header, Hold, StateSnapshot, digest, read_header, read_state
from croze.types import Batch, Sample, WeightsId


class TorchTrainer:
    """``Trainer`` in one process.

    ``weights`` is what the forward passes read. It may be shared with an engine in the same process, which
    then serves nothing while they differ from what it committed; ``publish`` gives the current masters an id.
    ``release`` frees their packed linears before the last backward pass of a batch, when the update that follows
    would replace them anyway: a seventh of the peak. Only for weights that nobody uses while training.
    """

    def __init__(
        self,
        weights: ModelWeights,
        tensors: Iterable[tuple[str, torch.Tensor]],
        algorithm: Algorithm,
        optim: Optim,
        *,
        steps: int,
        published: torch.dtype,
        temperature: float = 1.0,
        seed: int = 0,
        release: bool = False,
    ) -> None:
        recipe = weights.recipe
        self.weights, self.algorithm, self.optim, self.temperature = weights, algorithm, optim, temperature
        self.parameters = Parameters(
            weights.layout,
            tensors,
            published=published,
            compute=recipe.dtype,
            device=recipe.device,
            lora=weights.lora,
            seed=seed,
        )
        self.optimizer = AdamW(self.parameters.masters, optim, steps=steps)
        self.reference = self._reference() if algorithm.needs_reference else None
        self._origin = self._fingerprint()
        self._hold = Hold()
        self._release = release and weights.lora is None and not optim.checkpointing
        self._current: WeightsId | None = None

    def publish(self, weights_id: WeightsId) -> None:
        """The masters, as exported now, have this id; the forward's weights become them."""
        self._current = weights_id
        self._fresh()

    def _fresh(self) -> ModelWeights:
        """Weights equal to the published masters; after an optimizer step nobody has published they are rebuilt."""
        if self._current is None or self.weights.weights_id != self._current:
            self._current = self._current or WeightsId("unpublished")
            first = self.weights.weights_id == ""
            self.weights.update(
                self._current, self.every_tensor() if first and self.weights.lora else self.export()
            )
        return self.weights

    def _reference(self) -> ModelWeights:
        """The initial weights, without adapters: what a KL term holds on to."""
        reference = ModelWeights(self.weights.arch, self.weights.recipe)
        base = self.export() if self.weights.lora is None else self.frozen()
        reference.update(WeightsId("reference"), base)
        return reference

    def logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        return self._logprobs(self._fresh(), samples)

    def reference_logprobs(self, samples: Sequence[Sample]) -> list[np.ndarray]:
        """As ``logprobs``, under the initial weights; only for an algorithm that needs a reference."""
        assert self.reference is not None, "the algorithm declared no need of a reference"
        return self._logprobs(self.reference, samples)

    def _logprobs(self, weights: ModelWeights, samples: Sequence[Sample]) -> list[np.ndarray]:
        """Log-probs of trained tokens, float32 [S] per sample, 0 elsewhere."""
        out = [np.zeros(len(s.ids_S), np.float32) for s in samples]
        with torch.inference_mode():
            for micro in self._microbatches(range(len(samples)), samples):
                packing = self._pack([samples[i] for i in micro])
                head = self._head(weights, packing, Forward())
                found, _ = head.log_probs(keep=False)
                for i, where, values in zip(micro, packing.where, _per_sample(packing, found), strict=True):
                    out[i][where] = values
        return out

    def forward_backward(self, batch: Batch) -> TrainStats:
        """Accumulate the gradients of ``batch``; the sum over micro-batches is the whole batch's loss."""
        return self._forward_backward(batch, release=self._release)

    def accumulated(self) -> Mapping[str, torch.Tensor]:
        """The gradients that the next ``step`` will apply, fp32 by fused key; live, not to be written to."""
        return self.parameters.grads

    def gradient(self, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The gradients of ``batch`` by itself, fp32 by fused key; what is accumulated stays as it is."""
        kept, self.parameters.grads = self.parameters.grads, {}
        try:
            self._forward_backward(batch, release=False)
            return self.parameters.grads
        finally:
            self.parameters.grads = kept

    def _forward_backward(self, batch: Batch, *, release: bool) -> TrainStats:
        weights = self._fresh()
        total = _Totals()
        micros = self._microbatches(range(len(batch.samples)), batch.samples)
        for micro in micros:
            last = micro is micros[-1]
            samples = [batch.samples[i] for i in micro]
            self._micro_step(weights, samples, total, release=release and last)
        return total.stats()

    def _micro_step(
        self, weights: ModelWeights, samples: list[Sample], total: _Totals, *, release: bool
    ) -> None:
        packing = self._pack(samples)
        if not len(packing.targets_M):
            return
        ops = Graph(self.parameters, checkpointing=self.optim.checkpointing)
        hidden = self._hidden(weights, packing, ops)
        with torch.no_grad():
            head = Head(weights, hidden.detach(), packing.targets_M, self.temperature)
            found, entropy = head.log_probs(entropy=self.algorithm.needs_entropy)
        found.requires_grad_()
        if entropy is not None:
            entropy.requires_grad_()
        inputs = self._inputs(samples, packing, found, entropy)
        loss, figures = self.algorithm.loss(inputs)
        wanted = [found] if entropy is None else [found, entropy]
        grads = torch.autograd.grad(loss, wanted, allow_unused=True)
        total.add(loss, figures, inputs, packing)
        total.note_gaps(samples, inputs)
        if all(g is None or not g.any() for g in grads):
            return
        if release and head.kept:
            weights.release()
        with torch.no_grad():
            dlogp = torch.zeros_like(found) if grads[0] is None else grads[0]
            dhidden = head.backward(dlogp, grads[1] if entropy is not None else None, self.parameters)
        torch.autograd.backward(hidden, dhidden)
        ops.finish()

    def step(self, step: int) -> StepStats:
        """Apply the accumulated gradients at the rate of loop step ``step`` (from 1)."""
        began = time.monotonic()
        with self._hold.taken(f"the optimizer's step {step}"):
            waited = time.monotonic() - began
            self.parameters.changed()
            stats = self.optimizer.step(self.parameters.grads, step=step)
            self._current = None
        return msgspec.structs.replace(stats, waited_s=waited)

    def snapshot(self) -> StateSnapshot:
        """Hold the state as it is after the last step; the next one waits until it is written or closed."""
        self._hold.take("a snapshot")
        return StateSnapshot(self._header(), self._state, self._hold)

    def save(self, folder: Path) -> tuple[Path, ...]:
        with self.snapshot() as held:
            return held.write(folder)

    def load(self, folder: Path) -> None:
        """Go on from a saved state. The reference and an adapter's base are those this trainer was built with,
        which the header is held to."""
        with self._hold.taken("loading a training state"), torch.no_grad():
            header = read_header(folder, self._header())
            read_state(folder, header, dict(self._state()))
            self.optimizer.resume(
                updates=header.updates, skipped=header.skipped, skips_in_a_row=header.skips_in_a_row
            )
            self.parameters.grads.clear()
            self.parameters.changed()
            self._current = None

    def _header(self) -> Header:
        return Header(
            algorithm=self.algorithm.name,
            lora=self.weights.lora,
            origin=self._origin,
            updates=self.optimizer.updates,
            skipped=self.optimizer.skipped,
            skips_in_a_row=self.optimizer.skips_in_a_row,
        )

    def _state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Masters and moments, live, as KIND/NAME."""
        for kind, fused in {"masters": self.parameters.masters, **self.optimizer.moments()}.items():
            for name, tensor in self.parameters.canonical(fused):
                yield f"{kind}/{name}", tensor

    def _fingerprint(self) -> str:
        """Of the initial weights, where later steps depend on them: an adapter's base, a KL term's reference."""
        if self.weights.lora is not None:
            return digest(self.frozen())
        return digest(self.export()) if self.reference is not None else ""

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.parameters.export()

    def frozen(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Base tensors that training never changes (LoRA); part of a weights id, published once."""
        return self.parameters.frozen()

    def every_tensor(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.frozen()
        yield from self.export()

    def _pack(self, samples: Sequence[Sample]) -> Packing:
        return Packing(samples, share=self.optim.share_prompt, device=self.weights.recipe.device)

    def _hidden(self, weights: ModelWeights, packing: Packing, ops: Forward) -> torch.Tensor:
        attend = group_attention(packing, weights.arch, weights.recipe)
        x = hidden_states(weights, packing.ids_N, packing.positions_N, attend, ops)
        return ops.norm(x[packing.rows_M], weights.norm, weights.arch.norm_eps)

    def _head(self, weights: ModelWeights, packing: Packing, ops: Forward) -> Head:
        return Head(weights, self._hidden(weights, packing, ops), packing.targets_M, self.temperature)

    def _microbatches(self, order: Iterable[int], samples: Sequence[Sample]) -> list[list[int]]:
        """Samples in order, cut where the tokens computed would exceed the budget; a sample is never split."""
        micros: list[list[int]] = []
        room, prompts = 0, set()
        for i in order:
            sample = samples[i]
            key = (sample.group_id, sample.prompt_P.tobytes())
            cost = len(sample.ids_S) + (
                0 if self.optim.share_prompt and key in prompts else len(sample.prompt_P)
            )
            if not micros or cost > room:
                micros.append([])
                room, prompts = self.optim.tokens_per_microbatch, set()
                cost = sample.tokens
            micros[-1].append(i)
            prompts.add(key)
            room -= cost
        return micros

    def _inputs(
        self, samples: list[Sample], packing: Packing, found: torch.Tensor, entropy: torch.Tensor | None
    ) -> LossInputs:
        def gather(name: str) -> torch.Tensor | None:
            arrays = [getattr(s, name) for s in samples]
            if any(a is None for a in arrays):
                return None
            picked = [a[w] for a, w in zip(arrays, packing.where, strict=True)]
            return torch.from_numpy(np.concatenate(picked).astype(np.float32)).to(found.device)

        rollout = gather("logprobs_S")
        anchor = gather("anchor_S")
        advantages, weights = gather("advantages_S"), gather("weights_S")
        assert rollout is not None and advantages is not None and weights is not None
        return LossInputs(
            logprobs_N=found,
            rollout_N=rollout,
            anchor_N=rollout if anchor is None else anchor,
            advantages_N=advantages,
            weights_N=weights,
            mask_N=torch.ones_like(weights),
            sequence_N=packing.sequence_M,
            sequences=len(samples),
            reference_N=gather("reference_S"),
            entropy_N=entropy,
        )


def build(parts: TrainerParts) -> TorchTrainer:
    """The built-in trainer, alone with its weights while it trains; entry point ``torch`` of ``croze.train``."""
    return TorchTrainer(
        parts.weights,
        parts.weights.layout.checked(read_tensors(parts.files.path), str(parts.files.path)),
        parts.algorithm,
        parts.optim,
        steps=parts.steps,
        published=parts.published,
        temperature=parts.temperature,
        seed=parts.seed,
        release=True,
    )


def lora_spec(lora: Lora) -> LoraSpec | None:
    """The adapter a declaration asks for; None trains all weights."""
    if lora.rank == 0:
        return None
    return LoraSpec(rank=lora.rank, scale=lora.alpha / lora.rank, targets=lora.targets)


def _per_sample(packing: Packing, values_M: torch.Tensor) -> list[np.ndarray]:
    return np.split(values_M.cpu().numpy(), np.cumsum([len(w) for w in packing.where])[:-1])


class _Totals:
    """Figures summed over micro-batches."""

    def __init__(self) -> None:
        self.loss = self.k3 = 0.0
        self.gaps: dict[str, float] = {}
        self.computed = self.trained = 0
        self.figures: dict[str, float] = {}

    def add(
        self, loss: torch.Tensor, figures: dict[str, float], inputs: LossInputs, packing: Packing
    ) -> None:
        with torch.no_grad():
            log_ratio = inputs.logprobs_N - inputs.rollout_N
            self.k3 += float((log_ratio.clamp(max=20.0).exp() - 1 - log_ratio).sum())
        self.loss += float(loss.detach())
        self.computed += packing.tokens
        self.trained += len(packing.targets_M)
        for name, value in figures.items():
            self.figures[name] = self.figures.get(name, 0.0) + value

    def note_gaps(self, samples: Sequence[Sample], inputs: LossInputs) -> None:
        """The largest |trainer - sampler| log-prob of each sample, under its rollout."""
        with torch.no_grad():
            gap_N = (inputs.logprobs_N - inputs.rollout_N).abs()
            # a sample without trained tokens keeps -1, and has no gap
            largest = gap_N.new_full((len(samples),), -1.0).scatter_reduce(
                0, inputs.sequence_N, gap_N, "amax"
            )
        for sample, gap in zip(samples, largest.tolist(), strict=True):
            if gap != -1.0:
                before = self.gaps.get(sample.rollout_id, 0.0)
                self.gaps[sample.rollout_id] = float(np.maximum(before, gap))  # nan stays nan

    def stats(self) -> TrainStats:
        return TrainStats(
            loss=self.loss,
            figures=self.figures,
            tokens_computed=self.computed,
            tokens_trained=self.trained,
            max_logprob_gap=float(np.max([*self.gaps.values()], initial=0.0)),
            kl_rollout=self.k3 / max(self.trained, 1),
            gaps=self.gaps,
        )

"""Groups with random token records, and a trainer in miniature: samples to loss and gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from croze.train.protocol import Algorithm, LossInputs
from croze.types import Batch, Group, Outcome, Rollout, Sample, Task

Arrays = dict[str, np.ndarray]


@dataclass
class Case:
    """Groups, and per rollout id what the trainer would compute over its suffix tokens (float32 [S])."""

    groups: list[Group] = field(default_factory=list)
    current: Arrays = field(default_factory=dict)
    anchor: Arrays = field(default_factory=dict)
    reference: Arrays = field(default_factory=dict)
    entropy: Arrays = field(default_factory=dict)

    @property
    def rollouts(self) -> list[Rollout]:
        return [r for g in self.groups for r in g.rollouts]


@dataclass
class Evaluated:
    loss: float
    gradients: Arrays
    entropy_gradients: Arrays
    figures: dict[str, float]


def make_rollout(
    group_id: str,
    member: int,
    *,
    score: float = 0.0,
    valid: bool = True,
    mask: Sequence[bool] = (True, True),
    logprobs: Sequence[float] | None = None,
    prompt: Sequence[int] = (1, 2, 3),
    **fields: object,
) -> Rollout:
    mask_S = np.array(mask, dtype=bool)
    logprobs_S = (
        np.where(mask_S, np.float32(-1.0), np.float32(np.nan)) if logprobs is None else np.array(logprobs)
    )
    outcome = Outcome(score=score) if valid else Outcome(valid=False, fault="infra")
    rollout = Rollout(
        id=f"{group_id}/{member}",
        group_id=group_id,
        member=member,
        attempt=0,
        task=Task(id="t", prompt="p"),
        step=1,
        prompt_tokens=len(prompt),
        ids_T=np.array([*prompt, *range(10, 10 + len(mask_S))], dtype=np.int32),
        logprobs_T=np.concatenate([np.full(len(prompt), np.nan), logprobs_S]).astype(np.float32),
        mask_T=np.concatenate([np.zeros(len(prompt), dtype=bool), mask_S]),
        turns=(),
        weights=(),
        finish="stop",
        reply="",
        outcome=outcome,
    )
    return msgspec.structs.replace(rollout, **fields) if fields else rollout


def make_group(group_id: str, scores: Sequence[float], **fields: object) -> Group:
    rollouts = tuple(make_rollout(group_id, i, score=s, **fields) for i, s in enumerate(scores))  # type: ignore[arg-type]
    return Group(id=group_id, task=Task(id="t", prompt="p"), step=1, rollouts=rollouts)


def random_case(
    seed: int, *, groups: int = 4, siblings: int = 4, invalid: float = 0.15, spread: float = 0.3
) -> Case:
    """``spread``: standard deviation, in nats, of the current log-probs around the sampler's."""
    rng = np.random.default_rng(seed)
    case = Case()
    for g in range(groups):
        members = []
        for m in range(int(rng.integers(1, siblings + 1)) if g else siblings):
            length = int(rng.integers(1, 7))
            mask = rng.random(length) < 0.75
            mask[int(rng.integers(length))] = True
            sampled = -rng.exponential(1.0, length) - 0.01
            rollout = make_rollout(
                f"g{g}",
                m,
                score=float(rng.choice([0.0, 0.1, 1.0, rng.normal()])),
                valid=bool(rng.random() >= invalid),
                mask=[bool(b) for b in mask],
                logprobs=np.where(mask, sampled, np.nan).tolist(),
            )
            members.append(rollout)
            for name, by_id in (
                ("current", case.current),
                ("anchor", case.anchor),
                ("reference", case.reference),
            ):
                noise = rng.normal(0.0, spread * (0.5 if name == "anchor" else 1.0), length)
                by_id[rollout.id] = (sampled + noise).astype(np.float32)
            case.entropy[rollout.id] = rng.exponential(1.0, length).astype(np.float32)
        task = Task(id=f"t{g}", prompt="p")
        case.groups.append(Group(id=f"g{g}", task=task, step=1, rollouts=tuple(members)))
    return case


def evaluate(
    algorithm: Algorithm, batch: Batch, case: Case, splits: Sequence[Sequence[int]] | None = None
) -> Evaluated:
    """Loss and gradients of a batch, its samples cut into micro-batches as ``splits`` (indices) says."""
    result = Evaluated(0.0, {}, {}, {})
    for indices in splits if splits is not None else [range(len(batch.samples))]:
        samples = [batch.samples[i] for i in indices]
        if samples:
            _evaluate(algorithm, samples, case, result)
    return result


def _evaluate(algorithm: Algorithm, samples: list[Sample], case: Case, result: Evaluated) -> None:
    ids = [s.rollout_id for s in samples]
    logprobs_N = _flat(case.current, ids).requires_grad_()
    entropy_N = _flat(case.entropy, ids).requires_grad_()
    own_anchor = {s.rollout_id: s.anchor_S for s in samples if s.anchor_S is not None}
    inputs = LossInputs(
        logprobs_N=logprobs_N,
        rollout_N=_cat([s.logprobs_S for s in samples]),
        anchor_N=_flat(case.anchor if algorithm.recompute_anchor else own_anchor, ids),
        advantages_N=_cat([s.advantages_S for s in samples]),
        weights_N=_cat([s.weights_S for s in samples]),
        mask_N=_cat([s.mask_S for s in samples]).float(),
        sequence_N=torch.repeat_interleave(
            torch.arange(len(samples)), torch.tensor([len(s.ids_S) for s in samples])
        ),
        sequences=len(samples),
        reference_N=_flat(case.reference, ids) if algorithm.needs_reference else None,
        entropy_N=entropy_N if algorithm.needs_entropy else None,
    )
    loss, figures = algorithm.loss(inputs)
    loss.backward()
    result.loss += loss.item()
    for name, value in figures.items():
        result.figures[name] = result.figures.get(name, 0.0) + value
    lengths = [len(s.ids_S) for s in samples]
    for leaf, into in ((logprobs_N, result.gradients), (entropy_N, result.entropy_gradients)):
        grad_N = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert grad_N.dtype == torch.float32
        into.update(zip(ids, (g.numpy() for g in grad_N.split(lengths)), strict=True))


def _flat(by_id: Mapping[str, np.ndarray], ids: list[str]) -> torch.Tensor:
    return _cat([by_id[i] for i in ids])


def _cat(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))

"""AdamW on fp32 masters: schedule, global-norm clipping, and an update that is either whole or not done."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from croze.config import Optim
from croze.errors import CheckFailed, ConfigError, InvariantViolated
from croze.train.protocol import StepStats

MAX_SKIPS = 5
"""Updates in a row that may be skipped; a run whose gradients stay non-finite has stopped learning."""

BUCKET_ELEMENTS = 1 << 25
"""Gradients are cast to fp32 and applied in buckets of about this many elements (128 MiB), then freed."""

NORM_ROW = 512
"""A float32 sum of squares drifts (1e-3 at 2e7 elements); rows of this many are added up in float64."""

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Learning rate as a pure function of the step (from 1), so that a resumed run needs no state for it.

    Warm-up: step k of W has ``peak * k / W``. After it ``constant`` stays; ``linear`` and ``cosine`` start at
    the peak at step W + 1 and reach 0 just after the last step, so that no step is without effect. W >= steps
    is all warm-up.
    """

    kind: str
    peak: float
    warmup_steps: int
    steps: int

    def lr(self, step: int) -> float:
        assert step >= 1, "steps count from 1"
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.kind == "constant":
            return self.peak
        span = max(self.steps - self.warmup_steps, 1)
        done = min((step - self.warmup_steps - 1) / span, 1.0)
        if self.kind == "linear":
            return self.peak * (1.0 - done)
        return self.peak * 0.5 * (1.0 + math.cos(math.pi * done))


class AdamW:
    """AdamW (arXiv:1711.05101) over named fp32 tensors, updated in place; matrices decay, vectors do not.

    A gradient whose global norm is not finite changes nothing: the step is reported as skipped, and after
    ``MAX_SKIPS`` in a row ``CheckFailed`` is raised. The update itself is torch's, its fused kernel; torch's optimizer
    class is not used, because its first use imports torch._dynamo: a CPU-second of every start.
    """

    def __init__(self, masters: Mapping[str, torch.Tensor], optim: Optim, *, steps: int) -> None:
        check(optim)
        for name, master in masters.items():
            assert master.dtype == torch.float32 and master.is_leaf, f"{name} is no fp32 master"
        self.masters = dict(masters)
        self.optim = optim
        self.schedule = Schedule(
            kind=optim.schedule, peak=optim.lr, warmup_steps=optim.warmup_steps, steps=steps
        )
        self.skips_in_a_row = 0
        self.skipped = 0
        self._states = {
            name: _State(
                step=torch.zeros((), dtype=torch.float32, device=master.device),
                exp_avg=torch.zeros_like(master),
                exp_avg_sq=torch.zeros_like(master),
            )
            for name, master in self.masters.items()
        }

    def step(self, grads: MutableMapping[str, torch.Tensor], *, step: int) -> StepStats:
        """Apply ``grads`` (name -> gradient, any float dtype) at the rate of loop step ``step``.

        Takes the gradients over: they may be scaled in place, and ``grads`` is empty afterwards, whatever
        happens. A master without an entry has a gradient of 0, exactly as if its zeros had been passed.
        """
        odd = [name for name, grad in grads.items() if self._shape(name) != grad.shape]
        if odd:
            grads.clear()
            raise InvariantViolated(f"gradients that fit no master: {', '.join(odd[:3])}", where="optimizer")
        lr = self.schedule.lr(step)
        norm = global_norm(grads.values())
        if not math.isfinite(norm):
            grads.clear()
            return self._skip(norm, lr, step)
        self.skips_in_a_row = 0
        scale = self.optim.clip / norm if 0.0 < self.optim.clip < norm else 1.0
        for bucket in self._buckets():
            self._apply(bucket, grads, scale, lr)
        return StepStats(grad_norm=norm, lr=lr)

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """exp_avg and exp_avg_sq, each by master's name; the live tensors, not copies."""
        return {kind: {name: getattr(s, kind) for name, s in self._states.items()} for kind in MOMENTS}

    @property
    def updates(self) -> int:
        """Updates applied; skipped ones are none."""
        return next((int(state.step) for state in self._states.values()), 0)

    def resume(self, *, updates: int, skipped: int, skips_in_a_row: int) -> None:
        """Go on from these counts; masters and moments are written in place by the caller."""
        self.skipped, self.skips_in_a_row = skipped, skips_in_a_row
        for state in self._states.values():
            state.step.fill_(updates)

    def _shape(self, name: str) -> torch.Size | None:
        return self.masters[name].shape if name in self.masters else None

    def _skip(self, norm: float, lr: float, step: int) -> StepStats:
        self.skipped += 1
        self.skips_in_a_row += 1
        if self.skips_in_a_row >= MAX_SKIPS:
            raise CheckFailed(
                f"the gradient was not finite {self.skips_in_a_row} times in a row, last with norm {norm}",
                where=f"optimizer, step {step}",
                fix="lower optim.lr, or look at the rewards and log-probs of these steps",
            )
        return StepStats(grad_norm=norm, lr=lr, skipped=True)

    def _buckets(self) -> Iterator[list[str]]:
        bucket: list[str] = []
        elements = 0
        for name, master in self.masters.items():
            bucket.append(name)
            elements += master.numel()
            if elements >= BUCKET_ELEMENTS:
                yield bucket
                bucket, elements = [], 0
        if bucket:
            yield bucket

    def _apply(
        self, bucket: list[str], grads: MutableMapping[str, torch.Tensor], scale: float, lr: float
    ) -> None:
        ready: dict[str, torch.Tensor] = {}
        for name in bucket:
            grad = grads.pop(name, None)
            grad = torch.zeros_like(self.masters[name]) if grad is None else grad.detach().to(torch.float32)
            ready[name] = grad if scale == 1.0 else grad.mul_(scale)
        matrices = [name for name in bucket if self.masters[name].ndim >= 2]
        vectors = [name for name in bucket if self.masters[name].ndim < 2]
        for names, weight_decay in ((matrices, self.optim.weight_decay), (vectors, 0.0)):
            if names:
                self._update(names, ready, lr, weight_decay)

    @torch.no_grad()
    def _update(
        self, names: list[str], grads: Mapping[str, torch.Tensor], lr: float, weight_decay: float
    ) -> None:
        states = [self._states[name] for name in names]
        adamw(
            [self.masters[name] for name in names],
            [grads[name] for name in names],
            [s.exp_avg for s in states],
            [s.exp_avg_sq for s in states],
            [],
            [s.step for s in states],
            fused=True,
            amsgrad=False,
            beta1=self.optim.betas[0],
            beta2=self.optim.betas[1],
            lr=lr,
            weight_decay=weight_decay,
            eps=self.optim.eps,
            maximize=False,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What the update keeps of one master. ``step``: how often it was applied, a scalar that the kernel counts up."""

    step: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


def global_norm(grads: Iterable[torch.Tensor]) -> float:
    """L2 norm over all gradients together; NaN or infinite if any entry is. One host sync."""
    squares = [_square_sum(grad.detach()) for grad in grads]
    if not squares:
        return 0.0
    return math.sqrt(torch.stack(squares).sum().item())


def _square_sum(grad: torch.Tensor) -> torch.Tensor:
    flat = grad.reshape(-1)
    whole = flat.numel() // NORM_ROW * NORM_ROW
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, NORM_ROW), dim=1, dtype=torch.float32)
    tail = torch.linalg.vector_norm(flat[whole:], dtype=torch.float64)
    return rows.double().square().sum() + tail.square()


def check(optim: Optim) -> None:
    """Refuse values that make no optimizer."""
    wants = {
        "lr": ("finite and at least 0", 0.0 <= optim.lr < math.inf),
        "warmup_steps": ("at least 0", optim.warmup_steps >= 0),
        "betas": ("both from 0 to below 1", all(0.0 <= beta < 1.0 for beta in optim.betas)),
        "eps": ("finite and above 0", 0.0 < optim.eps < math.inf),
        "weight_decay": ("finite and at least 0", 0.0 <= optim.weight_decay < math.inf),
        "clip": ("finite and at least 0 (0 does not clip)", 0.0 <= optim.clip < math.inf),
        "minibatches": ("at least 1", optim.minibatches >= 1),
        "tokens_per_microbatch": ("at least 1", optim.tokens_per_microbatch >= 1),
    }
    for field, (wanted, holds) in wants.items():
        if not holds:
            value = getattr(optim, field)
            raise ConfigError(f"optim.{field} must be {wanted}, got {value}", where=f"optim.{field}")

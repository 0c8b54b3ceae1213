"""``replay``: a recorded step made again on this machine, and held against what the run logged.

No torch here: wrong use is told before it is imported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from croze.errors import UsageError
from croze.loop.interrupt import run_cancellable
from croze.loop.records import Difference, Records

OnEvent = Callable[[dict[str, Any]], None]
SAMPLES = 64
"""Samples of an optimizer batch whose gradients are computed one by one."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure of the step: as the run logged it (None: not measured), and as it is now."""

    name: str
    recorded: Any
    replayed: Any
    equal: bool


class Weights(msgspec.Struct, frozen=True, kw_only=True):
    """Where the weights before the step come from: those of ``from_step`` (``checkpoint`` None: the model as it
    began) and the steps from there, made again. ``equal``: each of ``steps`` gave the weights the ledger has."""

    from_step: int
    checkpoint: str | None
    passed_over: dict[str, str]
    steps: list[int]
    equal: bool


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Groups of the step, by id where there is something to say: all members' scores equal (``zero_variance``), too
    few of them valid (``dropped``)."""

    count: int
    trained: int
    zero_variance: list[str]
    dropped: list[str]


class AdvantageFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Over the rollouts in the loss; None without any."""

    count: int
    mean: float | None
    std: float | None
    min: float | None
    max: float | None


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens in the loss, those of them that the clip binds, and tokens computed."""

    trained: int
    clipped: int
    computed: int


class SampleShare(msgspec.Struct, frozen=True, kw_only=True):
    """A sample's part in the gradient g of its optimizer ``batch`` (from 1).

    ``share`` g_i . g / |g|^2, of which those of a batch add up to 1; ``cosine`` between g_i and g; ``grad_norm``
    |g_i|. None where it was not measured; the first two also where samples cancel and g is nothing. ``loss``: its
    tokens' part of the loss; ``max_gap``: its largest |trainer's - sampler's| log-prob, nats.
    """

    rollout_id: str
    group_id: str
    batch: int
    share: float | None
    cosine: float | None
    grad_norm: float | None
    score: float
    advantage: float
    tokens: int
    clipped: int
    loss: float
    max_gap: float
    reply: str


class Rest(msgspec.Struct, frozen=True, kw_only=True):
    """The samples whose gradients were not computed one by one, and what of 1 per batch is left to them."""

    samples: int
    share: float | None


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """A token of a rollout. Log-probs in nats; ``gap`` trainer's - sampler's; ``loss`` its part of the loss;
    ``gradient`` d loss / d its log-prob. None where there is no such thing: prompts, tokens not in the loss."""

    position: int
    token_id: int
    text: str
    producer: str
    trained: bool
    sampler_logprob: float | None = None
    trainer_logprob: float | None = None
    gap: float | None = None
    ratio: float | None = None
    advantage: float | None = None
    weight: float | None = None
    clipped: bool | None = None
    loss: float | None = None
    gradient: float | None = None


class SampleTokens(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout, token by token. ``state``: what became of it; ``reason``: why, where it was not trained."""

    rollout_id: str
    group_id: str
    task_id: str
    state: str
    reason: str
    score: float | None
    prompt_tokens: int
    tokens: list[TokenRow]


class Numerics(msgspec.Struct, frozen=True, kw_only=True):
    """Something of the arithmetic that is not here what it was in the run."""

    name: str
    recorded: Any
    here: Any


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """A step made again.

    ``verdict``: "exact", every figure bit for bit what the run had; "close", the arithmetic is other than the run's
    (``numerics``), or not exact, and what follows from it is near; "differs", else. ``causes``: what is likely behind
    it.
    """

    event: Literal["replay"] = "replay"
    run_dir: str
    step: int
    verdict: Literal["exact", "close", "differs"]
    causes: list[str]
    figures: list[Figure]
    differences: list[Difference]
    numerics: list[Numerics]
    weights: Weights
    groups: GroupFigures
    advantages: AdvantageFigures
    tokens: TokenCount
    samples: list[SampleShare]
    rest: Rest
    sample: SampleTokens | None


def replay(
    folder: str | Path,
    step: int,
    *,
    samples: int = SAMPLES,
    sample: str | None = None,
    model: str | None = None,
    on_event: OnEvent | None = None,
) -> Replayed:
    """Make ``step`` of the run in ``folder`` again from its records, and compare. Nothing is written to the folder.

    ``samples``: how many samples of each optimizer batch have their gradients computed one by one, those that the
    loss pulls at most. ``sample``: a rollout's id, to be given token by token. ``model``: where the run's model lies
    now, if it moved. Raises UsageError for a step that is not on record, CheckFailed for records that cannot be used.
    """
    if samples < 0:
        raise UsageError("the number of samples cannot be negative", where="--samples")
    records = Records(Path(folder))
    records.check(step)
    if sample is not None:
        _check_sample(records, step, sample)
    from croze.loop.compare import compared
    from croze.loop.remake import remake

    made = run_cancellable(
        remake(records, step, most=samples, chosen=sample, model=model, tell=on_event or _silent)
    )
    return compared(records, made, sample)


def _check_sample(records: Records, step: int, name: str) -> None:
    from croze.config import suggest

    names = [entry.rollout_id for entry in records.entries.get(step, ())]
    if name not in names:
        raise UsageError(
            f"step {step} has no rollout {name!r}",
            where="--sample",
            fix=suggest(name, names) or f"croze trace {records.path} --where 'step = {step}' lists them",
        )


def _silent(_: dict[str, Any]) -> None:
    """Nobody listens."""

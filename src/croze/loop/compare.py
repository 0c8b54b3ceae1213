"""A step made again, held against what the run had: figures, rollouts, weights, and why they differ where they do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from croze.loop.collect import Collected
from croze.loop.figures import Timing, step_event
from croze.loop.folder import numerics_at
from croze.loop.records import Difference, Records
from croze.loop.remake import Remade
from croze.loop.replay import (
    AdvantageFigures,
    Figure,
    GroupFigures,
    Numerics,
    Replayed,
    Rest,
    SampleShare,
    SampleTokens,
    TokenCount,
    TokenRow,
    Weights,
)
from croze.loop.shares import Share
from croze.types import Rollout

FIGURES = (
    "weights_id",
    "loss",
    "grad_norm",
    "lr",
    "updates_skipped",
    "kl_rollout",
    "max_logprob_gap",
    "reward_mean",
    "reward_std",
    "groups_trained",
    "tokens",
    "tokens_computed",
)
"""What of a step's event follows from its records and weights; the rest is time and memory."""
NUMERIC = {"weights_id", "loss", "grad_norm", "kl_rollout", "max_logprob_gap"}
"""Figures that other arithmetic changes."""
RECORD = {
    "record",
    "logprob",
    "score",
    "validity",
    "prompt_tokens",
    "generated_tokens",
    "weights_id",
    "group",
}
"""Differences that tell of a record that was changed."""
NEAR, NEAR_LOSS = 0.05, 0.01
"""How far other arithmetic may move loss and gradient norm, as a part of them, and the loss in its own unit."""
NOTHING = Timing(
    started=0.0, trained=(0.0, 0.0), published=(0.0, 0.0), saved=(0.0, 0.0), cpu_s=0.0, peak_mib=0.0
)


def compared(records: Records, made: Remade, sample: str | None) -> Replayed:
    """The whole account of a replay; ``sample``: the rollout to be told token by token."""
    recorded, learned = made.recorded, made.learned
    figures, numerics = _figures(made), _numerics(records, made)
    differences = [*_weights(records, made), *recorded.odd, *_tokens(made, numerics), *_rollouts(made)]
    close = _close(figures, differences, other=bool(numerics or made.doubt))
    exact = all(f.equal for f in figures) and not differences
    return Replayed(
        run_dir=str(records.path),
        step=recorded.step,
        verdict="exact" if exact else "close" if close else "differs",
        causes=[] if exact else _causes(made, figures, differences, numerics),
        figures=figures,
        differences=differences,
        numerics=numerics,
        weights=Weights(
            from_step=made.before.step,
            checkpoint=made.before.checkpoint,
            passed_over=made.before.passed_over,
            steps=list(made.between),
            equal=not any(d.what in ("start", "weights") for d in differences),
        ),
        groups=_groups(made),
        advantages=_advantages(made),
        tokens=TokenCount(
            trained=sum(s.tokens_trained for s in learned.stats),
            clipped=sum(int(s.figures.clipped_n.sum()) for s in made.shares),
            computed=sum(s.tokens_computed for s in learned.stats),
        ),
        samples=_samples(made),
        rest=_rest(made.shares),
        sample=None if sample is None else _sample(made, sample),
    )


def _figures(made: Remade) -> list[Figure]:
    recorded = made.recorded
    collected = Collected(
        step=recorded.step,
        groups=recorded.groups,
        rollouts=recorded.rollouts,
        generated_at=0.0,
        judged_at=0.0,
        last_span=None,
    )
    now, then = step_event(collected, made.learned, made.weights_id, NOTHING), recorded.event
    figures = [_figure(name, then[name], now[name]) for name in FIGURES if name in then]
    told, found = then.get("per_token", {}), now["per_token"]
    return figures + [
        _figure(f"per_token.{name}", told.get(name), found.get(name))
        for name in dict.fromkeys([*told, *found])
    ]


def _figure(name: str, recorded: Any, replayed: Any) -> Figure:
    return Figure(name=name, recorded=recorded, replayed=replayed, equal=_same(recorded, replayed))


def _same(recorded: Any, replayed: Any) -> bool:
    """Whether both are the same; what is not finite is null on record."""
    if isinstance(replayed, float) and not math.isfinite(replayed):
        return recorded is None or (isinstance(recorded, float) and not math.isfinite(recorded))
    return recorded == replayed


def _numerics(records: Records, made: Remade) -> list[Numerics]:
    then = numerics_at(records.config, made.recorded.step)
    return [
        Numerics(name=name, recorded=then.get(name), here=here)
        for name, here in made.numerics.items()
        if then.get(name) != here
    ]


def _weights(records: Records, made: Remade) -> Iterator[Difference]:
    """Weights that are not what the run had: where the replay starts, and on the way to the step."""
    recorded, before, commits = made.recorded, made.before, records.commits
    if recorded.event["weights_id"] != recorded.weights_id:
        note = "metrics.jsonl and the ledger name other weights"
        where = f"step {recorded.step}"
        yield _difference("record", where, recorded.event["weights_id"], recorded.weights_id, note)
    ours = {commits[before.step].weights_id} if before.step else made.served
    if before.weights_id not in ours:
        note = "the model, or the checkpoint over it, is not what the run had"
        yield _difference("start", f"step {before.step}", ", ".join(sorted(ours)), before.weights_id, note)
    for step, weights_id in made.between.items():
        if commits[step].weights_id != weights_id:
            note = "made again, it gives other weights"
            yield _difference("weights", f"step {step}", commits[step].weights_id, weights_id, note)


def _tokens(made: Remade, numerics: list[Numerics]) -> Iterator[Difference]:
    """Where sampler and trainer agree to the last bit: sampled tokens whose log-prob is not what the weights give."""
    gap, weights_id = (
        made.recorded.event.get("max_logprob_gap"),
        [made.before.weights_id, *made.between.values()][-1],
    )
    if numerics or gap not in (0.0, None) or not made.numerics["exact"]:
        return
    for rollout in made.recorded.rollouts:
        logprobs_S = made.logprobs.get(rollout.id)
        if logprobs_S is None or any(w.weights_id != weights_id for w in rollout.weights):
            continue
        cut = rollout.prompt_tokens
        other = np.flatnonzero((logprobs_S != rollout.logprobs_T[cut:]) & rollout.mask_T[cut:])
        if len(other):
            at = int(other[0])
            note = f"the log-prob at position {cut + at} is not what the weights give"
            note += f", nor are {len(other) - 1} behind it" if len(other) > 1 else ""
            then, now = float(rollout.logprobs_T[cut + at]), float(logprobs_S[at])
            yield _difference("logprob", rollout.id, then, now, note)


def _rollouts(made: Remade) -> Iterator[Difference]:
    """Advantages and gaps of rollouts, against those in the trace."""
    recorded, learned = made.recorded, made.learned
    for what, then, now in (
        ("advantage", recorded.advantages, learned.advantages),
        ("max_gap", recorded.gaps, learned.gaps),
    ):
        for name, value in then.items():
            if not _same(value, now.get(name)):
                yield _difference(what, name, value, now.get(name), "")


def _difference(what: str, where: str, recorded: Any, replayed: Any, note: str) -> Difference:
    return Difference(what=what, where=where, recorded=recorded, replayed=replayed, note=note)


def _close(figures: list[Figure], differences: list[Difference], *, other: bool) -> bool:
    """Whether ``other`` arithmetic, or arithmetic that is never twice the same, explains what differs."""
    if not other or any(d.what not in ("weights", "max_gap") for d in differences):
        return False
    for figure in figures:
        if figure.equal or figure.name.startswith("per_token."):
            continue
        if figure.name not in NUMERIC:
            return False
        if figure.name in ("loss", "grad_norm"):
            then, now = figure.recorded, figure.replayed
            if then is None or now is None:
                return False
            slack = NEAR * max(abs(then), abs(now)) + (NEAR_LOSS if figure.name == "loss" else 0.0)
            if not abs(then - now) <= slack:
                return False
    return True


def _causes(
    made: Remade, figures: list[Figure], differences: list[Difference], numerics: list[Numerics]
) -> list[str]:
    """What is likely behind the differences, the surest first."""
    unequal = {f.name for f in figures if not f.equal}
    places: dict[str, list[str]] = {}
    for d in differences:
        places.setdefault(d.what, []).append(d.where)
    changed = sorted({d.where for d in differences if d.what in RECORD})
    causes = []
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        told = f"the records of {', '.join(changed[:3])}{more}"
        causes.append(
            f"{told} were changed: they contradict the ledger, or the weights they are said to be from"
        )
    if "start" in places:
        causes.append("the model files are not those that the run began from")
    if "weights" in places and not (numerics or made.doubt):
        causes.append(f"the run is first left at {places['weights'][0]}: replay that step to see more")
    causes += [_other(n) for n in numerics]
    causes += [made.doubt] if made.doubt else []
    if "lr" in unequal:
        causes.append("optim.lr, its schedule or steps in config.json are not what the run had")
    if causes:
        return causes
    if "weights_id" not in unequal:
        return ["the step gives the same weights, so it was the same: what was logged of it was changed"]
    if "advantage" in places:
        return ["algo.* in config.json is not what the run had"]
    return [
        "options in config.json (optim.*, algo.*), croze itself or the processor are not what the run had"
    ]


def _other(n: Numerics) -> str:
    if n.name == "recipe":
        return "the shapes in which exact arithmetic is done (numerics.recipe in config.json) are not what they were"
    return f"the run computed with {n.name} {n.recorded}, this machine with {n.here}"


def _groups(made: Remade) -> GroupFigures:
    recorded = made.recorded
    kept = {g.id: [r.outcome.score for r in g.rollouts if r.outcome] for g in recorded.groups}
    every = dict.fromkeys(r.group_id for r in recorded.rollouts)
    return GroupFigures(
        count=len(every),
        trained=len(made.learned.groups),
        zero_variance=[name for name, scores in kept.items() if len(scores) > 1 and len(set(scores)) == 1],
        dropped=[name for name in every if name not in kept],
    )


def _advantages(made: Remade) -> AdvantageFigures:
    values = np.array(list(made.learned.advantages.values()), np.float64)
    told = {
        name: float(getattr(values, name)()) if len(values) else None
        for name in ("mean", "std", "min", "max")
    }
    return AdvantageFigures(count=len(values), **told)


def _samples(made: Remade) -> list[SampleShare]:
    """Samples by the weight of their share, those not measured last, by how strongly the loss pulls at them."""
    rollouts = {r.id: r for r in made.recorded.rollouts}
    ranked = sorted(made.shares, key=lambda s: (s.share is None, -abs(s.share or 0.0), -s.figures.pull))
    return [_sample_share(share, rollouts[share.sample.rollout_id]) for share in ranked]


def _sample_share(share: Share, rollout: Rollout) -> SampleShare:
    sample, figures = share.sample, share.figures
    where = figures.positions_n
    return SampleShare(
        rollout_id=rollout.id,
        group_id=rollout.group_id,
        batch=share.batch,
        share=share.share,
        cosine=share.cosine,
        grad_norm=share.norm,
        score=rollout.outcome.score if rollout.outcome else 0.0,
        advantage=float(sample.advantages_S[where[0]]),
        tokens=len(where),
        clipped=int(figures.clipped_n.sum()),
        loss=float(figures.loss_n.sum()),
        max_gap=float(np.abs(figures.logprobs_n - sample.logprobs_S[where]).max()),
        reply=rollout.reply,
    )


def _rest(shares: list[Share]) -> Rest:
    told = [s.share for s in shares if s.share is not None]
    batches = {s.batch for s in shares if s.share is not None}
    others = sum(s.norm is None for s in shares)
    return Rest(samples=others, share=len(batches) - math.fsum(told) if told else None)


def _sample(made: Remade, name: str) -> SampleTokens:
    recorded, entry = made.recorded, made.recorded.entries[name]
    (rollout,) = [r for r in recorded.rollouts if r.id == name]
    return SampleTokens(
        rollout_id=name,
        group_id=rollout.group_id,
        task_id=rollout.task.id,
        state=entry.state,
        reason=entry.reason,
        score=entry.score,
        prompt_tokens=rollout.prompt_tokens,
        tokens=_token_rows(made, rollout),
    )


def _token_rows(made: Remade, rollout: Rollout) -> list[TokenRow]:
    cut, texts = rollout.prompt_tokens, made.recorded.texts.get(rollout.id)
    lossy = {
        cut + at: told
        for share in made.shares
        if share.sample.rollout_id == rollout.id
        for at, told in _in_loss(share)
    }
    rows = []
    for position, token in enumerate(rollout.ids_T.tolist()):
        trained = bool(rollout.mask_T[position])
        sampler = float(rollout.logprobs_T[position])
        trainer = float(made.logprobs[rollout.id][position - cut]) if trained else None
        told: dict[str, Any] = {"trainer_logprob": trainer, **lossy.get(position, {})}
        if trained:
            told |= {"sampler_logprob": sampler, "gap": told["trainer_logprob"] - sampler}
        rows.append(
            TokenRow(
                position=position,
                token_id=token,
                text=texts[position] if texts is not None else made.spell(token),
                producer=next((t.producer for t in rollout.turns if t.start <= position < t.end), ""),
                trained=position in lossy,
                **told,
            )
        )
    return rows


def _in_loss(share: Share) -> Iterator[tuple[int, dict[str, Any]]]:
    """What the loss made of each trained token, by its position in the suffix."""
    sample, figures = share.sample, share.figures
    for n, at in enumerate(figures.positions_n.tolist()):
        yield (
            at,
            {
                "trainer_logprob": float(figures.logprobs_n[n]),
                "ratio": float(figures.ratio_n[n]),
                "advantage": float(sample.advantages_S[at]),
                "weight": float(sample.weights_S[at]),
                "clipped": bool(figures.clipped_n[n]),
                "loss": float(figures.loss_n[n]),
                "gradient": float(figures.slope_n[n]),
            },
        )

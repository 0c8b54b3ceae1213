"""Make a recorded step again on this machine, hold it against what the run logged, and show which samples made it.

croze replay runs/calc-7f3a --step 12                     figures, and the samples with the largest shares
croze replay calc-7f3a --step 12 --sample g97.2.0         one of them, token by token
croze replay calc-7f3a --step 12 --model ~/models/qwen    where the model lies now, if it moved

The run may be going on; nothing is written to its folder. Exit code 0: the step is what the run had, bit for bit or
(with other arithmetic than the run's) nearly; 1: it is not; 2: there is no such step on record. --json prints one
document: docs/reference/replay.md.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from croze.cli.output import Output, aligned, excerpt, number, printable
from croze.errors import CheckFailed
from croze.loop.load import find_run_folder

if TYPE_CHECKING:
    from croze.loop.replay import Replayed, SampleTokens

LISTED = 10
DIFFERENCES = 12
ID = 12
"""Characters shown of a weights id."""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="a run folder, or the beginning of its name under runs/")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step, from 1")
    parser.add_argument(
        "--samples",
        type=int,
        metavar="K",
        help="compute the gradients of at most K samples of a batch one by one (default 64)",
    )
    parser.add_argument("--sample", metavar="ROLLOUT_ID", help="show this rollout token by token")
    parser.add_argument("--model", metavar="MODEL", help="the run's model, where it is not found by its name")


def run(arguments: argparse.Namespace, output: Output) -> int:
    from croze.loop.replay import SAMPLES, replay

    replayed = replay(
        find_run_folder(arguments.run),
        arguments.step,
        samples=SAMPLES if arguments.samples is None else arguments.samples,
        sample=arguments.sample,
        model=arguments.model,
        on_event=None if output.json else _progress,
    )
    if output.json:
        import msgspec

        output.record(msgspec.to_builtins(replayed))
    else:
        _show(replayed, output)
    return CheckFailed.exit_code if replayed.verdict == "differs" else 0


def _progress(event: dict[str, Any]) -> None:
    if event["event"] == "remade":
        print(f"step {event['step']} made again", file=sys.stderr, flush=True)


def _show(r: Replayed, output: Output) -> None:
    output.text(printable(f"step {r.step} of {r.run_dir}: {_verdict(r)}", lines=True))
    for cause in r.causes:
        output.text(f"  likely: {printable(cause)}")
    for n in r.numerics if r.verdict == "exact" else ():
        output.text(f"  although the run computed with {n.name} {n.recorded}, this machine with {n.here}")
    output.text("")
    output.text(aligned(_figures(r)))
    for line in _differences(r):
        output.text(line)
    output.text("")
    if r.sample is not None:
        _show_sample(r.sample, output)
        return
    for line in _overview(r):
        output.text(printable(line))
    if r.samples:
        output.text("")
        _show_samples(r, output)


def _verdict(r: Replayed) -> str:
    said = {
        "exact": "exact, bit for bit what the run had",
        "close": "close, as near as other arithmetic than the run's comes",
        "differs": "NOT what the run had",
    }[r.verdict]
    w = r.weights
    origin = f"the checkpoint of step {w.from_step}" if w.checkpoint else "the model as the run began"
    count = len(w.steps)
    again = f" and {count} {'step' if count == 1 else 'steps'} made again" if w.steps else ""
    passed = "".join(f"\n  passed over {name}: {why}" for name, why in w.passed_over.items())
    return f"{said}\n  from {origin}{again}{passed}"


def _figures(r: Replayed) -> list[list[str]]:
    """Every figure; two columns where one of them differs."""
    if all(f.equal for f in r.figures):
        return [[f.name, _short(f.replayed)] for f in r.figures]
    rows = [["figure", "the run", "replayed", "by"]]
    for f in r.figures:
        by = "=" if f.equal else _by(f.recorded, f.replayed)
        digits = _short if f.equal else _exactly
        rows.append([f.name, digits(f.recorded), digits(f.replayed), by])
    return rows


def _differences(r: Replayed) -> list[str]:
    if not r.differences:
        return []
    rows = [["what", "where", "recorded", "replayed", "note"]]
    for d in r.differences[:DIFFERENCES]:
        rows.append(
            [d.what, printable(d.where), _exactly(d.recorded), _exactly(d.replayed), printable(d.note)]
        )
    more = len(r.differences) - DIFFERENCES
    return ["", aligned(rows), *([f"and {more} more (--json has all)"] if more > 0 else [])]


def _overview(r: Replayed) -> list[str]:
    g, a, t = r.groups, r.advantages, r.tokens
    lines = [f"groups      {g.count}, {g.trained} in the loss"]
    if g.zero_variance:
        lines.append(f"            all scores equal: {_some(g.zero_variance)}")
    if g.dropped:
        lines.append(f"            too few valid: {_some(g.dropped)}")
    told = ", ".join(f"{name} {number(getattr(a, name))}" for name in ("mean", "std", "min", "max"))
    lines.append(f"advantages  {a.count}: {told}")
    lines.append(f"tokens      {t.trained} in the loss, {t.clipped} clipped, {t.computed} computed")
    return lines


def _show_samples(r: Replayed, output: Output) -> None:
    cancelled = sorted({s.batch for s in r.samples if s.share is None and s.grad_norm is not None})
    output.text("samples by their share of the gradient (a batch's shares add up to 1)")
    if cancelled:
        told = ", ".join(map(str, cancelled))
        output.text(f"no shares in batch {told}: its samples cancel, and rounding is all that is left")
    several = any(s.batch > 1 for s in r.samples)
    rows = [["rollout", *(["batch"] if several else []), *_COLUMNS, "reply"]]
    for s in r.samples[:LISTED]:
        facts = (s.share, s.cosine, s.grad_norm, s.score, s.advantage, s.tokens, s.clipped, s.max_gap)
        batch = [str(s.batch)] if several else []
        rows.append([printable(s.rollout_id), *batch, *map(number, facts), excerpt(s.reply or "", 40)])
    output.text(aligned(rows))
    if len(r.samples) > LISTED:
        output.text(f"{LISTED} of {len(r.samples)} samples (--json has all)")
    if r.rest.samples and r.rest.share is not None:
        output.text(f"the {r.rest.samples} samples not measured share {number(r.rest.share)} (--samples K)")


_COLUMNS = ("share", "cosine", "grad norm", "score", "advantage", "tokens", "clipped", "max gap")


def _show_sample(s: SampleTokens, output: Output) -> None:
    why = f" ({s.reason})" if s.reason else ""
    output.text(printable(f"{s.rollout_id}  {s.state}{why}, score {number(s.score)}, task {s.task_id}"))
    titles = ("sampler", "trainer", "gap", "ratio", "advantage", "weight", "clipped", "loss", "gradient")
    rows = [["position", "producer", *titles, "text"]]
    for t in s.tokens[s.prompt_tokens :]:
        facts = (t.sampler_logprob, t.trainer_logprob, t.gap, t.ratio, t.advantage, t.weight)
        clipped = "-" if t.clipped is None else "yes" if t.clipped else "no"
        rest = (number(t.loss), number(t.gradient), repr(t.text)[1:-1])
        rows.append([str(t.position), t.producer, *map(number, facts), clipped, *rest])
    output.text(aligned(rows))
    output.text(f"the prompt's {s.prompt_tokens} tokens are left out (--json has all)")


def _short(value: Any) -> str:
    return value[:ID] if isinstance(value, str) else number(value)


def _exactly(value: Any) -> str:
    """A value with all the digits that tell it from its neighbours."""
    return value[:ID] if isinstance(value, str) else "-" if value is None else str(value)


def _by(recorded: Any, replayed: Any) -> str:
    numbers = isinstance(recorded, int | float) and isinstance(replayed, int | float)
    return number(float(replayed - recorded)) if numbers else "other"


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")

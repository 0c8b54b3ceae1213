"""What a run will need in memory, part by part, before anything of that size is touched."""

from __future__ import annotations

import contextlib
import platform

import msgspec

from croze.models.architecture import Architecture
from croze.plan.bare_process import BareProcess
from croze.plan.dry_phases import Phase, Shape, phases
from croze.plan.dry_run import Peak
from croze.reward.call import inspect_reward
from croze.run import Run

WARM = 90 << 20
"""What a training process takes beside its tensors once it works: code paged in, thread stacks, the trace's and the
ledger's buffers, the libraries' own caches."""
CHECKED = 40 << 20
"""What ``engine.self_check`` leaves behind."""
HOLES = {"passing": 0.35, "lasting": 0.1}
"""Share by which glibc's heap outgrows the tensors in it, the activations among them and the rest: holes that no
tensor fits into. Fitted to 19 runs of models with 20 to 100 million parameters, which differ by themselves by 4 %."""
PASSING = ("activations", "head")
REWARD_WORKER = 40 << 20
"""A reward worker whose file imports little."""


class MemoryEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. ``peak``: the most the training process takes at once, and ``when``; ``parts``: what it consists of then.

    Parts: ``process`` (interpreter, libraries, tokenizer), ``weights`` (what forward passes read: packed linears,
    embeddings, norms), ``masters``, ``moments``, ``gradients``, ``published`` (the masters rounded), ``frozen`` (the
    base under an adapter), ``reference``, ``kv``, ``head`` (logits, probabilities, their product's operands),
    ``activations``, ``allocator`` (holes). Those of no size are left out. A checkpoint needs none of its own: it is
    written from the live tensors.

    ``phases``: the peak of each. ``device``: whose memory it is; on CUDA the tensors alone. ``beside``: other processes
    of the run, on the host, sandboxes at their limit. ``how``: where the figures are from, in one sentence.
    """

    peak: int
    when: Phase
    parts: dict[str, int]
    phases: dict[Phase, int]
    device: str
    beside: dict[str, int]
    how: str


def estimate(
    run: Run,
    arch: Architecture,
    *,
    prompt_tokens: int,
    reply_tokens: int | None = None,
    bare: BareProcess | None = None,
) -> MemoryEstimate:
    """Estimate the peak of ``croze train`` for prompts of ``prompt_tokens`` that share no beginning and replies of
    ``reply_tokens`` (default: as long as allowed). ``bare``: that of the model's files, whose tokenizer then counts
    too; it stays the caller's to close.

    Takes seconds and some 100 MiB whatever the model. What cannot run (a prompt beyond the context, a rollout beyond
    the KV memory) is cut to what can. Raises ConfigError for a device that is not there.
    """
    with contextlib.ExitStack() as own:
        if bare is None:
            bare = own.enter_context(BareProcess())
        shape = _shape(run, arch, prompt_tokens, reply_tokens)
        device, found = phases(run, arch, shape)
        process = _process(run, bare) if device == "cpu" else 0
    totals: dict[Phase, int] = {
        name: process + peak.nbytes + _holes(peak, device) for name, peak in found.items()
    }
    when = max(totals, key=lambda name: totals[name])
    parts = {"process": process, **found[when].parts, "allocator": _holes(found[when], device)}
    return MemoryEstimate(
        peak=totals[when],
        when=when,
        parts={name: size for name, size in parts.items() if size},
        phases=totals,
        device=device,
        beside=_beside(run),
        how=_how(shape, device),
    )


def _shape(run: Run, arch: Architecture, prompt: int, reply: int | None) -> Shape:
    prompt = max(1, min(prompt, arch.context - 1))
    room = min(run.sampling.max_tokens, arch.context - prompt)
    return Shape(
        groups=run.groups_per_step,
        members=run.group_size,
        prompt=prompt,
        reply=max(1, min(room if reply is None else reply, room)),
        room=room,
    )


def _process(run: Run, bare: BareProcess) -> int:
    checked = run.engine.self_check and run.engine.attention != "sdpa"
    return bare.size() + WARM + (CHECKED if checked else 0)


def _holes(peak: Peak, device: str) -> int:
    if device != "cpu" or platform.libc_ver()[0] != "glibc":
        return 0
    shares = {part: HOLES["passing" if part in PASSING else "lasting"] for part in peak.small}
    return int(sum(shares[part] * size for part, size in peak.small.items()))


def _beside(run: Run) -> dict[str, int]:
    beside = {"reward worker": REWARD_WORKER}
    if inspect_reward(run.reward).needs_sandbox:
        beside["sandboxes"] = run.reward_options.concurrency * (run.sandbox.memory_mib << 20)
    return beside


def _how(shape: Shape, device: str) -> str:
    steps = f"{shape.groups} groups of {shape.members}, {shape.prompt} + {shape.reply} tokens"
    if device != "cpu":
        return f"the trainer and the engine on the meta device, {steps}; {device}'s own overhead is not in it"
    return f"a bare process measured here, the trainer and the engine on the meta device ({steps}), the heap's holes"

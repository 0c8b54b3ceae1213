"""Options as frozen dataclasses, ``key=value`` overrides, and where each value came from.

The keys are ``steps``, ``seed``, ``group_size``, ``groups_per_step``, ``run.dir`` and ``<section>.<field>``
for the sections below. Every field's meaning and unit is its docstring.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from croze.errors import ConfigError

Source = Literal["default", "file", "override", "planner"]
T = TypeVar("T")


@typing.dataclass_transform(frozen_default=True, kw_only_default=True)
def options(cls: type[T]) -> type[T]:
    """Frozen, slotted, keyword-only."""
    return dataclass(frozen=True, slots=True, kw_only=True)(cls)


@options
class Sampling:
    """How the policy samples."""

    temperature: float = 1.0
    """Divides the logits (no unit); log-probs are those of the divided ("processed") distribution."""
    top_p: float = 1.0
    """Nucleus mass, a probability; below 1 only for eval: the truncated distribution is not what the loss assumes."""
    top_k: int = 0
    """Only the k likeliest tokens may be sampled; 0 keeps all. Above 0 only for eval."""
    max_tokens: int = 256
    """Most new tokens of one reply."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply (kept in the tokens, cut from the text)."""


@options
class Optim:
    """AdamW on fp32 masters."""

    lr: float = 1e-6
    """Peak learning rate: about how far, in its own unit, one update can move a weight."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine reach 0 just after the last step."""
    warmup_steps: int = 0
    """Training steps over which the rate rises linearly; the last of them has the peak rate."""
    betas: tuple[float, float] = (0.9, 0.99)
    """Shares of AdamW's running means of the gradient and of its square that an update keeps; both from 0 to
    below 1."""
    eps: float = 1e-8
    """Added to the root of the mean square, in the gradient's unit, where AdamW divides by it; above 0."""
    weight_decay: float = 0.0
    """Matrices lose learning rate x weight_decay of themselves in every update; vectors never decay."""
    clip: float = 1.0
    """Largest global L2 norm of the gradient, in its own unit; 0 does not clip."""
    minibatches: int = 1
    """Optimizer updates per step of rollouts; groups are never split between them."""
    tokens_per_microbatch: int = 8192
    """Upper bound of computed tokens (shared prompts once) in one forward; one sample may exceed it."""
    checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    share_prompt: bool = True
    """Compute a group's shared prompt once in training too; false: once per rollout."""
    trainer: str = "auto"
    """What trains: torch (auto), the built-in trainer, or one that is installed (docs/reference/plugins.md)."""


@options
class Lora:
    """Low-rank adapters instead of a full fine-tune; ``rank=0`` trains all weights."""

    rank: int = 0
    """Columns of each adapter's two factors; 0: no adapters, all weights are trained."""
    alpha: float = 32.0
    """Scale numerator (no unit): the adapter's output is multiplied by alpha / rank."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Which linear layers get an adapter, in every block."""


@options
class Algo:
    """The algorithm and its knobs; see ``croze.train.algorithms`` for formulas and papers."""

    name: str = "grpo"
    """Which algorithm turns rewards into a loss: grpo, rloo, reinforce++, gspo, cispo, or one that is installed
    (docs/reference/plugins.md)."""
    advantage_std: bool = True
    """GRPO, GSPO, CISPO: divide by the group's standard deviation (False: Dr. GRPO)."""
    group_baseline: bool = False
    """REINFORCE++: subtract the group's mean before normalising over the batch (REINFORCE++-baseline)."""
    normalizer: Literal["tokens", "sequence", "constant"] = "tokens"
    """Loss normaliser: all trained tokens of the batch (DAPO), mean of sequence means (GRPO), or
    sequences x sampling.max_tokens (Dr. GRPO)."""
    clip_low: float = 0.2
    """Lower clip range: ratios below 1 - clip_low are clipped (no unit)."""
    clip_high: float = 0.28
    """Upper clip range: ratios above 1 + clip_high are clipped (no unit; DAPO: larger than the lower)."""
    anchor: Literal["rollout", "recomputed"] = "rollout"
    """What the ratio divides by: the sampler's log-probs, or the trainer's own before the first update."""
    importance: Literal["none", "truncate", "mask"] = "none"
    """With a recomputed anchor, correct for sampler against trainer: weight clipped, or masked out, above the cap."""
    importance_cap: float = 2.0
    """Largest weight of that correction, a ratio of probabilities; above 0."""
    kl: float = 0.0
    """Loss per nat of the k3 KL to the reference (the initial weights); 0 keeps no reference."""
    entropy: float = 0.0
    """Loss taken off per nat of entropy: a bonus for staying undecided; 0 computes none."""
    skip_zero_advantage: bool = True
    """Leave out of the computation groups that cannot move the loss, denominators unchanged."""


@options
class EngineOptions:
    """The engine; all but ``name`` are of the built-in one."""

    name: str = "auto"
    """What generates: torch (auto), the built-in engine, or one that is installed (docs/reference/plugins.md)."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Arithmetic of forward passes, engine and trainer alike; auto: bfloat16 where the machine has it."""
    device: str = "auto"
    """Where models compute: cpu, cuda (also cuda:1), or auto: cuda where there is one."""
    attention: Literal["auto", "exact", "sdpa"] = "auto"
    """exact: products in one order of summation, so that engine and trainer agree to the last bit; sdpa: torch's fused
    kernels, meant for CUDA, the two then only close (``max_logprob_gap`` of every step); auto: sdpa on CUDA."""
    threads: int = 0
    """Torch threads of one computation; 0: all cores this process may use."""
    kv_memory_mib: int = 1024
    """Most memory of the KV cache, in MiB; requests queue rather than exceed it."""
    max_rows: int = 256
    """Most rollouts decoded at once; the others queue."""
    prefill_chunk: int = 2048
    """Most prompt tokens computed in one forward."""
    self_check: bool = True
    """Measure at start on which shapes engine and trainer agree bit for bit on this machine."""
    invariant: bool = False
    """Compute everything in tiles of one shape, so that no row depends on its neighbours: for a machine on which the
    self-check fails and bit-exact resume or replay is wanted; slower (docs/concepts/exactness.md)."""


@options
class LoopOptions:
    """The loop."""

    checkpoint_every: int = 10
    """Steps between checkpoints, from which a run resumes; 0: only at the end, and on Ctrl-C."""
    keep: int = 2
    """Checkpoints kept, the newest; 0 keeps all."""

    eval_every: int = 0
    """Steps between evaluations on held-out tasks; 0: only at the start and the end where eval_tasks > 0."""
    eval_tasks: int = 0
    """Held-out tasks per evaluation, one rollout each; 0: no evaluation."""
    retries: int = 2
    """Most fresh attempts for a rollout that met an infra fault."""


@options
class RewardOptions:
    """Judging."""

    timeout_s: float = 30.0
    """Seconds one reward call may take, its sandbox work included."""
    concurrency: int = 16
    """Most reward calls in flight at once; the others queue."""
    memory_mib: int = 0
    """Most memory of the reward's process, and of each that it starts, in MiB; 0: half of the machine's."""


@options
class SandboxOptions:
    """Limits of each sandbox a reward or tool asks for."""

    driver: str = "auto"
    """What isolates: bubblewrap, unsafe, auto (bubblewrap, else unsafe where that is allowed), or one that is
    installed (docs/reference/plugins.md)."""
    cpu_s: float = 5.0
    """Seconds of CPU time that one program run in it may use, over all its processes."""
    wall_s: float = 10.0
    """Seconds that one program run in it may take by the clock."""
    memory_mib: int = 512
    """Most memory of all its processes together, its files included, in MiB (of each process alone where the machine
    gives croze no memory cgroup)."""
    pids: int = 32
    """Most processes and threads alive in it at once."""
    disk_mib: int = 64
    """Room for files in its writable directory, in MiB; less than memory_mib, since they live in memory."""
    allow_unsafe: bool = False
    """Run code as plain subprocesses, without isolation."""


@options
class SyncOptions:
    """Publishing weights."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The published dtype; the trainer's forward runs on the published copy."""


@options
class TraceOptions:
    """The run folder's trace tables."""

    tokens: bool = True
    """Keep every token with its text, log-prob (nats), mask and weights id."""


SECTIONS: dict[str, type] = {
    "sampling": Sampling,
    "optim": Optim,
    "lora": Lora,
    "algo": Algo,
    "engine": EngineOptions,
    "loop": LoopOptions,
    "reward": RewardOptions,
    "sandbox": SandboxOptions,
    "sync": SyncOptions,
    "trace": TraceOptions,
}


RANGES: dict[str, tuple[float, float]] = {
    "seed": (0, 2**63 - 1),
    "steps": (0, 10**9),
    "group_size": (1, 2**16),  # a rollout's random stream is named by 16 bits of it
    "groups_per_step": (1, 10**6),
    "sampling.temperature": (0, math.inf),
    "sampling.top_p": (1e-6, 1),
    "sampling.top_k": (0, math.inf),
    "sampling.max_tokens": (1, 10**9),
    "optim.lr": (0, math.inf),
    "optim.warmup_steps": (0, math.inf),
    "optim.weight_decay": (0, math.inf),
    "optim.clip": (0, math.inf),
    "optim.minibatches": (1, math.inf),
    "optim.tokens_per_microbatch": (1, math.inf),
    "lora.rank": (0, math.inf),
    "lora.alpha": (1e-9, 1e9),
    "algo.clip_low": (0, 1),
    "algo.clip_high": (0, math.inf),
    "algo.kl": (0, math.inf),
    "algo.entropy": (0, math.inf),
    "engine.threads": (0, 1024),
    "engine.kv_memory_mib": (1, math.inf),
    "engine.max_rows": (1, math.inf),
    "engine.prefill_chunk": (1, math.inf),
    "loop.eval_every": (0, math.inf),
    "loop.eval_tasks": (0, math.inf),
    "loop.retries": (0, 255),  # and by 8 bits of the attempt
    "loop.checkpoint_every": (0, math.inf),
    "loop.keep": (0, math.inf),
    "reward.timeout_s": (1e-3, math.inf),
    "reward.concurrency": (1, math.inf),
    "reward.memory_mib": (0, math.inf),
    "sandbox.cpu_s": (1e-3, 100_000),
    "sandbox.wall_s": (1e-3, 100_000),
    "sandbox.memory_mib": (16, 500_000),  # below, no Python starts
    "sandbox.pids": (1, 100_000),
    "sandbox.disk_mib": (1, 500_000),
}
"""Least and greatest value of a key, both allowed."""
LARGEST = 2**63 - 1
"""No number of an option is beyond: config.json keeps them all exactly."""


def check_range(key: str, value: Any) -> None:
    """Hold a number to its key's range; nan is in none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    low, high = RANGES.get(key, (-math.inf, math.inf))
    if not low <= value <= high:
        wanted = f"at least {low:g}" if math.isinf(high) else f"between {_exact(low)} and {_exact(high)}"
        raise ConfigError(f"{key} must be {wanted}, got {value}", where=key, fix=meaning(key))
    if not abs(value) <= LARGEST:
        raise ConfigError(f"{key} must be finite and below 2^63, got {value}", where=key, fix=meaning(key))


def meaning(key: str) -> str:
    """Where it is said what a key takes and means."""
    return f"`croze keys {key}` says what it means"


def _exact(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def parse_words(words: Iterable[str]) -> dict[str, str]:
    """Split ``key=value`` words; a word without ``=``, or a key given twice, is an error."""
    parsed: dict[str, str] = {}
    for word in words:
        key, eq, value = word.partition("=")
        if not eq or not key:
            raise ConfigError(
                f"{word!r} is not an override",
                where="command line",
                fix="write key=value, e.g. optim.lr=2e-5",
            )
        if key in parsed:
            raise ConfigError(f"{key!r} is given twice", where="command line", fix="keep one of them")
        parsed[key] = value
    return parsed


def coerce(key: str, text: str, annotation: Any) -> Any:
    """Turn an override's text into the type a field declares, or say what was wanted."""
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin is Literal:
        if text in args:
            return text
        raise ConfigError(
            f"{key} wants one of {', '.join(map(str, args))}, got {text!r}",
            where=key,
            fix=suggest(text, args),
        )
    if origin in (typing.Union, types.UnionType):
        if text.lower() in ("none", "null") and type(None) in args:
            return None
        return coerce(key, text, next(a for a in args if a is not type(None)))
    if origin is tuple:
        words = [w for w in text.split(",") if w != ""]
        if len(args) == 2 and args[1] is Ellipsis:
            return tuple(coerce(key, w, args[0]) for w in words)
        if len(words) != len(args):
            raise ConfigError(
                f"{key} wants {len(args)} values, got {text!r}", where=key, fix="separate them by commas"
            )
        return tuple(coerce(key, w, a) for w, a in zip(words, args, strict=True))
    if annotation is bool:
        if text.lower() in ("true", "1", "yes", "on"):
            return True
        if text.lower() in ("false", "0", "no", "off"):
            return False
        raise ConfigError(f"{key} wants true or false, got {text!r}", where=key, fix=meaning(key))
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            raise ConfigError(
                f"{key} wants {describe(annotation)}, got {text!r}", where=key, fix=meaning(key)
            ) from None
    if annotation is str:
        return text
    raise ConfigError(f"{key} cannot be set on the command line", where=key, fix="set it in the task file")


def suggest(word: str, names: Iterable[Any], *, cutoff: float = 0.5) -> str | None:
    """The nearest right name as a sentence, or None."""
    near = difflib.get_close_matches(word, [str(n) for n in names], n=3, cutoff=cutoff)
    swapped = [
        n for n in near if sorted(n) == sorted(word)
    ]  # letters in another order are the likeliest slip
    return f"did you mean {(swapped or near)[0]!r}?" if near else None


def check_types(section: str, value: Any) -> None:
    """Hold every field of an options object to its annotation (values from a task file are unchecked Python)."""
    hints = typing.get_type_hints(type(value))
    for field in dataclasses.fields(value):
        have, want = getattr(value, field.name), hints[field.name]
        if not matches(have, want):
            key = f"{section}.{field.name}"
            raise ConfigError(f"{key} wants {describe(want)}, got {have!r}", where=key, fix=meaning(key))


def matches(value: Any, annotation: Any) -> bool:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return value in args
    if origin in (typing.Union, types.UnionType):
        return any(matches(value, a) for a in args)
    if annotation is type(None):
        return value is None
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(args) == 2 and args[1] is Ellipsis:
            return all(matches(v, args[0]) for v in value)
        return len(value) == len(args) and all(matches(v, a) for v, a in zip(value, args, strict=True))
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def describe(annotation: Any) -> str:
    """What a field takes, in words."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return "one of " + ", ".join(map(str, args))
    if origin is tuple and args[-1] is Ellipsis:
        return 'a tuple of text, as in ("a", "b")'
    if origin is tuple:
        return f"a tuple of {len(args)} numbers"
    words = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
    return words.get(annotation, str(annotation))


def to_plain(value: Any) -> Any:
    """Options as JSON-ready data."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(v) for v in value]
    return value

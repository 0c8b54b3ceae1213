"""Algorithms: groups -> advantages and normalisers -> a loss. One class per paper, one loss around them.

``build`` turns the ``algo.*`` options into an ``Algorithm``; formulas and papers are in each class's
docstring. ``algo.name`` is looked up in the entry point group ``croze.train.algorithms``.
"""

from __future__ import annotations

import math

from croze import plugins
from croze.config import Algo, Sampling
from croze.errors import ConfigError
from croze.train.algorithms.assembly import Assembler
from croze.train.algorithms.policy_gradient import PolicyGradient
from croze.train.algorithms.rule import Rule

__all__ = ["PolicyGradient", "Rule", "build"]

READ_BY = {"advantage_std": "grpo, gspo or cispo", "group_baseline": "reinforce++"}
"""Options that only some algorithms read, with the built-in ones that do."""


def build(algo: Algo, sampling: Sampling, *, minibatches: int = 1) -> PolicyGradient:
    """The algorithm that ``algo`` names. ``minibatches``: optimizer steps per batch of rollouts.

    Raises ``ConfigError`` for an unknown name, for options that make no loss, and for options that would silently
    do nothing; ``PluginError`` where an installed algorithm cannot be used.
    """
    _check_ranges(algo)
    _check_sampling(sampling)
    if minibatches < 1:
        raise ConfigError(f"optim.minibatches wants at least 1, got {minibatches}", where="optim.minibatches")
    rule: Rule = plugins.make("croze.train.algorithms", algo.name, algo, keeps=Rule)
    _check_idle(algo, rule)
    assembler = Assembler(
        rule=rule,
        normalizer=algo.normalizer,
        max_tokens=sampling.max_tokens,
        minibatches=minibatches,
        skip=algo.skip_zero_advantage and algo.kl == 0.0 and algo.entropy == 0.0,
        rollout_anchor=algo.anchor == "rollout",
        processed=sampling.temperature != 1.0,
    )
    return PolicyGradient(rule=rule, algo=algo, assembler=assembler)


def _check_idle(algo: Algo, rule: Rule) -> None:
    """Refuse options that were set and that nothing would read."""
    default = Algo()
    for option, readers in READ_BY.items():
        if option not in rule.options and getattr(algo, option) != getattr(default, option):
            raise _idle(option, algo, f"algo.name={algo.name}", f"set algo.name={readers}, or leave it out")
    if algo.anchor == "rollout" and algo.importance != "none":
        raise _idle(
            "importance",
            algo,
            "algo.anchor=rollout (the ratio already divides by the sampler)",
            "set algo.anchor=recomputed",
        )
    if algo.importance == "none" and algo.importance_cap != default.importance_cap:
        raise _idle("importance_cap", algo, "algo.importance=none", "set algo.importance=truncate or mask")


def _check_ranges(algo: Algo) -> None:
    ranges = {
        "clip_low": (0.0, 1.0, algo.clip_low),
        "clip_high": (0.0, math.inf, algo.clip_high),
        "kl": (0.0, math.inf, algo.kl),
        "entropy": (0.0, math.inf, algo.entropy),
        "importance_cap": (0.0, math.inf, algo.importance_cap),
    }
    for field, (low, high, value) in ranges.items():
        if not low <= value <= high or math.isinf(value):
            wanted = (
                f"between {low:g} and {high:g}"
                if math.isfinite(high)
                else f"that is finite and at least {low:g}"
            )
            raise ConfigError(f"algo.{field} wants a number {wanted}, got {value}", where=f"algo.{field}")
    if algo.importance_cap == 0.0:
        raise ConfigError("algo.importance_cap=0 would leave no loss", where="algo.importance_cap")


def _check_sampling(sampling: Sampling) -> None:
    if not 0.0 < sampling.temperature < math.inf:
        raise ConfigError(
            f"training needs a temperature above 0, got {sampling.temperature}",
            where="sampling.temperature",
            fix="siblings sampled greedily are all the same; set sampling.temperature=1",
        )
    if sampling.top_p < 1.0 or sampling.top_k > 0:
        raise ConfigError(
            "training cannot sample with top_p or top_k: the distribution would be a truncated one",
            where="sampling.top_p, sampling.top_k",
            fix="set sampling.top_p=1 sampling.top_k=0; use them for eval only",
        )
    if sampling.max_tokens < 1:
        raise ConfigError(
            f"sampling.max_tokens wants at least 1, got {sampling.max_tokens}", where="sampling.max_tokens"
        )


def _idle(field: str, algo: Algo, because: str, fix: str) -> ConfigError:
    return ConfigError(
        f"algo.{field}={getattr(algo, field)} does nothing with {because}", where=f"algo.{field}", fix=fix
    )

"""What can be told wrong about a declared run before anything is made or loaded. No torch here."""

from __future__ import annotations

from croze import plugins
from croze.env.tasks import as_tasks
from croze.errors import ConfigError
from croze.reward.call import check_columns, inspect_reward
from croze.run import Run
from croze.sandbox.protocol import Limits


def check(run: Run) -> None:
    """Raise the UsageError that a wrong declaration deserves: plug-ins, columns, limits, the shape of a step."""
    plugins.check_keys(run.keys())
    check_reward(run)
    check_minibatches(run)


def check_reward(run: Run) -> None:
    """The reward asks for what the tasks' first row has; the sandbox's limits fit together."""
    check_columns(inspect_reward(run.reward), as_tasks(run.tasks).columns)
    Limits.of(run.sandbox)


def check_minibatches(run: Run) -> None:
    """Optimizer batches are cut from whole groups."""
    if run.optim.minibatches > run.groups_per_step:
        raise ConfigError(
            f"optim.minibatches={run.optim.minibatches} cannot be cut from groups_per_step={run.groups_per_step}",
            where="optim.minibatches",
            fix="groups are never split: lower the one or raise the other",
        )


def check_siblings(run: Run, fewest: int) -> None:
    """Refuse groups that could never teach. ``fewest``: siblings that the algorithm compares."""
    if run.group_size < fewest:
        raise ConfigError(
            f"algo.name={run.algo.name} compares {fewest} siblings or more, and group_size is {run.group_size}",
            where="group_size",
            fix=f"set group_size to {max(fewest, 4)} or more, or algo.name=reinforce++ without group_baseline",
        )

"""Looking at tasks before anything is paid for them: the prompt fits the model, the reward finds its columns."""

from __future__ import annotations

from collections.abc import Callable

from croze.errors import DeclarationError, TasksError
from croze.models.protocol import Tokenizer
from croze.reward.call import RewardSpec, check_task
from croze.rollout.groups import render
from croze.types import Task


class Look:
    """Holds tasks against a model's tokenizer and context, in tokens, and a reward's arguments."""

    def __init__(self, tokenizer: Tokenizer, context: int, reward: RewardSpec) -> None:
        self._tokenizer, self._context, self._reward = tokenizer, context, reward

    def at(self, task: Task, place: Callable[[Task], str]) -> list[int]:
        """The ids of a task's prompt. ``place``: where its row lies. Raises TasksError, which names that place."""
        try:
            check_task(self._reward, task)
            return render(task, self._tokenizer, self._context)
        except (TasksError, DeclarationError) as error:
            where = f"{place(task)} (task {task.id})"
            raise TasksError(error.message, where=where, fix=error.fix) from error

"""Rollouts for the tests."""

import numpy as np

from croze.types import Rollout, Task


def rollout(reply="45", group="g", member=0, prompt="add", **columns) -> Rollout:
    return Rollout(
        id=f"{group}-{member}",
        group_id=group,
        member=member,
        attempt=0,
        task=Task(id=f"task-{group}", prompt=prompt, columns=columns),
        step=1,
        prompt_tokens=2,
        ids_T=np.arange(5, dtype=np.int32),
        logprobs_T=np.zeros(5, np.float32),
        mask_T=np.arange(5) > 1,
        turns=(),
        weights=(),
        finish="stop",
        reply=reply,
    )

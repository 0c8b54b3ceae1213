"""Loss normalisers: what one trained token weighs, fixed over an optimizer batch before its first backward.

The loss is a plain sum of ``weight x term`` over tokens, so it is the same however a batch is cut into
micro-batches (normalising inside each one is the published pitfall: a mean of means is not the mean).
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Normalizer = Literal["tokens", "sequence", "constant"]


def token_weights(kind: Normalizer, trained_R: np.ndarray, max_tokens: int) -> np.ndarray:
    """Weight of every trained token of each rollout, float64 [R].

    trained_R int [R]: trained tokens per *rollout*, all samples of a rollout together, skipped groups
    included.

    - ``tokens``: ``1 / sum of T``: every token counts the same (DAPO, arXiv:2503.14476, equation 8);
    - ``sequence``: ``1 / (R T_i)``: the mean of each rollout's own mean (GRPO, arXiv:2402.03300, equation 3);
    - ``constant``: ``1 / (R max_tokens)``: no length in it (Dr. GRPO, arXiv:2503.20783).

    A rollout without trained tokens weighs nothing, and still counts in R.
    """
    trained_R = np.asarray(trained_R, dtype=np.float64)
    if kind == "tokens":
        weights_R = np.full_like(trained_R, 1.0 / max(trained_R.sum(), 1.0))
    elif kind == "sequence":
        weights_R = 1.0 / (max(len(trained_R), 1) * np.maximum(trained_R, 1.0))
    else:
        weights_R = np.full_like(trained_R, 1.0 / (max(len(trained_R), 1) * max_tokens))
    return np.where(trained_R > 0, weights_R, 0.0)

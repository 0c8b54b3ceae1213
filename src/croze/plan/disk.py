"""What a run writes: checkpoints, which stay as many as are kept, and its trace, which grows with every token."""

from __future__ import annotations

import msgspec

from croze.models.architecture import Architecture
from croze.run import Run

STATE_BYTES = 12
"""A trained weight on disk: its fp32 master and AdamW's two moments."""
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
TOKEN_BYTES = 24
"""A token of the trace, uncompressed: id, text, log-prob, mask, weights id."""
ROLLOUT_BYTES = 4096
"""The rest of a rollout: its row, its spans, its place in the ledger."""


class DiskEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes. ``checkpoint``: one of them; ``checkpoints``: all that are there at once, one being written among
    them; ``trace``: at most, every reply as long as it may be."""

    checkpoint: int
    checkpoints: int
    trace: int


def estimate(run: Run, arch: Architecture) -> DiskEstimate:
    """What the run will need in its folder."""
    trained = adapter_parameters(run, arch) if run.lora.rank else arch.parameters
    checkpoint = trained * (STATE_BYTES + DTYPE_BYTES[run.sync.dtype])
    rollouts = run.steps * run.groups_per_step * run.group_size
    token_bytes = TOKEN_BYTES * run.sampling.max_tokens if run.trace.tokens else 0
    return DiskEstimate(
        checkpoint=checkpoint,
        checkpoints=at_once(run) * checkpoint,
        trace=rollouts * (ROLLOUT_BYTES + token_bytes),
    )


def at_once(run: Run) -> int:
    """Most checkpoints that are there together: those kept, and the next while it is written."""
    every, keep = run.loop.checkpoint_every, run.loop.keep
    written = max(1, -(-run.steps // every)) if every else 1
    return written if keep == 0 else min(written, keep + 1)


def adapter_parameters(run: Run, arch: Architecture) -> int:
    """Weights of the run's LoRA adapters: rank x (in + out) of every targeted linear."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    hidden, inner = arch.hidden, arch.intermediate
    sides = {
        "q_proj": hidden + q,
        "k_proj": hidden + kv,
        "v_proj": hidden + kv,
        "o_proj": q + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    return run.lora.rank * arch.layers * sum(sides[target] for target in run.lora.targets)

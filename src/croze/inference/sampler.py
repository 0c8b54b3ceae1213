"""Sampling that depends on (seed, key, position) alone: one Philox uniform, inverse CDF."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from croze.inference.protocol import SamplingParams
from croze.models.transformer import log_of, probabilities

BLOCK = 256
"""Vocabulary entries summed together before the search looks inside one block."""
ROWS = 8
"""Rows sampled at a time: their probabilities stay in cache."""

Words = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def uniforms(seed: int, keys: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Uniforms in (0, 1), float64 [B], one per (seed, key, position).

    seed and keys: 64 bits; positions: below 2^32. 52 random bits each, centred, so that 0 and 1 never occur.
    """
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    keys = np.asarray(keys, np.uint64)
    zeros = np.zeros_like(keys)
    counter = (keys & low, keys >> shift, np.asarray(positions, np.uint64) & low, zeros)
    high, middle, _, _ = philox(counter, (seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF))
    bits = (high << np.uint64(20)) | (middle >> np.uint64(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 (Salmon et al., SC 2011): four words of counter to four random words, each uint64 [B] below
    2^32."""
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & low
        c2, c3 = (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def sample(
    logits_BV: torch.Tensor,
    params: Sequence[SamplingParams],
    keys: Sequence[int],
    positions: Sequence[int],
) -> tuple[list[int], list[float]]:
    """One token a row, and its log-prob under softmax(logits / temperature), before any top-k or top-p.

    temperature 0 takes the likeliest token and reports the log-prob at temperature 1.
    """
    drawn = np.empty(len(params))
    seeds = np.array([p.seed for p in params], dtype=np.uint64)
    for seed in np.unique(seeds):
        rows = np.flatnonzero(seeds == seed)
        drawn[rows] = uniforms(int(seed), np.array(keys, np.uint64)[rows], np.array(positions)[rows])
    uniforms_B = torch.from_numpy(drawn).to(logits_BV.device)
    tokens: list[torch.Tensor] = []
    logprobs: list[torch.Tensor] = []
    start = 0
    while start < len(params):
        stop, like = start + 1, _kind(params[start])
        while stop < min(len(params), start + ROWS) and _kind(params[stop]) == like:
            stop += 1
        got = _sample_alike(logits_BV[start:stop], params[start], uniforms_B[start:stop])
        tokens.append(got[0])
        logprobs.append(got[1])
        start = stop
    return torch.cat(tokens).tolist(), torch.cat(logprobs).tolist()


def _kind(p: SamplingParams) -> tuple[float, float, int]:
    return p.temperature, p.top_p, p.top_k


def _sample_alike(
    logits: torch.Tensor, params: SamplingParams, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    p = probabilities(logits, params.temperature or 1.0)
    if params.temperature == 0.0:
        tokens = logits.argmax(-1)
    elif params.top_p < 1.0 or params.top_k > 0:
        tokens = inverse_cdf(truncate(p, params.top_p, params.top_k), uniforms)
    else:
        tokens = inverse_cdf(p, uniforms)
    return tokens, log_of(p.gather(1, tokens[:, None]))[:, 0]


def inverse_cdf(p_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """The token where the cumulated mass passes u x total; p need not sum to 1. Block sums first, in double.

    Never a token of no mass, whatever is rounded.
    """
    rows, vocab = p_BV.shape
    blocks = -(-vocab // BLOCK)
    padded = F.pad(p_BV, (0, blocks * BLOCK - vocab)) if blocks * BLOCK != vocab else p_BV
    padded = padded.view(rows, blocks, BLOCK)
    sums = padded.sum(-1).double()
    ends = sums.cumsum(-1)
    total = ends[:, -1:]
    target = torch.minimum(uniforms_B[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    block = torch.searchsorted(ends, target, right=True).clamp_(max=blocks - 1)
    before = ends.gather(1, block) - sums.gather(1, block)
    inside = padded.gather(1, block[:, :, None].expand(rows, 1, BLOCK))[:, 0]
    offset = torch.searchsorted(inside.double().cumsum(-1), (target - before).clamp_(min=0.0), right=True)
    last = BLOCK - 1 - (inside > 0).flip(-1).to(torch.int8).argmax(-1, keepdim=True)
    return (block * BLOCK + torch.minimum(offset, last))[:, 0].clamp_(max=vocab - 1)


def truncate(p_BV: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """Zero what lies outside the k likeliest tokens and outside the smallest set of mass >= top_p."""
    ordered, order = torch.sort(p_BV, dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if top_k > 0:
        keep[:, top_k:] = False
    if top_p < 1.0:
        kept = torch.where(keep, ordered, 0.0).double()
        before = kept.cumsum(-1) - kept
        keep &= before < top_p * kept.sum(-1, keepdim=True)
    keep[:, 0] = True
    return torch.zeros_like(p_BV).scatter_(1, order, torch.where(keep, ordered, 0.0))

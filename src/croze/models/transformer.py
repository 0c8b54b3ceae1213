"""The forward pass, once, for sampler and trainer: they differ in how they attend and in who wants gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from croze.models import kernels
from croze.models.architecture import Architecture
from croze.models.kernels import Linear
from croze.models.weights import Layer, ModelWeights, Norm

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [N, heads, D] already scaled, k [N, kv_heads, D], v [N, kv_heads, D]) -> [N, heads * D]."""


class Forward:
    """The operations without gradients. ``croze.train`` has the same with them: same values, bit for bit."""

    def embed(self, weights: ModelWeights, ids_N: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids_N, weights.embed).to(weights.recipe.dtype)

    def norm(self, x: torch.Tensor, norm: Norm, eps: float) -> torch.Tensor:
        return kernels.rms_norm(x, norm.weight, eps)

    def product(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return linear(x)

    def linear(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        y = self.product(x, linear)
        return y if linear.adapter is None else linear.adapter.add(x, y, self.product)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return kernels.swiglu(gate_up)

    def gated(self, gate_up: torch.Tensor, linear: Linear) -> torch.Tensor:
        """The second half of an MLP; a trainer may keep less of it."""
        return self.linear(self.swiglu(gate_up), linear)

    def block(
        self, x: torch.Tensor, layer: Layer, run: Callable[[torch.Tensor, Layer], torch.Tensor]
    ) -> torch.Tensor:
        """Run one decoder layer; a trainer may checkpoint here."""
        return run(x, layer)


def hidden_states(
    weights: ModelWeights, ids_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend, ops: Forward
) -> torch.Tensor:
    """Flat tokens through all layers: [N, hidden], before the final norm."""
    arch = weights.arch
    cos, sin = weights.cos[positions_N], weights.sin[positions_N]
    x = ops.embed(weights, ids_N)
    for index, layer in enumerate(weights.layers):

        def run(x: torch.Tensor, layer: Layer, index: int = index) -> torch.Tensor:
            h = ops.norm(x, layer.attn_norm, arch.norm_eps)
            q, k, v = heads(ops.linear(h, layer.qkv), layer, arch, cos, sin, ops)
            x = ops.linear(attend(index, q, k, v), layer.o) + x
            h = ops.norm(x, layer.mlp_norm, arch.norm_eps)
            return ops.gated(ops.linear(h, layer.gate_up), layer.down) + x

        x = ops.block(x, layer, run)
    return x


def heads(
    qkv: torch.Tensor, layer: Layer, arch: Architecture, cos: torch.Tensor, sin: torch.Tensor, ops: Forward
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split [N, (heads + 2 kv_heads) D], norm q and k where the family does, rotate, scale q."""
    count, d = qkv.shape[0], arch.head_dim
    qkv = qkv.view(count, arch.heads + 2 * arch.kv_heads, d)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = ops.norm(qkv[:, : arch.heads].reshape(-1, d), layer.q_norm, arch.norm_eps)
        k = ops.norm(qkv[:, arch.heads : -arch.kv_heads].reshape(-1, d), layer.k_norm, arch.norm_eps)
        qk = torch.cat([q.view(count, arch.heads, d), k.view(count, arch.kv_heads, d)], 1)
    else:
        qk = qkv[:, : -arch.kv_heads]
    qk = kernels.rotate(qk, cos, sin)
    return qk[:, : arch.heads] * d**-0.5, qk[:, arch.heads :], qkv[:, -arch.kv_heads :]


def logits(weights: ModelWeights, x: torch.Tensor, ops: Forward) -> torch.Tensor:
    """Final norm and head: [M, hidden] -> [M, vocab] in the recipe's dtype."""
    return ops.linear(ops.norm(x, weights.norm, weights.arch.norm_eps), weights.head)


def log_probs(logits_MV: torch.Tensor, ids_M: torch.Tensor, temperature: float) -> torch.Tensor:
    """fp32 [M]: log softmax(logits / temperature) at ``ids_M``, in the one op order that sampler and trainer share."""
    return log_of(probabilities(logits_MV, temperature).gather(1, ids_M[:, None]))[:, 0]


def probabilities(logits_MV: torch.Tensor, temperature: float) -> torch.Tensor:
    scaled = logits_MV.float()
    return torch.softmax(scaled if temperature == 1.0 else scaled / temperature, -1)


def log_of(p: torch.Tensor) -> torch.Tensor:
    """Natural log of fp32 probabilities; an underflowed 0 counts as the smallest normal number."""
    return p.clamp_min(torch.finfo(torch.float32).tiny).log()

"""The forward pass's operations with gradients: the same values, weight gradients added in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from croze.models import kernels
from croze.models.kernels import Linear
from croze.models.transformer import Forward
from croze.models.weights import Layer, ModelWeights, Norm
from croze.train.parameters import Parameters


class Graph(Forward):
    """Operations whose backward passes add into ``parameters.grads``; call ``finish`` after the backward."""

    def __init__(self, parameters: Parameters, *, checkpointing: bool = False) -> None:
        self.parameters = parameters
        self.checkpointing = checkpointing
        self._embedded: tuple[torch.Tensor, torch.Tensor] | None = None

    def embed(self, weights: ModelWeights, ids_N: torch.Tensor) -> torch.Tensor:
        x = super().embed(weights, ids_N).detach().requires_grad_()
        self._embedded = (ids_N, x)
        return x

    def norm(self, x: torch.Tensor, norm: Norm, eps: float) -> torch.Tensor:
        return _RmsNorm.apply(x, norm, eps, self.parameters)

    def product(self, x: torch.Tensor, linear: Linear) -> torch.Tensor:
        return _Product.apply(x, linear, self.parameters)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        return _SwiGlu.apply(gate_up)

    def gated(self, gate_up: torch.Tensor, linear: Linear) -> torch.Tensor:
        if linear.adapter is not None:
            return super().gated(gate_up, linear)
        return _Gated.apply(gate_up, linear, self.parameters)

    def block(
        self, x: torch.Tensor, layer: Layer, run: Callable[[torch.Tensor, Layer], torch.Tensor]
    ) -> torch.Tensor:
        if self.checkpointing:
            return checkpoint(run, x, layer, use_reentrant=False, preserve_rng_state=False)
        return run(x, layer)

    def finish(self) -> None:
        """Add the gradient that reached the embedded tokens to the embedding table's."""
        assert self._embedded is not None
        ids_N, x = self._embedded
        key = "model.embed_tokens.weight"
        if self.parameters.trains(key) and x.grad is not None:
            self.parameters.grad(key).index_add_(0, ids_N, x.grad.float())
        self._embedded = None


class _Product(torch.autograd.Function):
    """x W^T (+ b); the weight is read again from the parameters in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: Linear, parameters: Parameters) -> torch.Tensor:
        ctx.linear, ctx.parameters = linear, parameters
        if parameters.trains(linear.key):
            ctx.save_for_backward(x)
        return linear(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        parameters, key = ctx.parameters, ctx.linear.key
        if parameters.trains(key):
            _add_product(parameters, ctx.linear, grad, *ctx.saved_tensors)
        dx = grad @ parameters.plain(key) if ctx.needs_input_grad[0] else None
        return dx, None, None


def _add_product(parameters: Parameters, linear: Linear, grad: torch.Tensor, x: torch.Tensor) -> None:
    """The gradients of a linear layer's own weight and bias."""
    parameters.add_product(linear.key, grad.t(), x)
    if linear.bias is not None:
        parameters.grad(linear.key.removesuffix("weight") + "bias").add_(grad.sum(0, dtype=torch.float32))


class _Gated(torch.autograd.Function):
    """swiglu(gate_up) W^T (+ b), of which only ``gate_up`` is kept: making the product's input again costs less
    than holding a third of the activations."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, linear: Linear, parameters: Parameters) -> torch.Tensor:
        ctx.linear, ctx.parameters = linear, parameters
        ctx.save_for_backward(gate_up)
        return linear(kernels.swiglu(gate_up))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gate_up,) = ctx.saved_tensors
        if ctx.parameters.trains(ctx.linear.key):
            _add_product(ctx.parameters, ctx.linear, grad, kernels.swiglu(gate_up))
        return _swiglu_backward(grad @ ctx.parameters.plain(ctx.linear.key), gate_up), None, None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, norm: Norm, eps: float, parameters: Parameters) -> torch.Tensor:
        scale = kernels.rms_scale(x, eps)
        ctx.save_for_backward(x, scale)
        ctx.norm, ctx.parameters = norm, parameters
        return torch.mul(x, scale).to(x.dtype) * norm.weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        x, scale = ctx.saved_tensors
        normed = torch.mul(x, scale).to(x.dtype)
        if ctx.parameters.trains(ctx.norm.key):
            flat = (grad * normed).reshape(-1, x.shape[-1])
            ctx.parameters.grad(ctx.norm.key).add_(flat.sum(0, dtype=torch.float32))
        grad = grad * ctx.norm.weight
        along = (grad * normed).sum(-1, keepdim=True, dtype=torch.float32) / x.shape[-1]
        return torch.mul(grad - normed * along.to(grad.dtype), scale).to(x.dtype), None, None, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return kernels.swiglu(gate_up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _swiglu_backward(grad, *ctx.saved_tensors)


def _swiglu_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, -1)
    out = torch.empty_like(gate_up)
    half = gate.shape[-1]
    out[:, :half] = torch.ops.aten.silu_backward(grad * up, gate)
    torch.mul(F.silu(gate), grad, out=out[:, half:])
    return out

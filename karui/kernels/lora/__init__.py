"""A frozen linear with a low-rank update as one autograd node: y = x W^T + bias + s (x A^T) B^T (LoRA, arXiv 2106.09685, eq. 3).

Autograd over the written-out form keeps x twice under dropout or casts, builds the base activation, the update and their sum
as three tensors, and scales a full-size one. Here the update is accumulated into the base product and only x and x A^T are
kept: dx = dy W + s (dy B) A, dA = s (dy B)^T x, dB = s dy^T (x A^T).

W comes from a callable, so that a quantized base is dequantized when it is needed, twice, and never stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from karui.kernels.matmul import low_rank_matmul, matmul
from karui.kernels.swiglu import gradients, product

Weight = Callable[[torch.dtype], torch.Tensor]


def lora_linear(
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """The layer's output [..., out].

    Args:
        x: [..., in].
        weight: called with x's dtype, gives W [out, in]; frozen, gets no gradient. Called again in the backward pass.
        bias: [out], frozen, or None.
        a, b: A [rank, in] and B [out, rank], same dtype as x.
        scaling: alpha / rank (or alpha / sqrt(rank)).
    """
    return _LoraLinear.apply(x, a, b, weight, bias, scaling)


def gated_lora_linear(
    gate: torch.Tensor, up: torch.Tensor, weight: Weight, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """`lora_linear` of x = silu(gate) up, which is not kept but made again in the backward pass (arXiv 1604.06174).

    x is the widest tensor of a layer; the pass that gives the gradients of gate and up gives x besides at no cost.
    """
    return _GatedLoraLinear.apply(gate, up, a, b, weight, bias, scaling)


def frozen_linear(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """y = x W^T + bias [..., out] for a frozen W made on demand; nothing is kept for the backward pass."""
    return _FrozenLinear.apply(x, weight, bias)


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, weight: Weight, bias: torch.Tensor | None, scaling: float
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        out, low = _forward(rows, weight, bias, a, b, scaling)
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, low if ctx.needs_input_grad[2] else None, a, b)
        ctx.weight, ctx.scaling, ctx.shape = weight, scaling, x.shape
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, low, a, b = ctx.saved_tensors
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        dx = da = db = None
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            if ctx.needs_input_grad[0]:
                dx, pulled = low_rank_matmul(dy, ctx.weight(dy.dtype), b, a, ctx.scaling)
                dx = dx.view(ctx.shape)
            else:
                pulled = (dy @ b).mul_(ctx.scaling)  # [rows, rank]
            if ctx.needs_input_grad[1]:
                da = matmul(pulled.T, rows)
        if ctx.needs_input_grad[2]:
            db = _grad_b(dy, low)
        return dx, da, db, None, None, None


class _GatedLoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: torch.Tensor, up: torch.Tensor, a: torch.Tensor, b: torch.Tensor, weight: Weight,
        bias: torch.Tensor | None, scaling: float,
    ) -> torch.Tensor:
        rows = product(gate, up).view(-1, gate.shape[-1])
        out, low = _forward(rows, weight, bias, a, b, scaling)
        ctx.save_for_backward(gate, up, low, a, b)
        ctx.weight, ctx.scaling = weight, scaling
        return out.view(*gate.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up, low, a, b = ctx.saved_tensors
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        dx, pulled = low_rank_matmul(dy, ctx.weight(dy.dtype), b, a, ctx.scaling)
        dgate, dup, rows = gradients(dx.view(gate.shape), gate, up, again=ctx.needs_input_grad[2])
        da = None if rows is None else matmul(pulled.T, rows.view(-1, rows.shape[-1]))
        db = _grad_b(dy, low) if ctx.needs_input_grad[3] else None
        return dgate, dup, da, db, None, None, None


def _forward(
    rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output [rows, out], and s x A^T [rows, rank]."""
    out, low = low_rank_matmul(rows, weight(rows.dtype).T, a.T, b.T, scaling)
    return out if bias is None else out.add_(bias.to(rows.dtype)), low


def _grad_b(dy: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """dy^T (s x A^T) [out, rank]; the product with few rows runs faster than the one with few columns."""
    return matmul(low.T, dy).T


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.weight = weight
        return _base(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None, None
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        dx = matmul(dy, ctx.weight(dy.dtype)).view(*grads[0].shape[:-1], -1)
        return dx, None, None


def _base(rows: torch.Tensor, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    w = weight(rows.dtype)
    out = matmul(rows, w.T)
    return out if bias is None else out.add_(bias.to(rows.dtype))

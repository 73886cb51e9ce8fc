"""A linear as one autograd node over `karui.kernels.matmul`, so that `matmul_precision` governs its three products."""

from __future__ import annotations

from typing import Any

import torch

from karui.kernels.matmul import current_precision, matmul


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """y = x W^T + bias [..., out] of x [..., in], W [out, in] and bias [out] or None; each gets the gradient it asks for.

    torch's own where precision is fp32, under autocast, and for operands of two dtypes.
    """
    if current_precision() == "fp32" or x.dtype != weight.dtype or torch.is_autocast_enabled(x.device.type):
        return torch.nn.functional.linear(x, weight, bias)
    out: torch.Tensor = _Linear.apply(x, weight, bias)
    return out


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows if ctx.needs_input_grad[1] else None, weight)
        out = matmul(rows, weight.T)
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        dy = grads[0].reshape(-1, grads[0].shape[-1])
        dx = matmul(dy, weight, backward=True).view(*grads[0].shape[:-1], -1) if ctx.needs_input_grad[0] else None
        dw = matmul(dy.T, rows, backward=True) if ctx.needs_input_grad[1] else None
        return dx, dw, dy.sum(0) if ctx.needs_input_grad[2] else None

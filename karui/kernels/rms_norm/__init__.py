"""RMSNorm (arXiv 1910.07467) as one autograd node that keeps its input and one value per row, not three copies of the input.

With r = 1 / sqrt(mean(x^2) + eps), n = x r and g = dy * weight: dx = r (g - n mean(g n)), dweight = sum dy n.
"""

from __future__ import annotations

from typing import Any

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension.

    Args:
        x: [..., H]; statistics are computed in fp32 (fp64 for fp64).
        weight: [H].
        eps: added to the mean square.

    Returns:
        [..., H] in the promoted dtype of weight and x.
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        exact = x if x.dtype == torch.float64 else x.float()
        width = x.shape[-1]
        # a row's dot product with itself: no [rows, H] tensor of squares
        rstd = torch.linalg.vector_norm(exact, dim=-1, keepdim=True).square_().div_(width).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return weight * (exact * rstd).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dy = grads[0]
        exact = x if x.dtype == torch.float64 else x.float()
        normed = exact * rstd
        dx = dweight = None
        if ctx.needs_input_grad[1]:
            dweight = (dy.to(exact.dtype) * normed).reshape(-1, x.shape[-1]).sum(0).to(weight.dtype)
        if ctx.needs_input_grad[0]:
            g = (dy * weight).to(exact.dtype)
            along = torch.linalg.vecdot(g, normed).unsqueeze(-1).div_(x.shape[-1])
            dx = normed.mul_(along).neg_().add_(g).mul_(rstd).to(x.dtype)
        return dx, dweight, None

"""RMSNorm (arXiv 1910.07467) as one autograd node that keeps its input and one value per row, not three copies of the input.

With r = 1 / sqrt(mean(x^2) + eps), n = x r and g = dy * weight: dx = r (g - n mean(g n)), dweight = sum dy n.
"""

from __future__ import annotations

from typing import Any

import torch

from karui.kernels.native import train as native
from karui.kernels.triton_support import Backend, use_triton

_MAX_WIDTH = 32_768  # one program holds a row


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, backend: Backend = "auto") -> torch.Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension.

    Args:
        x: [..., H]; statistics are computed in fp32 (fp64 for fp64).
        weight: [H].
        eps: added to the mean square.

    Returns:
        [..., H] in the promoted dtype of weight and x.
    """
    refused = f"dtype {x.dtype}" if x.dtype not in (torch.float32, torch.bfloat16, torch.float16) else ""
    refused = refused or (f"a width of {x.shape[-1]}, more than {_MAX_WIDTH}" if x.shape[-1] > _MAX_WIDTH else "")
    if use_triton(backend, x.device, "rms_norm", refused=refused):
        from karui.kernels.rms_norm.triton import RMSNorm

        return RMSNorm.apply(x, weight, eps)
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.is_contiguous() and native.usable(x, weight):
            out, rstd = native.rms_norm(x, weight, eps)
            ctx.save_for_backward(x, weight, rstd.view(*x.shape[:-1], 1))
            return out
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
        if not ctx.needs_input_grad[1] and x.is_contiguous() and native.usable(x, weight, dy):
            return native.rms_norm_backward(dy.contiguous(), x, weight, rstd), None, None
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

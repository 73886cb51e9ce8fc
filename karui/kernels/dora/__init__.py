"""The two pieces that DoRA (arXiv 2402.09353) adds to a low-rank update, neither of which forms the product B A.

    y = (m / n) (W x + s B A x) + bias,   n = ||W + s B A|| per output row, a constant in the backward pass (section 4.3)
    n^2 = ||W||^2 + 2 s <W A^T, B> + s^2 <B (A A^T), B>     row by row; ||W||^2 does not change, so it is computed once

Written out, the middle term costs out x in x rank instead of the out x in x rank of B A and the out x in of the sum and its
norm, keeps no [out, in] matrix, and W A^T is the same product that the forward pass is made of.
"""

from __future__ import annotations

from typing import Any

import torch

_HAIR = 1e-20


def squared_row_norms(weight: torch.Tensor) -> torch.Tensor:
    """||W||^2 per row of W [out, in], summed in float64, fp32 (float64 for a float64 weight) [out]."""
    total = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float64).square()
    return total if weight.dtype == torch.float64 else total.float()


def row_norms(
    weight: torch.Tensor, squared: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    """||W + s B A|| per row, [out], without gradient.

    Args:
        weight: W [out, in].
        squared: `squared_row_norms(W)`.
        a, b: A [rank, in] and B [out, rank].
    """
    with torch.no_grad():
        a, b = a.to(squared.dtype), b.to(squared.dtype)
        cross = ((weight @ a.T.to(weight.dtype)).to(squared.dtype) * b).sum(1)
        update = ((b @ (a @ a.T)) * b).sum(1)
        # rounding can push a row whose update cancels it below zero
        return (squared + 2 * scaling * cross + scaling**2 * update).clamp_(min=0).sqrt_()


def scale_rows(y: torch.Tensor, magnitude: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """y [..., out] times m / n; gradients to y and to m, none to n. A row of norm 0 gives 0, a magnitude of 0 at most 1e-20 |y|.

    Keeps its own output for the backward pass (in fp16 its input), which whatever comes next usually keeps as well, and nothing
    else of that size.
    """
    return _ScaleRows.apply(y, magnitude, norm)


class _ScaleRows(torch.autograd.Function):
    """dm = sum of dy y / n, and y = out / gain. A gain of 0 would have nothing to divide, so it is kept above by a hair that no
    sum notices; to ask which gains are 0 would make the host wait for the GPU in every layer. fp16 has no such number."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, magnitude: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        inverse = torch.where(norm > 0, 1 / norm, torch.zeros_like(norm))
        gain = (magnitude * inverse).to(y.dtype)
        ctx.divides = y.dtype != torch.float16
        if ctx.divides:
            gain = torch.where((gain.abs() < _HAIR) & (inverse > 0), torch.full_like(gain, _HAIR), gain)
        out = y * gain
        ctx.save_for_backward(out if ctx.divides else y, gain, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        kept, gain, inverse = ctx.saved_tensors
        dy, dm = grads[0], None
        if ctx.needs_input_grad[1]:
            dm = (dy * kept).flatten(0, -2).sum(0, dtype=inverse.dtype) * inverse
            if ctx.divides:
                dm = torch.where(inverse > 0, dm / gain.to(dm.dtype), torch.zeros_like(dm))
        return (dy * gain if ctx.needs_input_grad[0] else None), dm, None

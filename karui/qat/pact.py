"""PACT (Choi et al., arXiv 1805.06085): the clipping level of activations learned.

    y = clip(x, 0, alpha),  value = round(y (2^k - 1) / alpha) alpha / (2^k - 1)                     (eq. 1, 2)
    d value / d alpha = 1 where x >= alpha, else 0;   d value / d x = 1 inside the range, else 0       (eq. 3)

alpha carries weight decay in the paper (lambda_alpha), here the optimizer's (`optim.weight_decay`): only clipped values move
alpha, so without it alpha stays near the first batch's absmax. A transformer's activations have both signs, so `signed` clips to
+-alpha with 2^(k-1) - 1 codes on each side, and d value / d alpha is the sign where it is clipped. Weights go to the grid's own
rule.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from karui.qat.first_batch import FirstBatchRange


class Clipped(torch.autograd.Function):
    """(x, alpha [1]) -> value; see the equations."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, alpha: torch.Tensor, high: int, signed: bool) -> torch.Tensor:
        low = -alpha if signed else torch.zeros_like(alpha)
        ctx.save_for_backward(x, alpha, low)
        step = alpha / high
        return torch.round(x.clamp(low, alpha) / step) * step

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, alpha, low = ctx.saved_tensors
        above, below = x >= alpha, x <= low
        signs = above.to(x.dtype) - (below & (low < 0)).to(x.dtype)
        return grads[0] * ~(above | below), (grads[0] * signs).sum().reshape(1), None, None


class PACT(FirstBatchRange):
    """Learned `alpha`, one for the whole tensor, as a share of `width`, the first batch's absmax."""

    def __init__(self, bits: int = 8, *, signed: bool = True) -> None:
        super().__init__()
        self.signed, self.high = signed, 2 ** (bits - 1) - 1 if signed else 2**bits - 1
        self.alpha = nn.Parameter(torch.ones(1))

    def start(self, x: torch.Tensor) -> None:
        self.width.copy_(x.abs().max().float().clamp_min(1e-6))

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = Clipped.apply(x, self.alpha.clamp_min(1e-4) * self.width, self.high, self.signed)
        return value

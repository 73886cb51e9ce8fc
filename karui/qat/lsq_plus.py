"""LSQ+ (Bhalgat et al., arXiv 2004.09576): step size and offset learned, for activations that are not symmetric around zero.

    value = clamp(round((x - beta) / s), n, p) s + beta                                           (eq. 3, 4)
    d value / d s    = round(x') - x'  inside, n or p where clipped,  x' = (x - beta) / s             (eq. 5)
    d value / d beta = 0  inside, 1 where clipped                                                    (eq. 6)
    start of weights      s = max(|mean - 3 std|, |mean + 3 std|) / 2^(b-1)                            (section 4.2)
    start of activations  s, beta from the range of the first batch                                  (section 4.2)

Weights on an affine grid learn the offset as a zero point, beta = -z s with z rounded straight through to the integer that is
stored; on a symmetric grid they learn s alone, as in the paper. They start from the scale (and zero point) of least squared
error, as in `lsq`; `paper` is the rule above. Gradients of s and beta are scaled by 1 / sqrt(n Qp) as in LSQ.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.grid import grouped
from karui.qat.first_batch import FirstBatchRange
from karui.qat.lsq import LSQ, Stored, codes_on


class LearnedRange(torch.autograd.Function):
    """(x, step, beta) -> value; step and beta broadcast against x and get their gradients summed to their own shape."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, step: torch.Tensor, beta: torch.Tensor, low: int, high: int, gradient_scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(x, step, beta)
        ctx.range, ctx.gradient_scale = (low, high), gradient_scale
        return torch.round((x - beta) / step).clamp(low, high) * step + beta

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, step, beta = ctx.saved_tensors
        low, high = ctx.range
        ratio = (x - beta) / step
        codes = ratio.round()
        clipped = codes.clamp(low, high)
        inside = clipped == codes
        grad_step = torch.where(inside, clipped - ratio, clipped) * grads[0]
        grad_beta = ~inside * grads[0]
        return (
            grads[0] * inside, grad_step.sum_to_size(step.shape) * ctx.gradient_scale,
            grad_beta.sum_to_size(beta.shape) * ctx.gradient_scale, None, None, None,
        )  # fmt: skip


class _Zero(torch.autograd.Function):
    """A zero point rounded to the integer that is stored; gradient straight through."""

    @staticmethod
    def forward(ctx: Any, zero: torch.Tensor, high: int) -> torch.Tensor:
        return zero.round().clamp(0, high)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class LSQPlus(LSQ):
    """Learned `step` and, on affine grids, learned `offset` [R, G], the zero point before rounding."""

    def __init__(self, w: torch.Tensor, spec: QuantSpec, *, start: str = "search", name: str = "tensor") -> None:
        super().__init__(w, spec, start=start, name=name)
        zero: Any = getattr(self, "zero", None)
        if zero is not None:
            self.offset = nn.Parameter(zero.float())
            self.zero = None
        if zero is not None or start != "paper":
            return
        x = grouped(w.detach().float(), spec)
        mean, spread = x.mean(-1), 3 * x.std(-1, unbiased=False)
        wide = torch.maximum((mean - spread).abs(), (mean + spread).abs()) / 2 ** (spec.bits - 1)
        self.step = nn.Parameter(Stored.apply(wide, spec))

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        if self.spec.symmetric:
            return super().forward(w)
        low, high = self.spec.code_range
        step = Stored.apply(self.step, self.spec).unsqueeze(-1)
        zero = _Zero.apply(self.offset, high).unsqueeze(-1)
        value: torch.Tensor = _Affine.apply(grouped(w.float(), self.spec), step, zero, low, high, self.gradient_scale)
        return value.reshape(w.shape).to(w.dtype)

    @torch.no_grad()
    def codes(self, w: torch.Tensor) -> QTensor:
        if self.spec.symmetric:
            return super().codes(w)
        zero = _Zero.apply(self.offset, self.spec.code_range[1]).to(torch.uint8)
        return codes_on(w, self.spec, Stored.apply(self.step, self.spec), zero)


class _Affine(torch.autograd.Function):
    """`LearnedRange` with beta = -z s for an integer z: computed as the stored grid computes it, bit for bit."""

    @staticmethod
    def forward(
        ctx: Any, w: torch.Tensor, step: torch.Tensor, zero: torch.Tensor, low: int, high: int, gradient_scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(w, step, zero)
        ctx.range, ctx.gradient_scale = (low, high), gradient_scale
        return ((w / step).round().add_(zero).clamp_(low, high) - zero) * step

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        w, step, zero = ctx.saved_tensors
        low, high = ctx.range
        ratio = w / step
        codes = ratio.round() + zero
        clipped = codes.clamp(low, high)
        inside = clipped == codes
        grad_step = torch.where(inside, clipped - zero - ratio, clipped - zero) * grads[0]
        # value = (low - z) s where clipped, so d value / d z = -s there
        grad_zero = ~inside * grads[0] * -step
        scale = ctx.gradient_scale
        return (
            grads[0] * inside, grad_step.sum_to_size(step.shape) * scale, grad_zero.sum_to_size(zero.shape) * scale,
            None, None, None,
        )  # fmt: skip


class LSQPlusActivations(FirstBatchRange):
    """Learned `step` and `beta`, one of each for the whole tensor, from the first batch's smallest and largest value: s is
    step * width / (2^b - 1), the offset beta * width."""

    def __init__(self, bits: int = 8) -> None:
        super().__init__()
        self.high = 2**bits - 1
        self.step, self.beta = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def start(self, x: torch.Tensor) -> None:
        low, high = x.min().float(), x.max().float()
        self.width.copy_((high - low).clamp_min(1e-6))
        self.beta.copy_(low / self.width)

    def rounded(self, x: torch.Tensor) -> torch.Tensor:
        step, beta = self.step.clamp_min(1e-4) * (self.width / self.high), self.beta * self.width
        value: torch.Tensor = LearnedRange.apply(x, step, beta, 0, self.high, 1 / math.sqrt(x.numel() * self.high))
        return value

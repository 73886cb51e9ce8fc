"""LSQ (Esser et al., arXiv 1902.08153): the step size of a grid learned by gradient descent, beside the weights.

    value = round(clip(w / s, -Qn, Qp)) s                                                        (eq. 1, 2)
    d value / d s = round(w / s) - w / s  inside the range,  -Qn or Qp  where it is clipped        (eq. 3)
    d value / d w = 1  inside the range,  0  where it is clipped                                   (eq. 5)
    gradient of s scaled by  1 / sqrt(n Qp),  n values per step size                               (section 2.2)
    start  s = 2 mean|w| / sqrt(Qp)                                                                (section 2.1)

A zero point z shifts the range: Qn = z, Qp = 2^b - 1 - z. Departures: one step per group, not per layer, if the grid says so; the
step is rounded to its storage dtype before use (straight through), so that training sees the stored grid; the range
is the symmetric grid's own, with the spare negative code; the start is the step that errs least on the weights, because the
paper's is far too wide at 4 bits (on a normal distribution .6 of its deviation, .33 errs least) and a short training never
gets it down.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import quantize
from karui.kernels.quantize.grid import DTYPES, grouped, stored_scale
from karui.qat.fake import WeightQuantizer
from karui.qat.grids import searched

STARTS = ("search", "range", "paper")
_CHUNK = 1 << 17  # values per piece: the backward pass makes some ten sweeps over each, so a piece should stay in the cache


class LearnedStep(torch.autograd.Function):
    """(w [R, G, n], step [R, G], zero [R, G, 1] or None) -> value [R, G, n]; differentiable in w and step, see the equations."""

    @staticmethod
    def forward(
        ctx: Any, w: torch.Tensor, step: torch.Tensor, zero: torch.Tensor | None, low: int, high: int, gradient_scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(w, step, zero)
        ctx.range, ctx.gradient_scale = (low, high), gradient_scale
        out = torch.empty_like(w)
        for part in _pieces(w):
            s = _divisor(step[part])
            codes = torch.div(w[part], s, out=out[part]).round_()
            if zero is not None:
                codes.add_(zero[part]).clamp_(low, high).sub_(zero[part])
            else:
                codes.clamp_(low, high)
            codes.mul_(s)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        w, step, zero = ctx.saved_tensors
        (low, high), grad = ctx.range, grads[0].contiguous()
        grad_w, grad_step = torch.empty_like(w), torch.empty_like(step)
        for part in _pieces(w):
            least, most = (low, high) if zero is None else (low - zero[part], high - zero[part])
            ratio = w[part] / _divisor(step[part])
            codes = ratio.round()
            clipped = codes.clamp(least, most)
            inside = clipped == codes
            if ctx.needs_input_grad[1]:  # d value / d s: codes - ratio inside, the clipped code outside
                grad_step[part] = (clipped.addcmul_(ratio, inside.to(ratio.dtype), value=-1) * grad[part]).sum(-1)
            torch.mul(grad[part], inside, out=grad_w[part])
        return grad_w, grad_step.mul_(ctx.gradient_scale) if ctx.needs_input_grad[1] else None, None, None, None, None


def _pieces(w: torch.Tensor) -> list[slice]:
    rows = max(1, _CHUNK // max(1, w[0].numel()))
    return [slice(i, i + rows) for i in range(0, len(w), rows)]


def _divisor(step: torch.Tensor) -> torch.Tensor:
    s = step.unsqueeze(-1)
    return s.masked_fill(s == 0, 1.0)


class Stored(torch.autograd.Function):
    """A scale rounded to the dtype it is stored in, as fp32; gradient straight through."""

    @staticmethod
    def forward(ctx: Any, scale: torch.Tensor, spec: QuantSpec) -> torch.Tensor:
        return stored_scale(scale, torch.ones_like(scale, dtype=torch.bool), spec).float()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class LSQ(WeightQuantizer):
    """Learned step sizes `step` [R, G] of a symmetric or affine integer grid; affine zero points stay where the range put them.

    Args:
        w: [out, in] the weight at the start.
        start: `search`: the scale (and zero point) with the least squared error of each group, which may be negative;
            `range`: the grid's own absmax or min/max rule; `paper`: 2 mean|w| / sqrt(Qp), on affine grids as `range`; or
            given codes, whose scale and zero points are taken over.
    """

    step: nn.Parameter

    def __init__(self, w: torch.Tensor, spec: QuantSpec, *, start: str | QTensor = "search", name: str = "tensor") -> None:
        super().__init__()
        if spec.format != "int":
            raise UnsupportedError(
                f"{name}: LSQ learns the step of an int grid, not of {spec}; use w2 to w8, or bitnet_158 for w1.58."
            )
        if start not in STARTS and not isinstance(start, QTensor):
            raise KaruiError(f"{name}: unknown start {start!r} of the step sizes; starts: {', '.join(STARTS)}.")
        found = start if isinstance(start, QTensor) else _found(w, spec, start, name)
        step = found.scale.float()
        if start == "paper" and spec.symmetric:
            step = 2 * grouped(w.detach().float(), spec).abs().mean(-1) / math.sqrt(spec.code_range[1])
        self.spec, self.name = spec, name
        self.step = nn.Parameter(Stored.apply(step, spec))
        self.register_buffer("zero", None if found.zero is None else found.zero.to(torch.uint8))
        per_step = w.numel() / self.step.numel()
        self.gradient_scale = 1 / math.sqrt(per_step * spec.code_range[1])

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        zero: Any = self.zero
        low, high = self.spec.code_range
        shifts = None if zero is None else zero.float().unsqueeze(-1)
        x = grouped(w.float().reshape(-1, w.shape[-1]), self.spec)
        value: torch.Tensor = LearnedStep.apply(x, Stored.apply(self.step, self.spec), shifts, low, high, self.gradient_scale)
        return value.reshape(w.shape).to(w.dtype)

    def codes(self, w: torch.Tensor) -> QTensor:
        zero: Any = self.zero
        return codes_on(w, self.spec, Stored.apply(self.step.detach(), self.spec), zero)


def _found(w: torch.Tensor, spec: QuantSpec, start: str, name: str) -> QTensor:
    w = w.detach()
    return searched(w.float(), spec, name=name) if start == "search" else quantize(w, spec, name=name)


def codes_on(w: torch.Tensor, spec: QuantSpec, step: torch.Tensor, zero: torch.Tensor | None) -> QTensor:
    """Codes of w [out, in] for steps [R, G] that are already rounded to storage, as `LearnedStep` rounds them."""
    low, high = spec.code_range
    ratio = (grouped(w.detach().float().reshape(-1, w.shape[-1]), spec) / _divisor(step)).round_()
    if zero is not None:
        ratio += zero.float().unsqueeze(-1)
    codes = ratio.clamp_(low, high).reshape(w.shape).to(torch.int8 if spec.symmetric else torch.uint8)
    return QTensor(codes=codes, scale=step.to(DTYPES[spec.scale_dtype]), zero=zero, spec=spec, shape=tuple(w.shape))

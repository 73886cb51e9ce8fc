"""SEQ, the stretched elastic quantizer of ParetoQ (Liu et al., arXiv 2502.02631), for 2 bits and ternary weights.

    x = clip(w / alpha, -0.99, 0.99)
    value = alpha (round(x k - c) + c) / k     2 bit: k = 2, c = 1/2: +-1/4, +-3/4;  ternary: k = 3/2, c = 0: 0, +-2/3
    d value / d w = 1 inside the clip, 0 outside
    d value / d alpha = (level - w / alpha) inside, -+(k - c) / k where it is clipped;  scaled by  1 / sqrt(n Qp) as in LSQ
    start  alpha = max|w| of the group

Balanced levels without a zero use all four codes of 2 bits, which is what wins at that width. The stored grids have integer codes
around zero, so the 2-bit levels are kept as the odd codes -3, -1, 1, 3 of a 3-bit grid with scale alpha / 4: exact, a bit wider
than it needs to be. Ternary codes have scale 2 alpha / 3. Qp: the levels above zero of the plain grid of that width, 1 for both.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from karui.configs.errors import UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.grid import DTYPES, grouped
from karui.qat.fake import WeightQuantizer
from karui.qat.lsq import Stored

CLIP = 0.99


class Stretched(torch.autograd.Function):
    """(w [R, G, n], scale [R, G] of the codes, ternary) -> value [R, G, n]; differentiable in both, see the equations."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor, scale: torch.Tensor, ternary: bool, gradient_scale: float) -> torch.Tensor:
        ctx.save_for_backward(w, scale)
        ctx.ternary, ctx.gradient_scale = ternary, gradient_scale
        return stretched_codes(w, scale, ternary) * scale.unsqueeze(-1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        w, scale = ctx.saved_tensors
        span = 1.5 if ctx.ternary else 4.0  # alpha in units of the scale
        x = w / (scale * span).unsqueeze(-1)
        inside = x.abs() <= CLIP
        level = stretched_codes(w, scale, ctx.ternary) / span
        slope = torch.where(inside, level - x, level)
        # alpha = span * scale, so d value / d scale = span * d value / d alpha
        grad_scale = (slope * grads[0]).sum(-1) * (span * ctx.gradient_scale)
        return grads[0] * inside, grad_scale, None, None


def stretched_codes(w: torch.Tensor, scale: torch.Tensor, ternary: bool) -> torch.Tensor:
    """Codes as floats: -3, -1, 1, 3, or -1, 0, 1."""
    span, levels, shift = (1.5, 1.5, 0.0) if ternary else (4.0, 2.0, 0.5)
    x = (w / (scale * span).unsqueeze(-1)).clamp(-CLIP, CLIP)
    return ((x * levels - shift).round() + shift) * (1.0 if ternary else 2.0)


class SEQ(WeightQuantizer):
    """Learned `scale` [R, G] of the stored codes; `spec` is the stored grid (w3.. for w2.., see the module).

    Raises:
        UnsupportedError: another grid than symmetric 2 bit and ternary.
    """

    def __init__(self, w: torch.Tensor, spec: QuantSpec, *, name: str = "tensor") -> None:
        super().__init__()
        self.ternary = spec.format == "ternary"
        if not self.ternary and not (spec.format == "int" and spec.bits == 2 and spec.symmetric):
            raise UnsupportedError(f"{name}: SEQ serves w2 and w1.58 grids, not {spec}; use lsq for it.")
        self.spec = spec if self.ternary else replace(spec, bits=3)
        alpha = grouped(w.detach().float(), spec).abs().amax(-1)
        self.scale = nn.Parameter(Stored.apply(alpha / (1.5 if self.ternary else 4.0), spec))
        self.gradient_scale = 1 / math.sqrt(w.numel() / self.scale.numel())

    def forward(self, w: torch.Tensor) -> torch.Tensor:
        scale = Stored.apply(self.scale, self.spec)
        value: torch.Tensor = Stretched.apply(grouped(w.float(), self.spec), scale, self.ternary, self.gradient_scale)
        return value.reshape(w.shape).to(w.dtype)

    @torch.no_grad()
    def codes(self, w: torch.Tensor) -> QTensor:
        scale = Stored.apply(self.scale, self.spec)
        codes = stretched_codes(grouped(w.detach().float(), self.spec), scale, self.ternary).reshape(w.shape).to(torch.int8)
        stored = scale.to(DTYPES[self.spec.scale_dtype])
        return QTensor(codes=codes, scale=stored, zero=None, spec=self.spec, shape=tuple(w.shape))

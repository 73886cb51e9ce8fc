"""LoftQ (arXiv 2310.08659, algorithm 1): a quantized base and factors that together are close to the unquantized weight.

    R_0 = W;   for t in 1..T:   Q_t = q(R_(t-1));   L_t, R'_t = SVD_r(W - Q_t);   R_t = W - L_t R'_t

The base is Q_T and the factors are L_T R'_T. Each side gets the root of the singular values. The layer adds s B A, so B A is
L R' / s: without that division the start is wrong by the factor s (peft's own LoftQ leaves it out; at s = 2 one step then
gains nothing at all). Any grid works, since q is `karui.kernels.quantize`.
"""

from __future__ import annotations

import torch

from karui.adapters.start import Start, halves
from karui.configs.quantspec import QuantSpec
from karui.kernels.lora.residual import residual
from karui.kernels.quantize import quantize


def loftq(weight: torch.Tensor, spec: QuantSpec, *, rank: int, scaling: float, steps: int = 5, name: str = "linear") -> Start:
    """The start for one weight [out, in]; raises what `quantize` raises, with `name` in the message."""
    w = weight.detach().float()
    u = v = left = right = None
    for _ in range(steps):
        u, v = left, right  # what the grid of this step was laid over
        over = w if u is None or v is None else residual(w, u, v, scaling)
        left, right = halves(w - quantize(over, spec, name=name).dequantize(), rank, scaling)
    assert left is not None and right is not None
    return Start(a=right, b=left, scaling=scaling, u=u, v=v)

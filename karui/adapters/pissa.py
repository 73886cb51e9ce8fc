"""PiSSA (arXiv 2404.02948): train the principal part of a weight, freeze the rest.

    s B A = U_r S_r V_r^T (the largest singular triples, S split evenly),   base = W - s B A              (eq. 2 to 4)

On a quantized base the rest is what gets rounded (QPiSSA, section 4), which costs less than rounding W because its range is
smaller. Further steps (section 4, "5 iterations" in its table) take the principal part of W - Q and round anew:

    P_t = SVD_r(W - Q_(t-1)),  Q_0 = 0;   Q_t = q(W - P_t)
"""

from __future__ import annotations

import torch

from karui.adapters.start import Start, halves
from karui.configs.quantspec import QuantSpec
from karui.kernels.lora.residual import residual
from karui.kernels.quantize import quantize


def pissa(weight: torch.Tensor, spec: QuantSpec, *, rank: int, scaling: float, steps: int = 1, name: str = "linear") -> Start:
    """The start for one weight [out, in]; `spec` none: an unquantized base, for which one step is all there is."""
    w = weight.detach().float()
    left, right = halves(w, rank, scaling)
    if spec.format != "none":
        for _ in range(steps - 1):
            rounded = quantize(residual(w, left, right, scaling), spec, name=name).dequantize()
            left, right = halves(w - rounded, rank, scaling)
    return Start(a=right, b=left, scaling=scaling, u=left, v=right)

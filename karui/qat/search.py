"""Scale (and zero point) of each group by search instead of by range.

A grid that covers the largest value wastes levels on it. For every group the range is shrunk (or, at 2 bits, widened) over a set
of ratios, the candidate with the smallest weighted squared error wins, then scale and codes are refined in turn: with codes
fixed the
best scale is a least-squares fit (the alternating step of HQQ and of BiLLM-style fits). The scale is rounded to its storage dtype
before its error is measured.

    error = sum_j weight_j (w_j - q_j)^2         weight: None, or the mean square of input j (diag of GPTQ's Hessian)

A symmetric grid has one code more on the negative side. A negative scale moves it to the positive side (llama.cpp's Q4_0 does the
same); `signed` lets the search use that freedom, worth most at 2 bits.
"""

from __future__ import annotations

import torch

from karui.configs.errors import UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels import rounding
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.grid import grouped, inverse
from karui.kernels.quantize.integer import find_range


def search_scale(
    w: torch.Tensor, spec: QuantSpec, *, weight: torch.Tensor | None = None, steps: int = 24, refine: int = 2, signed: bool = True
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Best scale [R, G] in its storage dtype and zero point [R, G] uint8 (affine) for w [R, in] fp32.

    Args:
        weight: [in] importance of each input, non-negative; all zero counts as plain.
        steps: ratios tried; refine: least-squares rounds after that.

    Raises:
        UnsupportedError: the grid is not an integer grid.
    """
    if spec.format != "int":
        raise UnsupportedError(f"a scale search works on int grids, not on {spec}.")
    x = grouped(w, spec)
    start, zero = find_range(x, spec)
    h = None
    if weight is not None and float(weight.sum()) != 0:
        h = weight.float()
        h = h.expand_as(w).reshape(x.shape) if spec.granularity == "tensor" else h.reshape(1, *x.shape[1:])
    top = 1.5 if spec.symmetric and spec.bits == 2 else 1.1 if spec.symmetric and spec.bits == 3 else 1.0
    bottom = {2: 0.35, 3: 0.45, 4: 0.5}.get(spec.bits, 0.7)
    ratios = torch.linspace(bottom, top, steps).tolist()
    signs = 2 if signed and spec.symmetric and spec.bits < 8 else 1
    return rounding.search_scale(x, h, start, zero, spec, ratios=ratios, signs=signs, refine=refine)


def encode(w: torch.Tensor, spec: QuantSpec, scale: torch.Tensor, zero: torch.Tensor | None, shape: tuple[int, ...]) -> QTensor:
    """Nearest codes of w [R, in] on a given grid; like `quantize(w, spec, scale=, zero=)` for scales already in storage dtype."""
    low, high = spec.code_range
    codes = torch.round(grouped(w, spec) / inverse(scale).unsqueeze(-1))
    if zero is not None:
        codes += zero.float().unsqueeze(-1)
    codes = codes.clamp_(low, high).reshape(w.shape).to(torch.int8 if spec.symmetric else torch.uint8)
    return QTensor(codes=codes, scale=scale, zero=zero, spec=spec, shape=shape)


def some_rows(w: torch.Tensor, most: int = 512) -> torch.Tensor:
    """At least `most` rows of w [out, in], evenly spread, or all. Rows behave alike: a part of them chooses the same scaling of
    the inputs for a part of the work."""
    return w[:: max(1, len(w) // most)]


def weight_error(w: torch.Tensor, q: QTensor) -> float:
    """Relative squared error of a quantized weight; 0 for an all-zero weight."""
    return float((w - q.dequantize()).square().sum() / w.square().sum().clamp_min(1e-30))

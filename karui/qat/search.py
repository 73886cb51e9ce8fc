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
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.grid import DTYPES, grouped, inverse
from karui.kernels.quantize.integer import find_range

_CHUNK = 1 << 18  # values per chunk: the search makes some 20 passes over each, so it should stay in the cache


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
    if weight is None or float(weight.sum()) == 0:
        h = torch.ones((), device=w.device)
    elif spec.granularity == "tensor":
        h = weight.float().expand_as(w).reshape(1, 1, -1)
    else:
        h = weight.float().reshape(1, x.shape[1], -1)
    rows = max(1, _CHUNK // (x.shape[1] * x.shape[2]))
    scales, zeros = [], []
    for i in range(0, x.shape[0], rows):
        part = slice(i, i + rows)
        s, z = _search(x[part], h, start[part], None if zero is None else zero[part], spec, steps, refine, signed)
        scales.append(s)
        zeros.append(z)
    return torch.cat(scales), None if zero is None else torch.cat([z for z in zeros if z is not None])


def _search(
    x: torch.Tensor,
    h: torch.Tensor,
    start: torch.Tensor,
    zero: torch.Tensor | None,
    spec: QuantSpec,
    steps: int,
    refine: int,
    signed: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    low, high = spec.code_range
    dtype = DTYPES[spec.scale_dtype]
    best_scale, best_zero = start.clone(), None if zero is None else zero.clone()
    offset = None if zero is None else zero.float().unsqueeze(-1)
    best = _error(x, h, start, offset, low, high)[0]
    top = 1.5 if spec.symmetric and spec.bits == 2 else 1.1 if spec.symmetric and spec.bits == 3 else 1.0
    bottom = {2: 0.35, 3: 0.45, 4: 0.5}.get(spec.bits, 0.7)
    signs = (1.0, -1.0) if signed and spec.symmetric and spec.bits < 8 else (1.0,)
    for ratio in torch.linspace(bottom, top, steps).tolist():
        for sign in signs:
            scale = (start.float() * (ratio * sign)).to(dtype)
            if offset is not None:  # the zero point follows the shrunk lower end
                z = torch.round(-(-offset.squeeze(-1) * start.float() * ratio) / inverse(scale)).clamp(0, high)
            err = _error(x, h, scale, None if offset is None else z.unsqueeze(-1), low, high)[0]
            better = (err < best) & (scale != 0)
            best = torch.where(better, err, best)
            best_scale = torch.where(better, scale, best_scale)
            if best_zero is not None:
                best_zero = torch.where(better, z.to(torch.uint8), best_zero)
    for _ in range(refine):
        shift = None if best_zero is None else best_zero.float().unsqueeze(-1)
        _, codes = _error(x, h, best_scale, shift, low, high)
        if shift is not None:
            codes = codes - shift
        weighted = codes * h
        scale = ((weighted * x).sum(-1) / (weighted * codes).sum(-1).clamp_min(1e-30)).to(dtype)
        err = _error(x, h, scale, shift, low, high)[0]
        better = (err < best) & (scale != 0) & torch.isfinite(scale)
        best = torch.where(better, err, best)
        best_scale = torch.where(better, scale, best_scale)
    return best_scale, best_zero


def _error(
    x: torch.Tensor, h: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, low: int, high: int
) -> tuple[torch.Tensor, torch.Tensor]:
    step = inverse(scale).unsqueeze(-1)
    codes = torch.round(x / step)
    if zero is not None:
        codes += zero
    codes.clamp_(low, high)
    value = codes if zero is None else codes - zero
    delta = torch.addcmul(x, value, step, value=-1.0)
    return (delta.square_() * h).sum(-1), codes


def encode(w: torch.Tensor, spec: QuantSpec, scale: torch.Tensor, zero: torch.Tensor | None, shape: tuple[int, ...]) -> QTensor:
    """Nearest codes of w [R, in] on a given grid; like `quantize(w, spec, scale=, zero=)` for scales already in storage dtype."""
    low, high = spec.code_range
    codes = torch.round(grouped(w, spec) / inverse(scale).unsqueeze(-1))
    if zero is not None:
        codes += zero.float().unsqueeze(-1)
    codes = codes.clamp_(low, high).reshape(w.shape).to(torch.int8 if spec.symmetric else torch.uint8)
    return QTensor(codes=codes, scale=scale, zero=zero, spec=spec, shape=shape)


def weight_error(w: torch.Tensor, q: QTensor) -> float:
    """Relative squared error of a quantized weight; 0 for an all-zero weight."""
    return float((w - q.dequantize()).square().sum() / w.square().sum().clamp_min(1e-30))

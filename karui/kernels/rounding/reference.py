"""The searches in plain torch, any device. The error of a candidate is taken with the scale as it will be stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from karui.configs.quantspec import QuantSpec
from karui.kernels.quantize import elements
from karui.kernels.quantize.grid import DTYPES, inverse

_CHUNK = 1 << 18  # values per chunk: the search makes some 50 passes over each, so it should stay in the cache


def search_scale(
    x: torch.Tensor, h: torch.Tensor | None, start: torch.Tensor, zero: torch.Tensor | None, spec: QuantSpec,
    ratios: Sequence[float], signs: int, refine: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """See `karui.kernels.rounding.search_scale`."""
    rows = max(1, _CHUNK // (x.shape[1] * x.shape[2]))
    scales, zeros = [], []
    weight = torch.ones((), device=x.device) if h is None else h
    for i in range(0, x.shape[0], rows):
        part = slice(i, i + rows)
        s, z = _search(x[part], weight, start[part], None if zero is None else zero[part], spec, ratios, signs, refine)
        scales.append(s)
        zeros.append(z)
    return torch.cat(scales), None if zero is None else torch.cat([z for z in zeros if z is not None])


def _search(
    x: torch.Tensor, h: torch.Tensor, start: torch.Tensor, zero: torch.Tensor | None, spec: QuantSpec, ratios: Sequence[float],
    signs: int, refine: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    low, high = spec.code_range
    dtype = DTYPES[spec.scale_dtype]
    best_scale, best_zero = start.clone(), None if zero is None else zero.clone()
    offset = None if zero is None else zero.float().unsqueeze(-1)
    best = _error(x, h, start, offset, low, high)[0]
    for ratio in ratios:
        for sign in (1.0, -1.0)[:signs]:
            scale = (start.float() * (ratio * sign)).to(dtype)
            if offset is not None:  # the zero point follows the shrunk lower end
                z = torch.round(offset.squeeze(-1) * start.float() * ratio / inverse(scale)).clamp(0, high)
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


def round_columns(
    work: torch.Tensor, rest: torch.Tensor, step: torch.Tensor, zero: torch.Tensor | None, low: int, high: int,
    element: str = "int",
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """See `karui.kernels.rounding.round_columns`."""
    work = work.clone()
    codes, err = torch.empty_like(work), torch.empty_like(work)
    for j in range(len(work)):
        q = work[j] / step[j]
        if element != "int":
            q = elements.decode(elements.encode(q, elements.ELEMENTS[element]), elements.ELEMENTS[element])
        else:
            q = torch.round(q) if zero is None else torch.round(q).add_(zero[j])
            q.clamp_(low, high)
        codes[j] = q
        value = q if zero is None else q - zero[j]
        torch.addcmul(work[j], value, step[j], value=-1.0, out=err[j])
        if j + 1 < len(work):
            work[j + 1 :].addr_(rest[j, j + 1 :], err[j], alpha=-1.0)
    return codes, err

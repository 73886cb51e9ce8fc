"""Every grid as (steps, rounding rule): what GPTQ and a scale search need to know of it.

    value = round_to_element(w / step) * step        step: one number per weight, shared by a group, never changed afterwards

    int, ternary       whole numbers between the code range's ends (shifted by the zero point on affine grids)
    fp8, mxfp8         E4M3: 3 mantissa bits, at most 448          mxfp4, nvfp4    E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6

Scales are searched by (weighted) squared error around each format's own rule: ternary from mean|w| over 0.5 to 1.6 of it; MXFP4
over the neighbouring powers of two; NVFP4 over E4M3 scales from 0.7 to 1.2 of the rule's, the global scale staying. An FP8 scale
only moves the exponent of a float, so it is left alone. NF4 and binary have rules of their own and serve rounding to nearest.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from karui.configs.errors import UnsupportedError
from karui.configs.quantspec import QuantSpec
from karui.kernels import rounding
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize import checked_rows, elements, quantize
from karui.kernels.quantize.grid import grouped, inverse
from karui.kernels.quantize.integer import find_range
from karui.kernels.quantize.microscaling import e8m0_value
from karui.qat.methods import STEPPED
from karui.qat.search import encode, search_scale

SOLVABLE = STEPPED
_ELEMENT: dict[str, rounding.Element] = {"fp8": "e4m3", "mxfp8": "e4m3", "mxfp4": "e2m1", "nvfp4": "e2m1"}


def element(spec: QuantSpec) -> rounding.Element:
    """How values in units of the step are rounded: `int`, `e4m3` or `e2m1`."""
    return _ELEMENT.get(spec.format, "int")


def check_solvable(spec: QuantSpec, method: str, name: str) -> None:
    """Raise `UnsupportedError` for a grid without a fixed step per weight."""
    if spec.format not in SOLVABLE:
        raise UnsupportedError(f"{name}: {method} serves the grids {', '.join(SOLVABLE)}, not {spec}; use rtn for it.")


def searched(
    w: torch.Tensor, spec: QuantSpec, *, weight: torch.Tensor | None = None, steps: int = 24, signed: bool = True,
    name: str = "tensor",
) -> QTensor:  # fmt: skip
    """w [out, in] fp32 rounded to nearest on the grid whose scales err least; `weight` [in] weighs the inputs.

    Grids without a search are rounded by their own rule.
    """
    if spec.format == "int":
        checked_rows(w, spec, name)
        scale, zero = search_scale(w, spec, weight=weight, steps=steps, signed=signed)
        return encode(w, spec, scale, zero, tuple(w.shape))
    plain = quantize(w, spec, name=name)
    if spec.format == "ternary":
        x, h = grouped(w, spec), _importance(weight, w, spec)
        ratios = torch.linspace(0.5, 1.6, steps).tolist()
        scale, _ = rounding.search_scale(x, h, plain.scale, None, spec, ratios=ratios, refine=2)
        codes = torch.round(x / inverse(scale).unsqueeze(-1)).clamp_(-1, 1).reshape(w.shape).to(torch.int8)
        return replace(plain, codes=codes, scale=scale)
    if spec.format not in ("mxfp4", "nvfp4"):
        return plain
    best = plain
    loss = _loss(w, plain, weight)
    for other in _neighbours(plain):
        candidate = replace(plain, scale=other)
        candidate = replace(candidate, codes=nearest(w, candidate))
        error = _loss(w, candidate, weight)
        better = error < loss
        loss = torch.where(better, error, loss)
        picked = torch.where(better, other.view(torch.uint8), best.scale.view(torch.uint8)).view(other.dtype)
        wide = better.repeat_interleave(w.shape[1] // better.shape[1], 1)
        best = replace(best, scale=picked, codes=torch.where(wide, candidate.codes, best.codes))
    return best


def ruled(w: torch.Tensor, spec: QuantSpec, *, name: str = "tensor") -> QTensor:
    """w on the grid whose scales follow from the range (int) or the format's own rule."""
    if spec.format != "int":
        return quantize(w, spec, name=name)
    return encode(w, spec, *find_range(grouped(w, spec), spec), tuple(w.shape))


def step_of(q: QTensor) -> torch.Tensor:
    """[out, in] fp32: the factor between a code's value and the weight; 1 where a group has the scale 0."""
    rows, width = q.shape
    if q.spec.format == "nvfp4":
        assert q.extra is not None
        step = q.scale.float() / q.extra["global_scale"]
    elif q.spec.format in ("mxfp4", "mxfp8"):
        step = e8m0_value(q.scale.view(torch.uint8))
    else:
        step = q.scale.float()
    step = torch.where(step == 0, torch.ones_like(step), step).expand(rows, -1)
    return step.repeat_interleave(width // step.shape[1], 1)


def zero_of(q: QTensor) -> torch.Tensor | None:
    """[out, in] fp32 zero points of an affine grid, else None."""
    if q.zero is None:
        return None
    zero = q.zero.float().expand(q.shape[0], -1)
    return zero.repeat_interleave(q.shape[1] // zero.shape[1], 1)


def coded(q: QTensor, values: torch.Tensor) -> QTensor:
    """`q` with other codes: `values` [out, in] fp32 are elements of the grid (codes of int and ternary grids)."""
    kind = element(q.spec)
    if kind == "e2m1":
        codes = elements.encode(values, elements.E2M1)
    elif kind == "e4m3":
        codes = values.to(torch.float8_e4m3fn)
    else:
        codes = values.to(torch.int8 if q.spec.symmetric else torch.uint8)
    return replace(q, codes=codes.contiguous())


def nearest(w: torch.Tensor, q: QTensor) -> torch.Tensor:
    """uint8 E2M1 codes of w on q's scales."""
    return elements.encode((w / step_of(q)).clamp(-6, 6), elements.E2M1)


def _neighbours(q: QTensor) -> list[torch.Tensor]:
    """Scales to try, each a whole tensor of its storage dtype."""
    if q.spec.format == "mxfp4":
        byte = q.scale.view(torch.uint8).int()
        return [(byte + d).clamp(0, 254).to(torch.uint8).view(q.scale.dtype) for d in (-1, 1)]
    return [(q.scale.float() * r).clamp(max=448).to(q.scale.dtype) for r in (0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.05, 1.1, 1.2)]


def _loss(w: torch.Tensor, q: QTensor, weight: torch.Tensor | None) -> torch.Tensor:
    """[out, G] squared error of each group."""
    error = (w - q.dequantize()).square()
    if weight is not None:
        error = error * weight
    return grouped(error, q.spec).sum(-1)


def _importance(weight: torch.Tensor | None, w: torch.Tensor, spec: QuantSpec) -> torch.Tensor | None:
    if weight is None or float(weight.sum()) == 0:
        return None
    h = weight.float()
    return h.expand_as(w).reshape(1, 1, -1) if spec.granularity == "tensor" else h.reshape(1, *grouped(w, spec).shape[1:])

"""Integer grids, 2 to 8 bits, symmetric and affine, per tensor, channel or group.

    symmetric  value = code * scale             code in -2^(b-1) .. 2^(b-1)-1, scale = absmax / (2^(b-1) - 1/2)
               8 bit: code in +-127, scale = absmax / 127
    affine     value = (code - zero) * scale    code in 0 .. 2^b-1, scale = (max - min) / (2^b - 1), range holds zero

The half step in the symmetric scale lets both ends of the range err by half a step instead of wasting one code (the
convention of compressed-tensors). Rounding is half to even.
"""

from __future__ import annotations

from typing import Any

import torch

from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.grid import grouped, inverse, stored_scale


def encode(
    rows: torch.Tensor, spec: QuantSpec, scale: torch.Tensor | None = None, zero: torch.Tensor | None = None
) -> dict[str, Any]:
    """[R, in] fp32 -> codes, scale, zero of a `QTensor`; a given scale (and zero) is rounded to storage and used."""
    low, high = spec.code_range
    x = grouped(rows, spec)
    if scale is None:
        scale, zero = find_range(x, spec)
    else:
        scale = stored_scale(scale.float(), torch.ones_like(scale, dtype=torch.bool), spec)
        zero = None if zero is None else zero.round().clamp(0, high).to(torch.uint8)
    codes = torch.round(x / inverse(scale).unsqueeze(-1))
    if zero is not None:
        codes += zero.float().unsqueeze(-1)
    codes = codes.clamp_(low, high).reshape(rows.shape)
    return {"codes": codes.to(torch.int8 if spec.symmetric else torch.uint8), "scale": scale, "zero": zero}


def decode(q: QTensor) -> torch.Tensor:
    """[R, in] fp32 values."""
    x = grouped(q.codes.reshape(-1, q.shape[-1]).float(), q.spec)
    if q.zero is not None:
        x = x - q.zero.float().unsqueeze(-1)
    return (x * q.scale.float().unsqueeze(-1)).reshape(-1, q.shape[-1])


def find_range(x: torch.Tensor, spec: QuantSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale [R, G] in its storage dtype and zero point [R, G] uint8 (affine) that cover groups x [R, G, n]."""
    _, high = spec.code_range
    if spec.symmetric:
        absmax = x.abs().amax(-1)
        return stored_scale(absmax / (127 if spec.bits == 8 else high + 0.5), absmax > 0, spec), None
    smallest, largest = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
    scale = stored_scale((largest - smallest) / high, largest > smallest, spec)
    return scale, torch.round(-smallest / inverse(scale)).clamp(0, high).to(torch.uint8)

"""Optimizer states in 8 bits: blocks of 256 values share an fp32 scale, their absmax (arXiv 2110.02861, section 2).

    dynamic   codes of the dynamic map: a unary exponent in tens and a linear fraction; signed, or all 256 codes positive
    fp8       E4M3 codes of value / absmax * 448

`up=True` never turns a positive value into zero: a second moment that vanished while the first did not would make a step of
first moment / eps.
"""

from __future__ import annotations

from functools import cache

import torch

from karui.kernels.quantize.elements import E4M3
from karui.kernels.quantize.nf4 import dynamic_map, nearest_entry

BLOCK = 256


def encode(x: torch.Tensor, kind: str, *, up: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 `x`, any shape -> codes of its shape (uint8, or float8_e4m3fn), scale fp32 [ceil(n/256)].

    up: `x` is not negative, takes the unsigned map, and what is positive stays so.
    """
    flat = torch.nn.functional.pad(x.reshape(-1).float(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scale = flat.abs().amax(-1)
    unit = flat / torch.where(scale > 0, scale, torch.ones_like(scale)).unsqueeze(-1)
    if kind == "fp8":
        codes = (unit * E4M3.max).to(torch.float8_e4m3fn)
        if up:
            smallest = torch.ones_like(codes.view(torch.uint8))
            codes = torch.where((unit > 0) & (codes.float() == 0), smallest, codes.view(torch.uint8)).view(torch.float8_e4m3fn)
    else:
        codes = nearest_entry(unit, _table(signed=not up).to(x.device))
        if up:
            codes = torch.where((unit > 0) & (codes == 0), 1, codes)  # the unsigned map begins with 0
    return codes.reshape(-1)[: x.numel()].view(x.shape), scale


def decode(codes: torch.Tensor, scale: torch.Tensor, *, up: bool = False) -> torch.Tensor:
    """fp32 values, the shape of `codes`."""
    if codes.dtype == torch.uint8:
        unit = _table(signed=not up).to(codes.device)[codes.int()]
    else:
        unit = codes.float() / E4M3.max
    return unit * scale.repeat_interleave(BLOCK)[: codes.numel()].view(codes.shape)


def _table(*, signed: bool) -> torch.Tensor:
    return dynamic_map() if signed else unsigned_dynamic_map()


@cache
def unsigned_dynamic_map() -> torch.Tensor:
    """The 256 sorted values of the unsigned dynamic data type: 0, 1, and twice as many fractions per decade as the signed."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (exponent + 1) + 1, dtype=torch.float32)
        values += (10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)).tolist()
    return torch.tensor(sorted(values), dtype=torch.float32)

"""Ternary and binary grids of BitNet, per tensor or per group.

    ternary  BitNet b1.58 (arXiv 2402.17764, eq. 1-3): scale = mean|W|, code = clamp(round(W / scale), -1, 1)
    binary   BitNet (arXiv 2310.11453, eq. 1-3): code = sign(W - mean W), scale = mean|W|; sign(0) = +1

The mean has the floor 1e-5 of the published training code.
"""

from __future__ import annotations

from typing import Any

import torch

from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.grid import grouped, inverse, stored_scale


def encode(rows: torch.Tensor, spec: QuantSpec) -> dict[str, Any]:
    """[R, in] fp32 -> codes int8 in -1, 0, 1 and scale of a `QTensor`."""
    x = grouped(rows, spec)
    mean_abs = x.abs().mean(-1).clamp(min=1e-5)
    scale = stored_scale(mean_abs, torch.ones_like(mean_abs, dtype=torch.bool), spec)
    if spec.format == "ternary":
        codes = torch.round(x / inverse(scale).unsqueeze(-1)).clamp_(-1, 1)
    else:
        codes = torch.where(x >= x.mean(-1, keepdim=True), 1.0, -1.0)
    return {"codes": codes.reshape(rows.shape).to(torch.int8), "scale": scale, "zero": None}


def decode(q: QTensor) -> torch.Tensor:
    """[R, in] fp32 values."""
    x = grouped(q.codes.reshape(-1, q.shape[-1]).float(), q.spec)
    return (x * q.scale.float().unsqueeze(-1)).reshape(-1, q.shape[-1])

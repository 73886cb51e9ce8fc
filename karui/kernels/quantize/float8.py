"""FP8 weights: E4M3 (largest value 448), one fp32 scale per tensor or output row; scale = absmax / 448.

Round to nearest even by torch's cast, after clamping to +-448 (the cast itself would turn overflow into NaN).
"""

from __future__ import annotations

from typing import Any

import torch

from karui.configs.quantspec import QuantSpec
from karui.kernels.qtensor import QTensor
from karui.kernels.quantize.grid import grouped, inverse, stored_scale

E4M3_MAX = 448.0


def encode(rows: torch.Tensor, spec: QuantSpec) -> dict[str, Any]:
    """[R, in] fp32 -> codes float8_e4m3fn and scale of a `QTensor`."""
    x = grouped(rows, spec)
    absmax = x.abs().amax(-1)
    scale = stored_scale(absmax / E4M3_MAX, absmax > 0, spec)
    codes = (x / inverse(scale).unsqueeze(-1)).clamp_(-E4M3_MAX, E4M3_MAX).reshape(rows.shape).to(torch.float8_e4m3fn)
    return {"codes": codes, "scale": scale, "zero": None}


def decode(q: QTensor) -> torch.Tensor:
    """[R, in] fp32 values."""
    x = grouped(q.codes.reshape(-1, q.shape[-1]).float(), q.spec)
    return (x * q.scale.float().unsqueeze(-1)).reshape(-1, q.shape[-1])
